# SPDX-License-Identifier: Apache-2.0
"""What our code calls or reads in verl and vLLM beside what it overrides: bound, never changed.

Where we count on what a function does, its source is bound. Where the call has to be possible and no more, its form is;
where attributes are read, that a class has them.
"""

from __future__ import annotations

from typing import Literal

from scalerl_verl.upstream.spec import PatchSpec, keep_original

_CORE = "vllm.v1.engine.core"
_LLM = "vllm.v1.engine.async_llm"
_OUTPUTS = "vllm.v1.engine.output_processor"
_CHECKPOINT = "verl.checkpoint_engine.base"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_SERVERS = "verl.workers.rollout.llm_server"
_ENGINES = "verl.workers.engine.base"
_VLLM_SWAP = "vLLM loads weights that were handed over before a pause, and says what each request had by then"
_VERL_PIPELINE = "verl has a mode in which generation goes on while weights are updated"
_FRONTEND = "verl asks vLLM for one answer a request"
_STEPS = "verl has hooks in its training step"
_ENGINE_REMOVAL = "verl takes the loss of an actor from the config"
_HEAD = "vLLM refuses a head_dtype that it does not apply"


def _call(
    name: str,
    module: str,
    target: str,
    why: str,
    removal: str,
    *,
    sources: tuple[str, ...] = (),
    call: str = "",
    attributes: tuple[str, ...] = (),
) -> PatchSpec:
    distribution: Literal["verl", "vllm"] = "verl" if module.startswith("verl.") else "vllm"
    return PatchSpec(
        name=f"{distribution}.{name}",
        module=module,
        target=target,
        build=keep_original,
        kind="call",
        why=why,
        distribution=distribution,
        sources=sources,
        removal=removal,
        late_ok=True,
        call=call,
        attributes=attributes,
    )


