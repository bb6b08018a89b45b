# SPDX-License-Identifier: Apache-2.0
"""Methods of verl that subclasses of ours override: verl stays as it is, and what we rely on is bound by its hash."""

from __future__ import annotations

from scalerl_verl.names import POLL_INTERVAL, SAMPLER_SECTION
from scalerl_verl.upstream.spec import override

_BASE = "verl.trainer.ppo.v1.trainer_base"
_SEPARATE = "verl.trainer.ppo.v1.trainer_separate_async"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_ROUTER = "verl.workers.rollout.router"
_SERVERS = "verl.workers.rollout.llm_server"
_CHECKPOINT = "verl.checkpoint_engine.base"
_LOOP = "verl.experimental.agent_loop.agent_loop"
_LOOP_TQ = "verl.trainer.ppo.v1.agent_loop_tq"
_CALLBACKS = "verl has trainer callbacks for start, step end, validation end and checkpoint load and save"
_HEADS = "verl compares the log-probs of trainer and generator at start"
_MODE = "verl has a mode in which generation goes on while weights are updated"
_WORKERS = "verl takes the class of the workers from the config"


SPECS = (
    override(
        "trainer.start",
        _BASE,
        "PPOTrainer.__init__",
        "697bf2eef7503bdb6bcf25d049799694fd76a0cb50767bc5a845f34d1bffd567",
        "Our clock of GPU-hours starts here, when the GPUs are reserved, minutes before the first step. The "
        "constructor reads the trainer mode, so the mode that the user typed is put back first.",
        _CALLBACKS,
    ),
    override(
        "trainer.replay_buffer",
        _BASE,
        "PPOTrainer._build_replay_buffer",
        "ca21eb7e0ba526e06e2513a020fe53d22f210d114604b822f6950a4e67311f53",
        f"The built-in buffer polls every 2 s, which is the step time of a small model; {POLL_INTERVAL}, which verl "
        "does not read, sets it. pipeline_rl has a buffer of its own.",
        "verl has a key for the interval of polling",
    ),
    override(
        "trainer.poll_interval",
        _BUFFER,
        "ReplayBuffer.__init__",
        "5e227f18fc7ca68443fac67809e115ae562049fb2662b897873480ec4d131cef",
        "Our code sets its attribute poll_interval after construction. The buffer of pipeline_rl is a subclass.",
        "verl has a key for the interval of polling",
    ),
    override(
        "trainer.init",
        _BASE,
        "PPOTrainer.init",
        "428ab07487058adabf14cd0d84f338c3a4fb8d248959c2185f6b845b3ac03cdb",
        "An FP32 head in only one of trainer and generator gives a larger mismatch than none. Both heads are compared "
        "as soon as both engines exist.",
        _HEADS,
    ),
    override(
        "trainer.sampler",
        _BASE,
        "PPOTrainer._init_dataloader",
        "8247e450fd53c9125bb22b075a2b7ed3c8bc053df82cf481d5cf3b452bc809df",
        "verl 0.9 has a random and a sequential sampler, and no key for another one. Our sampler is built here.",
        f"verl takes a sampler class from {SAMPLER_SECTION} and feeds it the results of each step",
    ),
    override(
        "trainer.load",
        _BASE,
        "PPOTrainer._load_checkpoint",
        "5dc5c3d77c2619e07b9170062a1a087deed0ca42dc7f69c8806d8e427a56b5d9",
        "The compute spent so far and the window of the truncation alarm are restored from the checkpoint. verl has "
        "no hook on load.",
        _CALLBACKS,
    ),
    override(
        "trainer.step",
        _BASE,
        "PPOTrainer.step",
        "aa97fcc468f1bdae22f4e7ab2b2cbe47f1a93426b3791506b12bcce1990b761a",
        "verl marks a checkpoint as the latest before it logs the step. A run that is killed in between would lose "
        "the metrics of that step, so our code keeps them for the checkpoint.",
        _CALLBACKS,
    ),
    override(
        "trainer.whole_prompts",
        _BASE,
        "PPOTrainer._balance_batch",
        "5b473168eff54f0a3b9c6e10ebdc5ae1cd003ac40669b625195a98d3a17e4b88",
        "verl divides rows among ranks by length alone, and the rows of a rank into mini-batches. With several ranks "
        "and several mini-batches an optimizer step sees only some rows of a prompt, so its loss is not an average "
        "over prompts.",
        "verl keeps the rows of a prompt in one mini-batch",
    ),
    override(
        "trainer.first_batch",
        _BASE,
        "PPOTrainer._compute_old_log_prob",
        "9dc843b0b42230f347fc6c18fa027506ffde3ade183fbf4f058ae9c0b473719c",
        "The first batch is checked here: with bypass_mode verl does not compute the trainer's log-probs before the "
        "update changes the weights. pipeline_rl reads the age of the tokens here.",
        _HEADS,
    ),
    override(
        "trainer.advantages",
        _BASE,
        "PPOTrainer._compute_advantage",
        "30cc1f82129d7b980fc1de0ea85e7a0fc09ed77f0b483b2f68360b11217acffe",
        "verl passes neither the actor's aggregation mode nor the metrics of the step to an advantage estimator.",
        "verl passes the whole config and a metrics dict to advantage estimators",
    ),
    override(
        "trainer.skip_empty",
        _BASE,
        "PPOTrainer._update_actor",
        "5d02854a88ff4d41eec62b180a30f88d9e544c28b2ce6f7695edd7a7acd8000b",
        "If every group has zero variance there is no gradient, so the optimizer step is skipped. verl averages "
        "metrics over the optimizer steps of a batch; metrics that are sums are corrected. In pipeline_rl the workers "
        "get the weight version that trains, to compute the age of tokens.",
        "verl skips the actor update when no sequence trains",
    ),
    override(
        "trainer.save",
        _BASE,
        "PPOTrainer._save_checkpoint",
        "8b4e2c0174d5cc8f831d980f333fc08584686cb2e6074c8d465c183d54a61d45",
        "The compute count and the alarm's window must be in the folder before verl marks the checkpoint as the "
        "latest. verl's on_save callback runs after that, and belongs to the user.",
        _CALLBACKS,
    ),
    override(
        "trainer.validate",
        _BASE,
        "PPOTrainer._validate",
        "103901797711b404b45a4274db77eab3162923134af7fdcee98856df66a06d5b",
        "Every validation, also the one before training, is logged with the compute spent on its weights and with the "
        "lengths of its responses. verl deletes the records that hold these lengths.",
        _CALLBACKS,
    ),
    override(
        "trainer.samples",
        _BASE,
        "PPOTrainer._val_metrics_update",
        "b8ed6e0f320a33b5fbad78fd92e25de1e01d12b863b7a363928c1ef90c5b77e2",
        "The standard error of a pass rate needs the score of every generation; verl keeps only means.",
        _CALLBACKS,
    ),
    override(
        "trainer.log",
        _BASE,
        "PPOTrainer._compute_metrics",
        "c675fb5f13d31a3bb2a81c8c89ad7de99f643daddfb957374e292c8f163a2024",
        "Our metrics are added to those of the step, because verl has no plugin hook for them.",
        _CALLBACKS,
    ),
    override(
        "separate_async.copies",
        "verl.experimental.separation.engine_workers",
        "DetachActorWorker.copy_handler",
        "24b75b013ae6ec0efb10d272072930205cad718f7f139bbb20ca88a69f83004f",
        "tensor.detach().cpu() returns the parameter's own memory when it already lives on the CPU: the saved pi_old "
        "silently follows training when parameter_sync_step > 1.",
        "verl copies instead of calling .cpu()",
        when="cpu",
    ),
    override(
        "separate_async.start",
        _SEPARATE,
        "PPOTrainerSeparateAsync.__init__",
        "f149a4d9cc77b69f975b9e9c9ef0215516ee98f19e9c1075f9de9b300325c784",
        "It reads its section of the config before verl's base class does, so the mode that the user typed is put "
        "back first.",
        _CALLBACKS,
    ),
    override(
        "separate_async.workers",
        _SEPARATE,
        "PPOTrainerSeparateAsync._init_resource_pool_mgr",
        "14fe48a4b1da11bce1c9f505249a91992d49de8d6678b0412af3e8baf0a3ca30",
        "It names the class of the worker that keeps weights in host memory. On a CPU another class is needed, whose "
        "copies are real copies.",
        "verl copies instead of calling .cpu()",
    ),
    override(
        "separate_async.old_policy",
        _SEPARATE,
        "PPOTrainerSeparateAsync._compute_old_log_prob",
        "ee75570349617404546896b6e607d4c196b9f2a729c1f7d8f342a900ccb6f77f",
        "After it, the trainer's log-probs of the first batch are compared with the generator's, under the same "
        "weights.",
        _HEADS,
    ),
    override(
        "separate_async.setup",
        _SEPARATE,
        "PPOTrainerSeparateAsync._setup",
        "00ce4634779ad097aed167e30de1e876f2ff294c6b471dfe3fe55a910231476b",
        "With hybrid_engine=False it calls logger.info(..., flush=True), which is a TypeError if INFO is enabled.",
        "verl drops flush=True from that call",
    ),
    override(
        "pipeline.workers",
        _BASE,
        "PPOTrainer._init_resource_pool_mgr",
        "9df788c92129aab5cb65286a1303feb0641dba2fab7f6636298fa167beab2db0",
        "In pipeline_rl the trainer's workers are of our class: they send weights to generators that continue to "
        "generate.",
        _MODE,
    ),
    override(
        "pipeline.setup",
        _BASE,
        "PPOTrainer._setup",
        "b9f68028d5dd8ff86b47ed140deeb5938aaab5c5998a8805ba6877f49efacd45",
        "pipeline_rl starts servers of our class, and a weight update that does not abort their requests.",
        _MODE,
    ),
    override(
        "pipeline.client",
        _BASE,
        "PPOTrainer.get_llm_client",
        "f8bccccd46bea251b697c8e5c58d3e9ec7e2d4a0f605e6dbe81686847b0ef70d",
        "Agent loops of pipeline_rl get our client, which sends a request again if its generator hangs or dies.",
        _MODE,
    ),
    override(
        "pipeline.servers",
        _BASE,
        "PPOTrainer._rollout_server_managers",
        "6c06c590f558d2ba31035539a7fa1f2414f91e42e42fd9ec4f920b3613ac3063",
        "It tells verl which servers pipeline_rl started, so that verl can profile them.",
        _MODE,
    ),
    override(
        "pipeline.gpus",
        _BASE,
        "PPOTrainer._get_n_gpus_for_throughput",
        "a9246636160b853cadd08aaca87b542056fa367dd48ec9a35b26a43dd3ce5e5f",
        "verl divides throughput by the number of GPUs that train. In pipeline_rl the GPUs that generate are counted, "
        "too.",
        _MODE,
    ),
    override(
        "pipeline.reissue",
        _BASE,
        "PPOTrainer._reissue_inflight_prompts",
        "9fb9f5875b3dc2c3c869257948d35aec88dd8d0f3d7c404ca4db2af1dc5d8951",
        "After a resume, the admission rule of pipeline_rl decides how many prompts are in flight.",
        _MODE,
    ),
    override(
        "trainer.admit",
        _BASE,
        "PPOTrainer._add_prompts_to_generate",
        "b778843923915bd6f22d0341fe68550da357ca3021229a3b3bb6f5d97598cffb",
        "verl replaces failed prompts without end if an engine is dead, so our code first asks whether the engines "
        "are alive. The admission rule of pipeline_rl starts new prompts with this method.",
        "verl ends a run in which every prompt fails",
    ),
    override(
        "pipeline.submit",
        _BASE,
        "PPOTrainer._submit_batch_to_rollout",
        "ea9ff5b7b3abe8318cc7526cd64f7df5691ac10b8c6d4278d49561bbec8e3577",
        "Our code tells the buffer of pipeline_rl how many responses each prompt asks for.",
        _MODE,
    ),
    override(
        "pipeline.prepare",
        _BASE,
        "PPOTrainer.prepare_step",
        "b0cc4d9582113d2c45ce0a1357a39d8c30ee610a4c5cabfcb9361f5aa8a6d50e",
        "verl starts one batch of prompts per step; in pipeline_rl the admission rule starts prompts.",
        _MODE,
    ),
    override(
        "pipeline.sample",
        _BUFFER,
        "ReplayBufferAsync.sample",
        "9b8b66dd7b7772e12a26292b668b8bf23182c68ca819a820347639ab2d677271",
        "pipeline_rl waits for complete groups by its admission rule, and retries or drops groups that fail. The "
        "responses of a validation are read here, before verl deletes them.",
        _MODE,
    ),
    override(
        "pipeline.balancer",
        _ROUTER,
        "GlobalRequestLoadBalancer.__init__",
        "5173ac1cd72d2ee6d75cd872e5b1811dd762fbc435d244bd6f7406a02737ed78",
        "The constructor of our load balancer extends it: it also counts failed attempts per server.",
        _MODE,
    ),
    override(
        "pipeline.choice",
        _ROUTER,
        "GlobalRequestLoadBalancer.acquire_server",
        "a9652beeb2df3ca6db0e66283bd44be324cc0a326c7ac89878622ccff718cce1",
        "verl chooses the server with the fewest requests. Our subclass hides servers that cannot be reached from "
        "this choice.",
        _MODE,
    ),
    override(
        "pipeline.removal",
        _ROUTER,
        "GlobalRequestLoadBalancer.remove_servers",
        "b14e6cd5b96442aa35d7339400081b684f979af1624e0d31cb2065e0a3a23830",
        "When a server is removed, its count of failed attempts is cleared.",
        _MODE,
    ),
    override(
        "pipeline.client_init",
        _SERVERS,
        "LLMServerClient.__init__",
        "200a12e6a89ea9b9332d077d44097464e43254617dfc6135ddd300bd991edefa",
        "The constructor of our client extends it: it also remembers the servers that could not be reached.",
        _MODE,
    ),
    override(
        "pipeline.request",
        _SERVERS,
        "LLMServerClient.generate",
        "d0dca12f2216ca4b819e7efeabdb0d866e008f1f7b3c6f2a62eebac054a0ba1f",
        "A request of pipeline_rl has a time limit and several attempts; verl's client waits for ever if an engine "
        "hangs.",
        _MODE,
    ),
    override(
        "pipeline.updater",
        _CHECKPOINT,
        "CheckpointEngineManager.__init__",
        "6244cd910be0d8090a22c470c1161889b76e11a36bf304ee125cf6aef0617cc9",
        "The constructor of pipeline_rl's weight updater extends it.",
        _MODE,
    ),
    override(
        "pipeline.update",
        _CHECKPOINT,
        "CheckpointEngineManager.update_weights",
        "3f185146ce51a51c575c56468b0873ca3d88faef380823ef667ad34e48695a66",
        "verl's weight update aborts every request, and the run ends if a generator dies during the update.",
        _MODE,
    ),
    override(
        "pipeline.send",
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker.update_weights",
        "3d7b0a5ec422b98ae4025a0eca1cd6d17229c4c12b82cfdd2563995ce0a4e5af",
        "verl sends weights in the dtype in which they are stored, FP32 by default: twice the bytes of bf16.",
        _MODE,
    ),
    override(
        "off_policy.step",
        _BASE,
        "PPOTrainer._step_once",
        "95f972b276d875392bda253e59b590651de682eb7b96a3c399539038c61b5985",
        "ppo_off_policy reports the number of optimizer steps of each training step.",
        "verl has a mode with several optimizer steps on one batch that counts them",
    ),
    override(
        "agent_loop.context",
        _LOOP,
        "AgentLoopWorker._run_agent_loop",
        "c70a4be3f55e531715ad2412955746d79e4eab6bd67dbc5f1e5d0defc31a1df3",
        "verl does not tell an agent loop whether it generates for validation, which has its own budgets, nor which "
        "tokens of the model's generation config end a turn. An exception of an agent loop appears only in its "
        "worker's log; our code keeps it, so that the trainer can name the cause if all groups fail.",
        "verl passes the trajectory's `validate` and the generation config to agent loops, and tags failed prompts "
        "with their error",
    ),
    override(
        "agent_loop.score",
        _LOOP,
        "AgentLoopWorker._compute_score",
        "6cfa321612555ae3104b245a0dbda7bac32843878a0069e16b605d6338e3c80e",
        "verl puts a non-finite reward into the batch, where it ends the run. In pipeline_rl it fails its group "
        "instead, which is retried or dropped, as if the reward function had raised. The response is complete here, "
        "so the weight versions of its requests are joined here.",
        "verl fails a prompt whose reward is not finite, and records the weight version of every token",
    ),
    override(
        "agent_loop.manager",
        _LOOP,
        "AgentLoopManager.__init__",
        "a4af982836931624760fc4c9d2eb42b7f46ff4b800000e9ad08256da945f5d04",
        "It gets the run's config before its workers do; the class that the user typed is put back here.",
        _WORKERS,
    ),
    override(
        "agent_loop.manager_tq",
        _LOOP_TQ,
        "AgentLoopManagerTQ.__init__",
        "886aa1da988f687f4db60d43d0e47a2d64feb14cadd3a152e413542b231bb971",
        "It names the class of its workers; our class takes its place.",
        _WORKERS,
    ),
    override(
        "agent_loop.workers",
        _LOOP,
        "AgentLoopManager._init_agent_loop_workers",
        "4ed2ad01aaa9c16bfd47c472631cf12f1052b71a1abad53d482496a65e6ef922",
        "It starts workers of a class that is an attribute of the manager; verl has no key for another class.",
        _WORKERS,
    ),
)
