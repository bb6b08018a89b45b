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
_NCCL = "verl.checkpoint_engine.nccl_checkpoint_engine"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_SERVERS = "verl.workers.rollout.llm_server"
_ENGINES = "verl.workers.engine.base"
_VLLM_SWAP = "vLLM loads weights that were staged before a pause, and reports the token count of each request"
_VERL_SOCKET = "verl closes the socket of a group that it finalizes (see patches/verl)"
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
    needs: str = "",
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
        needs=needs,
    )


VLLM_SPECS = (
    _call(
        "engine.pause",
        _CORE,
        "EngineCoreProc.pause_scheduler",
        "The weight update pauses the scheduler with it: mode keep keeps every request, and the returned future "
        "completes when no step is running.",
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
        "The weight update ends the pause with it, and relies on its doing nothing else.",
        _VLLM_SWAP,
        sources=("654ad3615812ebe7ed8cbd179572a8e7b51f207f947000818381e212c6c7b0b6",),
    ),
    _call(
        "engine.recompute",
        _CORE,
        "EngineCore.reset_prefix_cache",
        "With reset_running_requests it makes running requests recompute their KV cache, and returns whether it "
        "succeeded.",
        _VLLM_SWAP,
        sources=("2edab8ee164507ce7b8f750398c48645d2da3335c813b22a359d300d1b8afaf9",),
    ),
    _call(
        "engine.loop",
        _CORE,
        "EngineCoreProc._process_input_queue",
        "If the engine is idle, it completes the future of a pause and then blocks until a message arrives. So the "
        "weight update sends a message afterwards.",
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
        "The weight update wakes the engine's loop with a message in its input queue.",
        _VLLM_SWAP,
        attributes=("input_queue",),
    ),
    _call(
        "engine.wake_up",
        "vllm.v1.engine",
        "EngineCoreRequestType",
        "The message WAKEUP makes the engine's loop continue and has no other effect.",
        _VLLM_SWAP,
        attributes=("WAKEUP",),
    ),
    _call(
        "engine.scheduler",
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "A weight update reads all requests of an engine, by their internal ids.",
        _VLLM_SWAP,
        attributes=("requests",),
    ),
    _call(
        "engine.load",
        "vllm.v1.executor.abstract",
        "Executor.collective_rpc",
        "The weight update calls it: every worker loads the staged weights, and it returns when all have finished.",
        _VLLM_SWAP,
        call="collective_rpc(self, method, kwargs={})",
    ),
    _call(
        "request.parts",
        "vllm.v1.request",
        "Request",
        "A weight update reads the token counts of each request. For a request that has not started, it replaces the "
        "cache salt and the block hashes.",
        _VLLM_SWAP,
        attributes=("num_output_tokens", "num_computed_tokens", "cache_salt", "block_hashes"),
    ),
    _call(
        "request.hashes",
        "vllm.v1.request",
        "Request.update_block_hashes",
        "It hashes the prompt of a waiting request again, with the cache salt of the new weights.",
        _VLLM_SWAP,
        sources=("c5173243cda71c28f365430d0464f4965a50581f69fd9802df5cf31eb52bb7f0",),
    ),
    _call(
        "server.enter",
        _LLM,
        "AsyncLLM.add_request",
        "Every request enters through it. Our server wraps it on its engine instance, to see each request enter.",
        _VERL_PIPELINE,
        call="await add_request(self, request_id, prompt, params)",
    ),
    _call(
        "server.parts",
        _LLM,
        "AsyncLLM",
        "Our server uses these attributes to call the engine's process, to read the state of requests, and to read "
        "the settings that vLLM resolved.",
        _VERL_PIPELINE,
        attributes=("engine_core", "output_processor", "vllm_config", "dead_error"),
    ),
    _call(
        "server.abort",
        _LLM,
        "AsyncLLM.abort",
        "Our server aborts requests by vLLM's internal ids.",
        _VERL_PIPELINE,
        call="await abort(self, request_id, internal=True)",
    ),
    _call(
        "server.health",
        _LLM,
        "AsyncLLM.check_health",
        "Our server asks with it whether the engine lives: it raises if the engine's process is dead.",
        _VERL_PIPELINE,
        call="await check_health(self)",
    ),
    _call(
        "server.pause",
        _LLM,
        "AsyncLLM.pause_generation",
        "With staging=none our server pauses the engine with it; mode keep keeps every request.",
        _VERL_PIPELINE,
        call="await pause_generation(self, mode='keep', clear_cache=False)",
    ),
    _call(
        "server.resume",
        _LLM,
        "AsyncLLM.resume_generation",
        "With staging=none our server resumes the engine with it.",
        _VERL_PIPELINE,
        call="await resume_generation(self)",
    ),
    _call(
        "server.ask_workers",
        _LLM,
        "AsyncLLM.collective_rpc",
        "Our server asks vLLM's workers for what they measured, such as the error of their FP32 head.",
        _VERL_PIPELINE,
        call="await collective_rpc(self, method)",
    ),
    _call(
        "server.ask_engine",
        "vllm.v1.engine.core_client",
        "AsyncMPClient.call_utility_async",
        "Our server calls our methods in the engine's process with it.",
        _VERL_PIPELINE,
        call="await call_utility_async(self, method, salt, staged, recompute, continued)",
    ),
    _call(
        "server.outputs",
        _OUTPUTS,
        "RequestOutputCollector",
        "With the fast front end a request has one output only, so our server puts an empty output first if there is "
        "none yet. The collector also holds the internal id of the request.",
        _FRONTEND,
        attributes=("output", "request_id"),
    ),
    _call(
        "server.put",
        _OUTPUTS,
        "RequestOutputCollector.put",
        "It wakes the coroutine that waits for the output of a request, also if that output has no tokens.",
        _FRONTEND,
        sources=("315188024c79cd1833a8dc416ae54bdd96d1ad997d5d708268adf7498f32f800",),
    ),
    _call(
        "server.empty_output",
        "vllm.outputs",
        "RequestOutput.__init__",
        "The empty output above is built with it.",
        _FRONTEND,
        call="__init__(self, request_id, None, None, None, outputs=[], finished=False)",
    ),
    _call(
        "server.request_states",
        _OUTPUTS,
        "OutputProcessor",
        "It holds the requests that the front end knows. A request that is still there after an abort was not aborted.",
        _VERL_PIPELINE,
        attributes=("request_states",),
    ),
    _call(
        "server.request_state",
        _OUTPUTS,
        "RequestState",
        "is_prefilling says whether a request has a token yet.",
        _VERL_PIPELINE,
        attributes=("is_prefilling",),
    ),
    _call(
        "frontend.final_only",
        "vllm.sampling_params",
        "RequestOutputKind",
        "FINAL_ONLY is the kind of output with which a request has one output, when it is complete.",
        _FRONTEND,
        attributes=("FINAL_ONLY",),
    ),
    _call(
        "frontend.parameters",
        "vllm.sampling_params",
        "SamplingParams",
        "The fast front end sets these parameters of a request; verl does not.",
        _FRONTEND,
        attributes=("output_kind", "detokenize", "flat_logprobs", "prompt_logprobs"),
    ),
    _call(
        "head.shard",
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "VocabParallelEmbeddingShardIndices",
        "It says which token ids are on a rank, so that the logits of the rank can be compared with float64.",
        _HEAD,
        attributes=("num_org_elements", "org_vocab_start_index"),
    ),
    _call(
        "head.rank",
        "vllm.distributed.parallel_state",
        "get_pp_group",
        "It says which pipeline rank this is: only the last one has the LM head, so only that one is measured.",
        _HEAD,
        call="get_pp_group()",
    ),
)