VLLM_SPECS = (
    _call(
        "engine.pause",
        _CORE,
        "EngineCoreProc.pause_scheduler",
        "A pause in the mode keep leaves every request in its place, and its future ends when no step runs.",
        _VLLM_SWAP,
        sources=(
            "882f7dc43fcdbe2883c56cb62a981fb59e10978a759cefe746e82ea8d305113e",  # 0.24.0 to 0.28.0
            "90f33a9648191d20bf0a16c02595cda234c53bec31a4cff34e645e90bf2332ee",  # 0.29.0, 0.30.0
            "70c4e916b685b5f3521162004a4ceb03d77bf8702cf69358827375cb6fae0964",  # 0.31.0 to 0.33.0
        ),
    ),
    _call(
        "engine.resume",
        _CORE,
        "EngineCore.resume_scheduler",
        "It ends a pause, and nothing else.",
        _VLLM_SWAP,
        sources=("654ad3615812ebe7ed8cbd179572a8e7b51f207f947000818381e212c6c7b0b6",),
    ),
    _call(
        "engine.recompute",
        _CORE,
        "EngineCore.reset_prefix_cache",
        "With running requests reset it makes them compute their KV again, and says whether it did.",
        _VLLM_SWAP,
        sources=("2edab8ee164507ce7b8f750398c48645d2da3335c813b22a359d300d1b8afaf9",),
    ),
    _call(
        "engine.loop",
        _CORE,
        "EngineCoreProc._process_input_queue",
        "It tells who waits for an idle engine right before it waits for a message, which the swap then has to send.",
        _VLLM_SWAP,
        sources=(
            "1ab0d2c757f4ffb9c22690d85dd59660bfbff8fde6f61ebccc98946e10aa919c",  # 0.24.0 to 0.30.0
            "6e929f1af79e75a2d3bb89aed3883bddea4ddf9c1956ba77235600e16506d2b0",  # 0.31.0, 0.32.0
            "247e12f7b6dc908f5239239ddf3ee5927282a009ed3d7d8001e18861da10b7e1",  # 0.33.0
        ),
    ),
    _call(
        "engine.parts",
        _CORE,
        "EngineCoreProc",
        "The swap sends the engine's loop a message through its queue.",
        _VLLM_SWAP,
        attributes=("input_queue",),
    ),
    _call(
        "engine.wake_up",
        "vllm.v1.engine",
        "EngineCoreRequestType",
        "The message that has no effect but that the loop goes on.",
        _VLLM_SWAP,
        attributes=("WAKEUP",),
    ),
    _call(
        "engine.scheduler",
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "All requests of an engine, by the ids that it gave them.",
        _VLLM_SWAP,
        attributes=("requests",),
    ),
    _call(
        "engine.load",
        "vllm.v1.executor.abstract",
        "Executor.collective_rpc",
        "It has every worker load the staged weights, and waits for them.",
        _VLLM_SWAP,
        call="collective_rpc(self, method, kwargs={})",
    ),
    _call(
        "request.parts",
        "vllm.v1.request",
        "Request",
        "Counts of tokens at the swap, and what a request that waits has to change for new weights.",
        _VLLM_SWAP,
        attributes=("num_output_tokens", "num_computed_tokens", "cache_salt", "block_hashes"),
    ),
    _call(
        "request.hashes",
        "vllm.v1.request",
        "Request.update_block_hashes",
        "It hashes a waiting request's prompt again, with the salt of new weights.",
        _VLLM_SWAP,
        sources=("c5173243cda71c28f365430d0464f4965a50581f69fd9802df5cf31eb52bb7f0",),
    ),
    _call(
        "server.enter",
        _LLM,
        "AsyncLLM.add_request",
        "Every request enters through it: an attribute of the engine, of ours, stands in front.",
        _VERL_PIPELINE,
        call="await add_request(self, request_id, prompt, params)",
    ),
    _call(
        "server.parts",
        _LLM,
        "AsyncLLM",
        "Calls into the engine's process, the state of requests, the settings that vLLM ended up with.",
        _VERL_PIPELINE,
        attributes=("engine_core", "output_processor", "vllm_config", "dead_error"),
    ),
    _call(
        "server.abort",
        _LLM,
        "AsyncLLM.abort",
        "Requests are aborted by the ids that vLLM gave them.",
        _VERL_PIPELINE,
        call="await abort(self, request_id, internal=True)",
    ),
    _call(
        "server.health",
        _LLM,
        "AsyncLLM.check_health",
        "It raises when the engine's process is dead.",
        _VERL_PIPELINE,
        call="await check_health(self)",
    ),
    _call(
        "server.pause",
        _LLM,
        "AsyncLLM.pause_generation",
        "Without staging the server pauses its engine, and keeps every request.",
        _VERL_PIPELINE,
        call="await pause_generation(self, mode='keep', clear_cache=False)",
    ),
    _call(
        "server.resume",
        _LLM,
        "AsyncLLM.resume_generation",
        "Without staging the server has its engine go on.",
        _VERL_PIPELINE,
        call="await resume_generation(self)",
    ),
    _call(
        "server.ask_workers",
        _LLM,
        "AsyncLLM.collective_rpc",
        "The server asks vLLM's workers what they measured, such as their head.",
        _VERL_PIPELINE,
        call="await collective_rpc(self, method)",
    ),
    _call(
        "server.ask_engine",
        "vllm.v1.engine.core_client",
        "AsyncMPClient.call_utility_async",
        "The server calls methods of ours in the engine's process.",
        _VERL_PIPELINE,
        call="await call_utility_async(self, method, salt, staged, recompute, continued)",
    ),
    _call(
        "server.outputs",
        _OUTPUTS,
        "RequestOutputCollector",
        "A request with one answer gets an empty one first, unless it has one; its id in the engine is here.",
        _FRONTEND,
        attributes=("output", "request_id"),
    ),
    _call(
        "server.put",
        _OUTPUTS,
        "RequestOutputCollector.put",
        "It wakes who waits for the answer of a request; an answer without tokens is one.",
        _FRONTEND,
        sources=("315188024c79cd1833a8dc416ae54bdd96d1ad997d5d708268adf7498f32f800",),
    ),
    _call(
        "server.empty_output",
        "vllm.outputs",
        "RequestOutput.__init__",
        "The empty answer is made with it.",
        _FRONTEND,
        call="__init__(self, request_id, None, None, None, outputs=[], finished=False)",
    ),
    _call(
        "server.request_states",
        _OUTPUTS,
        "OutputProcessor",
        "Which requests the front end knows: an abort that failed is seen here.",
        _VERL_PIPELINE,
        attributes=("request_states",),
    ),
    _call(
        "server.request_state",
        _OUTPUTS,
        "RequestState",
        "Whether a request has a token yet.",
        _VERL_PIPELINE,
        attributes=("is_prefilling",),
    ),
    _call(
        "frontend.final_only",
        "vllm.sampling_params",
        "RequestOutputKind",
        "The kind of output that is one answer a request.",
        _FRONTEND,
        attributes=("FINAL_ONLY",),
    ),
    _call(
        "frontend.parameters",
        "vllm.sampling_params",
        "SamplingParams",
        "Parameters of a request that verl does not set.",
        _FRONTEND,
        attributes=("output_kind", "detokenize", "flat_logprobs", "prompt_logprobs"),
    ),
    _call(
        "head.shard",
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbeddingShardIndices",
        "Which tokens a rank's part of the head is for, when its logits are compared with float64.",
        _HEAD,
        attributes=("num_org_elements", "org_vocab_start_index"),
    ),
    _call(
        "head.rank",
        "vllm.distributed.parallel_state",
        "get_pp_group",
        "Only the last rank of a pipeline has the head.",
        _HEAD,
        call="get_pp_group()",
    ),
)

VERL_SPECS = (
    _call(
        "weights.stream",
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine.get_per_tensor_param",
        "It takes the weights out of the module's state dict, one by one as they are asked for.",
        _VERL_PIPELINE,
        sources=("85dba5e1f2fcce35a4553df6ecf9282ec7d4c1cdcb001c82fa771b1ca25871e2",),
    ),
    _call(
        "weights.merged",
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine._merged_lora_per_tensor_param",
        "Merged adapters are handed out as it does, in the generator's dtype in the place of bf16.",
        _VERL_PIPELINE,
        sources=("a23011a4fb04030c88db94d77840930bae286bdff1cb277e292bd2c0e8184ff3",),
    ),
    _call(
        "weights.merging",
        "verl.utils.fsdp_utils",
        "merged_lora_context",
        "Adapters are merged into the weights of a sharded model, and taken out again.",
        _VERL_PIPELINE,
        call="merged_lora_context(module, backup_adapters=True)",
    ),
    _call(
        "weights.group",
        _CHECKPOINT,
        "CheckpointEngineManager.build_process_group",
        "What it does is done with a limit in time, so that a generator that dies in it ends no run.",
        _VERL_PIPELINE,
        sources=("7ee17ceae7eed9d0d32944cd5975c86f763358a7f8ffc9edb261a387fc833d8d",),
    ),
    _call(
        "weights.leave_out",
        _CHECKPOINT,
        "CheckpointEngineManager.remove_replicas",
        "Generators that died are left out.",
        _VERL_PIPELINE,
        call="remove_replicas(self, replicas)",
    ),
    _call(
        "weights.take_back",
        _CHECKPOINT,
        "CheckpointEngineManager.add_replicas",
        "Generators that were left out, and answer again, take part in the next update.",
        _VERL_PIPELINE,
        call="add_replicas(self, replicas)",
    ),
    _call(
        "weights.engine",
        _CHECKPOINT,
        "CheckpointEngineWorker.execute_checkpoint_engine",
        "Workers prepare, join and leave the group of an update through it.",
        _VERL_PIPELINE,
        call="execute_checkpoint_engine(self, method)",
    ),
    _call(
        "weights.open",
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "rebuild_ipc",
        "It opens the memory of another process on a GPU.",
        _VERL_PIPELINE,
        call="rebuild_ipc(handle, device_id)",
    ),
    _call(
        "client.acquire",
        _SERVERS,
        "LLMServerClient._acquire_server",
        "The pipeline's client takes a server for each attempt.",
        _VERL_PIPELINE,
        call="await _acquire_server(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params)",
    ),
    _call(
        "client.release",
        _SERVERS,
        "LLMServerClient._release_server",
        "The pipeline's client gives a server back after each attempt.",
        _VERL_PIPELINE,
        call="_release_server(self, server_id, request_id=request_id)",
    ),
    _call(
        "client.parts",
        _SERVERS,
        "LLMServerClient",
        "The load balancer, which counts the times that a server was out of reach.",
        _VERL_PIPELINE,
        attributes=("_load_balancer", "config"),
    ),
    _call(
        "balancer.parts",
        "verl.workers.rollout.router",
        "GlobalRequestLoadBalancer",
        "Servers that are out of reach are hidden from verl's choice for a while.",
        _VERL_PIPELINE,
        attributes=("_inflight_requests", "get_all_servers", "add_servers"),
    ),
    _call(
        "servers.create",
        _SERVERS,
        "LLMServerManager.create",
        "The pipeline starts its servers with a load balancer of ours.",
        _VERL_PIPELINE,
        call="await create(cls, config=config, load_balancer_cls=load_balancer_cls)",
    ),
    _call(
        "servers.launch",
        "verl.workers.rollout.replica",
        "RolloutReplica.init_standalone",
        "The pipeline launches a generator in the place of a dead one, whose ``resource_pool`` it gives back.",
        _VERL_PIPELINE,
        call="await init_standalone(self)",
    ),
    _call(
        "servers.devices",
        "verl.single_controller.ray.base",
        "RayResourcePool.get_placement_groups",
        "It leaves the placement groups of a generator in ``pgs``, where the pipeline finds those of a dead one.",
        _VERL_PIPELINE,
        call="get_placement_groups(self)",
    ),
    _call(
        "servers.client",
        _SERVERS,
        "LLMServerManager.get_client",
        "The pipeline names the class of its client.",
        _VERL_PIPELINE,
        call="get_client(self, client_cls=client_cls)",
    ),
    _call(
        "buffer.look",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._sync_metadata_from_transfer_queue",
        "It says which prompts are running, finished and failed, by the tags of their rows.",
        _VERL_PIPELINE,
        sources=("11ef2c801f736e36dbf9adf8668c845fe0fedbb7c759e99feaff6cfd3816b179",),
    ),
    _call(
        "buffer.alike",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._dapo_filtered_keys",
        "It finds the finished groups that dynamic sampling rejects, and counts them by their common value.",
        _VERL_PIPELINE,
        sources=("bb4e01790e13b80705453136318f3d6460c42b00e36602e6be7c5c71c088ec84",),
    ),
    _call(
        "trainer.register",
        _TRAINER,
        "register_trainer",
        "Trainers of ours have a name each in verl's registry.",
        _STEPS,
        call="register_trainer(name)",
    ),
    _call(
        "trainer.registry",
        _TRAINER,
        "get_trainer_cls",
        "verl makes the trainer that is registered under the mode's name.",
        _STEPS,
        sources=("a4945cd46f9d01679697cf6942fc8ce8a776ab6a65e0f3a2bf556a25a2dc990a",),
    ),
    _call(
        "engines.register",
        _ENGINES,
        "EngineRegistry.register",
        "An engine with our loss is registered for one device and vendor.",
        _ENGINE_REMOVAL,
        call="register(cls, model_type=model_type, backend=backend, device=device, vendor=vendor)",
    ),
    _call(
        "engines.choice",
        _ENGINES,
        "EngineRegistry.get_engine_cls",
        "An engine of this machine's vendor is taken before one for the device alone.",
        _ENGINE_REMOVAL,
        sources=("ef7a52fca6eaa493de7230962e321c2a4d4f21f6bca782276dde161f52700c36",),
    ),
    _call(
        "trainer.profiling",
        _TRAINER,
        "PPOTrainer._stop_rollout_profiling",
        "Profiles of generators end with the step, as in verl's modes.",
        _VERL_PIPELINE,
        call="_stop_rollout_profiling(self)",
    ),
)