VERL_SPECS = (
    _call(
        "weights.stream",
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine.get_per_tensor_param",
        "The trainer sends the weights that it yields: it takes them out of the module's state dict and gathers one "
        "at a time.",
        _VERL_PIPELINE,
        sources=("85dba5e1f2fcce35a4553df6ecf9282ec7d4c1cdcb001c82fa771b1ca25871e2",),
    ),
    _call(
        "weights.merged",
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine._merged_lora_per_tensor_param",
        "Our code takes its place on one engine instance, and yields weights with merged LoRA adapters in the "
        "generator's dtype instead of bf16.",
        _VERL_PIPELINE,
        sources=("a23011a4fb04030c88db94d77840930bae286bdff1cb277e292bd2c0e8184ff3",),
    ),
    _call(
        "weights.merging",
        "verl.utils.fsdp_utils",
        "merged_lora_context",
        "Inside this context LoRA adapters are merged into the weights of a sharded model; they are removed again at "
        "its end.",
        _VERL_PIPELINE,
        call="merged_lora_context(module, backup_adapters=True)",
    ),
    _call(
        "weights.group",
        _CHECKPOINT,
        "CheckpointEngineManager.build_process_group",
        "Our code does the same with a time limit: verl's waits for ever if a generator dies in it.",
        _VERL_PIPELINE,
        sources=("7ee17ceae7eed9d0d32944cd5975c86f763358a7f8ffc9edb261a387fc833d8d",),
    ),
    _call(
        "weights.leave_out",
        _CHECKPOINT,
        "CheckpointEngineManager.remove_replicas",
        "The weight updater removes dead generators with it.",
        _VERL_PIPELINE,
        call="remove_replicas(self, replicas)",
    ),
    _call(
        "weights.take_back",
        _CHECKPOINT,
        "CheckpointEngineManager.add_replicas",
        "The weight updater adds generators that answer again with it; they take part in the next update.",
        _VERL_PIPELINE,
        call="add_replicas(self, replicas)",
    ),
    _call(
        "weights.engine",
        _CHECKPOINT,
        "CheckpointEngineWorker.execute_checkpoint_engine",
        "Through it workers prepare, join and leave the process group of an update.",
        _VERL_PIPELINE,
        call="execute_checkpoint_engine(self, method)",
    ),
    _call(
        "weights.socket",
        _NCCL,
        "NCCLCheckpointEngine._connect_zmq_client",
        "It puts a generator's socket, a new one for each group, into ``socket``, where ours takes its place.",
        _VERL_SOCKET,
        sources=("d66df35b282be6f83dbc859f755a85688f9c32f0918878e378ce9b1f04d5ec6f",),
        needs="cupy",
    ),
    _call(
        "weights.socket_read",
        _NCCL,
        "BroadcastOperation._run",
        "A thread calls ``recv_string`` and ``recv_pyobj`` of a generator's socket, and no more, without a limit.",
        _VERL_SOCKET,
        sources=("f4a9fa2abca7bd0b9a84f4701fa55442d2ec78fdcb790aa4fd07d4c334d2a330",),
        needs="cupy",
    ),
    _call(
        "weights.socket_left",
        _NCCL,
        "NCCLCheckpointEngine.finalize",
        "It neither closes the socket nor ends who reads from it: ours does both right before.",
        _VERL_SOCKET,
        sources=("a715320126da38feedf1927eed8476644c4d44e3557d43b26f86310b72ec437a",),
        needs="cupy",
    ),
    _call(
        "weights.open",
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "rebuild_ipc",
        "It opens GPU memory of another process; staged weights are read through it.",
        _VERL_PIPELINE,
        call="rebuild_ipc(handle, device_id)",
    ),
    _call(
        "client.acquire",
        _SERVERS,
        "LLMServerClient._acquire_server",
        "The client of pipeline_rl acquires a server for each attempt.",
        _VERL_PIPELINE,
        call="await _acquire_server(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params)",
    ),
    _call(
        "client.release",
        _SERVERS,
        "LLMServerClient._release_server",
        "The client of pipeline_rl releases the server after each attempt.",
        _VERL_PIPELINE,
        call="_release_server(self, server_id, request_id=request_id)",
    ),
    _call(
        "client.parts",
        _SERVERS,
        "LLMServerClient",
        "The client of pipeline_rl reads the config, and reports servers that could not be reached to the load "
        "balancer.",
        _VERL_PIPELINE,
        attributes=("_load_balancer", "config"),
    ),
    _call(
        "balancer.parts",
        "verl.workers.rollout.router",
        "GlobalRequestLoadBalancer",
        "Our load balancer reads these, to hide servers that cannot be reached from verl's choice for a while.",
        _VERL_PIPELINE,
        attributes=("_inflight_requests", "get_all_servers", "add_servers"),
    ),
    _call(
        "servers.create",
        _SERVERS,
        "LLMServerManager.create",
        "pipeline_rl starts its servers with it, and passes our load balancer.",
        _VERL_PIPELINE,
        call="await create(cls, config=config, load_balancer_cls=load_balancer_cls)",
    ),
    _call(
        "servers.launch",
        "verl.workers.rollout.replica",
        "RolloutReplica.init_standalone",
        "pipeline_rl launches a generator with it to replace a dead one, and gives the ``resource_pool`` of the dead "
        "one back.",
        _VERL_PIPELINE,
        call="await init_standalone(self)",
    ),
    _call(
        "servers.devices",
        "verl.single_controller.ray.base",
        "RayResourcePool.get_placement_groups",
        "It stores the placement groups of a generator in ``pgs``; pipeline_rl removes those of a dead generator.",
        _VERL_PIPELINE,
        call="get_placement_groups(self)",
    ),
    _call(
        "servers.client",
        _SERVERS,
        "LLMServerManager.get_client",
        "pipeline_rl passes the class of its client.",
        _VERL_PIPELINE,
        call="get_client(self, client_cls=client_cls)",
    ),
    _call(
        "buffer.look",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._sync_metadata_from_transfer_queue",
        "The buffer of pipeline_rl calls it to learn which prompts are running, finished or failed, from the tags of "
        "their rows.",
        _VERL_PIPELINE,
        sources=("11ef2c801f736e36dbf9adf8668c845fe0fedbb7c759e99feaff6cfd3816b179",),
    ),
    _call(
        "buffer.alike",
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer._dapo_filtered_keys",
        "It finds the finished groups that dynamic sampling rejects, and counts them by the value that all their "
        "responses share.",
        _VERL_PIPELINE,
        sources=("bb4e01790e13b80705453136318f3d6460c42b00e36602e6be7c5c71c088ec84",),
    ),
    _call(
        "trainer.register",
        _TRAINER,
        "register_trainer",
        "Our trainers are registered with it, each under a name.",
        _STEPS,
        call="register_trainer(name)",
    ),
    _call(
        "trainer.registry",
        _TRAINER,
        "get_trainer_cls",
        "verl looks up the trainer by the name of the mode with it; we rely on this rule.",
        _STEPS,
        sources=("a4945cd46f9d01679697cf6942fc8ce8a776ab6a65e0f3a2bf556a25a2dc990a",),
    ),
    _call(
        "engines.register",
        _ENGINES,
        "EngineRegistry.register",
        "Our engines are registered with it, for one device and one vendor.",
        _ENGINE_REMOVAL,
        call="register(cls, model_type=model_type, backend=backend, device=device, vendor=vendor)",
    ),
    _call(
        "engines.choice",
        _ENGINES,
        "EngineRegistry.get_engine_cls",
        "It prefers an engine that is registered for this machine's vendor to one for the device alone; our engines "
        "rely on this order.",
        _ENGINE_REMOVAL,
        sources=("ef7a52fca6eaa493de7230962e321c2a4d4f21f6bca782276dde161f52700c36",),
    ),
    _call(
        "trainer.profiling",
        _TRAINER,
        "PPOTrainer._stop_rollout_profiling",
        "pipeline_rl calls it at the end of a step, as verl's modes do.",
        _VERL_PIPELINE,
        call="_stop_rollout_profiling(self)",
    ),
)
