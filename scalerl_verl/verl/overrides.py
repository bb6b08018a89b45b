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
        "GPU-hours begin when the GPUs are taken, minutes before the first step; it reads the trainer mode, which "
        "has to be the one that the user typed.",
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
        "Its attribute poll_interval is set afterwards; the buffer of pipeline_rl derives from it.",
        "verl has a key for the interval of polling",
    ),
    override(
        "trainer.init",
        _BASE,
        "PPOTrainer.init",
        "428ab07487058adabf14cd0d84f338c3a4fb8d248959c2185f6b845b3ac03cdb",
        "An FP32 head on one side only makes a larger mismatch than none: both are compared as soon as both stand.",
        _HEADS,
    ),
    override(
        "trainer.sampler",
        _BASE,
        "PPOTrainer._init_dataloader",
        "8247e450fd53c9125bb22b075a2b7ed3c8bc053df82cf481d5cf3b452bc809df",
        "verl 0.9 chooses between a random and a sequential sampler and has no key for another one.",
        f"verl takes a sampler class from {SAMPLER_SECTION} and feeds it the results of each step",
    ),
    override(
        "trainer.load",
        _BASE,
        "PPOTrainer._load_checkpoint",
        "5dc5c3d77c2619e07b9170062a1a087deed0ca42dc7f69c8806d8e427a56b5d9",
        "The compute spent so far and the truncation alarm's window have to continue from the checkpoint; verl has "
        "no hook on load.",
        _CALLBACKS,
    ),
    override(
        "trainer.step",
        _BASE,
        "PPOTrainer.step",
        "aa97fcc468f1bdae22f4e7ab2b2cbe47f1a93426b3791506b12bcce1990b761a",
        "verl logs a step after it has marked its checkpoint as the latest: what is known of the step has to be in "
        "the checkpoint, or a run that is killed in between never logged it.",
        _CALLBACKS,
    ),
    override(
        "trainer.whole_prompts",
        _BASE,
        "PPOTrainer._balance_batch",
        "5b473168eff54f0a3b9c6e10ebdc5ae1cd003ac40669b625195a98d3a17e4b88",
        "Rows are divided among ranks by length alone, and each rank's rows into mini-batches: with several of both "
        "an optimizer step sees parts of prompts, so that none is an average over prompts.",
        "verl keeps the rows of a prompt in one mini-batch",
    ),
    override(
        "trainer.first_batch",
        _BASE,
        "PPOTrainer._compute_old_log_prob",
        "9dc843b0b42230f347fc6c18fa027506ffde3ade183fbf4f058ae9c0b473719c",
        "With bypass_mode nobody computes the trainer's log-probs of a batch before the update moves the weights. "
        "pipeline_rl looks at the age of its tokens here.",
        _HEADS,
    ),
    override(
        "trainer.advantages",
        _BASE,
        "PPOTrainer._compute_advantage",
        "30cc1f82129d7b980fc1de0ea85e7a0fc09ed77f0b483b2f68360b11217acffe",
        "An advantage estimator sees neither the actor's aggregation mode nor the metrics of the step.",
        "verl passes the whole config and a metrics dict to advantage estimators",
    ),
    override(
        "trainer.skip_empty",
        _BASE,
        "PPOTrainer._update_actor",
        "5d02854a88ff4d41eec62b180a30f88d9e544c28b2ce6f7695edd7a7acd8000b",
        "When every group has zero variance there is no gradient; the optimizer must not step all the same. Sums "
        "over the optimizer steps of a batch come out as averages. In pipeline_rl the workers learn the version that "
        "trains, by which they count the age of tokens.",
        "verl skips the actor update when no sequence trains",
    ),
    override(
        "trainer.save",
        _BASE,
        "PPOTrainer._save_checkpoint",
        "8b4e2c0174d5cc8f831d980f333fc08584686cb2e6074c8d465c183d54a61d45",
        "Count and alarm window must be in the folder before verl marks the checkpoint as the latest; its on_save "
        "callback comes after that, and is the user's.",
        _CALLBACKS,
    ),
    override(
        "trainer.validate",
        _BASE,
        "PPOTrainer._validate",
        "103901797711b404b45a4274db77eab3162923134af7fdcee98856df66a06d5b",
        "A validation, also the one before training, has to be logged with the compute that its weights had cost, "
        "and with the lengths of its responses, whose records verl deletes.",
        _CALLBACKS,
    ),
    override(
        "trainer.samples",
        _BASE,
        "PPOTrainer._val_metrics_update",
        "b8ed6e0f320a33b5fbad78fd92e25de1e01d12b863b7a363928c1ef90c5b77e2",
        "The standard error of a pass rate needs the single generations, which verl reduces to means.",
        _CALLBACKS,
    ),
    override(
        "trainer.log",
        _BASE,
        "PPOTrainer._compute_metrics",
        "c675fb5f13d31a3bb2a81c8c89ad7de99f643daddfb957374e292c8f163a2024",
        "verl has no plugin hook on the metrics of a step; trackers get what is in them.",
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
        "It reads its section of the config before verl's base class reads the trainer mode.",
        _CALLBACKS,
    ),
    override(
        "separate_async.workers",
        _SEPARATE,
        "PPOTrainerSeparateAsync._init_resource_pool_mgr",
        "14fe48a4b1da11bce1c9f505249a91992d49de8d6678b0412af3e8baf0a3ca30",
        "It names the worker that keeps weights in host memory, which on a CPU has to be another one.",
        "verl copies instead of calling .cpu()",
    ),
    override(
        "separate_async.old_policy",
        _SEPARATE,
        "PPOTrainerSeparateAsync._compute_old_log_prob",
        "ee75570349617404546896b6e607d4c196b9f2a729c1f7d8f342a900ccb6f77f",
        "The first batch is compared with the generator's log-probs after it, under the weights that train.",
        _HEADS,
    ),
    override(
        "separate_async.setup",
        _SEPARATE,
        "PPOTrainerSeparateAsync._setup",
        "00ce4634779ad097aed167e30de1e876f2ff294c6b471dfe3fe55a910231476b",
        "It calls logger.info(..., flush=True) when hybrid_engine=False: a TypeError as soon as INFO is enabled.",
        "verl drops flush=True from that call",
    ),
    override(
        "pipeline.workers",
        _BASE,
        "PPOTrainer._init_resource_pool_mgr",
        "9df788c92129aab5cb65286a1303feb0641dba2fab7f6636298fa167beab2db0",
        "The trainer's workers stage their weights for generators that go on.",
        _MODE,
    ),
    override(
        "pipeline.setup",
        _BASE,
        "PPOTrainer._setup",
        "b9f68028d5dd8ff86b47ed140deeb5938aaab5c5998a8805ba6877f49efacd45",
        "Generators of pipeline_rl are servers of ours, with a weight update that does not stop them.",
        _MODE,
    ),
    override(
        "pipeline.client",
        _BASE,
        "PPOTrainer.get_llm_client",
        "f8bccccd46bea251b697c8e5c58d3e9ec7e2d4a0f605e6dbe81686847b0ef70d",
        "The agent loops' client of pipeline_rl takes up requests that an update or a lost generator broke off.",
        _MODE,
    ),
    override(
        "pipeline.servers",
        _BASE,
        "PPOTrainer._rollout_server_managers",
        "6c06c590f558d2ba31035539a7fa1f2414f91e42e42fd9ec4f920b3613ac3063",
        "Generators of pipeline_rl are servers of ours, which verl profiles as its own.",
        _MODE,
    ),
    override(
        "pipeline.gpus",
        _BASE,
        "PPOTrainer._get_n_gpus_for_throughput",
        "a9246636160b853cadd08aaca87b542056fa367dd48ec9a35b26a43dd3ce5e5f",
        "verl divides throughput by the GPUs that train; those that generate count, too.",
        _MODE,
    ),
    override(
        "pipeline.reissue",
        _BASE,
        "PPOTrainer._reissue_inflight_prompts",
        "9fb9f5875b3dc2c3c869257948d35aec88dd8d0f3d7c404ca4db2af1dc5d8951",
        "After resuming, the admission rule says how many prompts start at once.",
        _MODE,
    ),
    override(
        "trainer.admit",
        _BASE,
        "PPOTrainer._add_prompts_to_generate",
        "b778843923915bd6f22d0341fe68550da357ca3021229a3b3bb6f5d97598cffb",
        "It replaces failed prompts, without end when an engine has died: the engines are asked first. The admission "
        "rule of pipeline_rl starts fresh prompts with it.",
        "verl ends a run in which every prompt fails",
    ),
    override(
        "pipeline.submit",
        _BASE,
        "PPOTrainer._submit_batch_to_rollout",
        "ea9ff5b7b3abe8318cc7526cd64f7df5691ac10b8c6d4278d49561bbec8e3577",
        "The buffer of pipeline_rl has to know how many responses each prompt asks for.",
        _MODE,
    ),
    override(
        "pipeline.prepare",
        _BASE,
        "PPOTrainer.prepare_step",
        "b0cc4d9582113d2c45ce0a1357a39d8c30ee610a4c5cabfcb9361f5aa8a6d50e",
        "The admission rule starts prompts, not one batch a step.",
        _MODE,
    ),
    override(
        "pipeline.sample",
        _BUFFER,
        "ReplayBufferAsync.sample",
        "9b8b66dd7b7772e12a26292b668b8bf23182c68ca819a820347639ab2d677271",
        "pipeline_rl waits for groups by its admission rule, and looks after those that fail; a validation's "
        "responses are looked at when they are sampled, before verl deletes them.",
        _MODE,
    ),
    override(
        "pipeline.balancer",
        _ROUTER,
        "GlobalRequestLoadBalancer.__init__",
        "5173ac1cd72d2ee6d75cd872e5b1811dd762fbc435d244bd6f7406a02737ed78",
        "The pipeline's load balancer begins here, with counts of its own.",
        _MODE,
    ),
    override(
        "pipeline.choice",
        _ROUTER,
        "GlobalRequestLoadBalancer.acquire_server",
        "a9652beeb2df3ca6db0e66283bd44be324cc0a326c7ac89878622ccff718cce1",
        "Servers that are out of reach are hidden from verl's choice, which is by the requests that each has.",
        _MODE,
    ),
    override(
        "pipeline.removal",
        _ROUTER,
        "GlobalRequestLoadBalancer.remove_servers",
        "b14e6cd5b96442aa35d7339400081b684f979af1624e0d31cb2065e0a3a23830",
        "A server that is removed begins without strikes if it comes back.",
        _MODE,
    ),
    override(
        "pipeline.client_init",
        _SERVERS,
        "LLMServerClient.__init__",
        "200a12e6a89ea9b9332d077d44097464e43254617dfc6135ddd300bd991edefa",
        "The pipeline's client begins here, with a memory of who was out of reach.",
        _MODE,
    ),
    override(
        "pipeline.request",
        _SERVERS,
        "LLMServerClient.generate",
        "d0dca12f2216ca4b819e7efeabdb0d866e008f1f7b3c6f2a62eebac054a0ba1f",
        "A request of the pipeline has a limit in time and several attempts; verl's waits for ever for a hung engine.",
        _MODE,
    ),
    override(
        "pipeline.updater",
        _CHECKPOINT,
        "CheckpointEngineManager.__init__",
        "6244cd910be0d8090a22c470c1161889b76e11a36bf304ee125cf6aef0617cc9",
        "The pipeline's updater of weights begins here.",
        _MODE,
    ),
    override(
        "pipeline.update",
        _CHECKPOINT,
        "CheckpointEngineManager.update_weights",
        "3f185146ce51a51c575c56468b0873ca3d88faef380823ef667ad34e48695a66",
        "verl's update aborts every request, and a generator that dies in it ends the run.",
        _MODE,
    ),
    override(
        "pipeline.send",
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker.update_weights",
        "3d7b0a5ec422b98ae4025a0eca1cd6d17229c4c12b82cfdd2563995ce0a4e5af",
        "verl sends weights as they are stored, which is FP32 unless asked otherwise: twice the bytes.",
        _MODE,
    ),
    override(
        "off_policy.step",
        _BASE,
        "PPOTrainer._step_once",
        "95f972b276d875392bda253e59b590651de682eb7b96a3c399539038c61b5985",
        "Each step of ppo_off_policy reports its optimizer steps.",
        "verl has a mode with several optimizer steps on one batch that counts them",
    ),
    override(
        "agent_loop.context",
        _LOOP,
        "AgentLoopWorker._run_agent_loop",
        "c70a4be3f55e531715ad2412955746d79e4eab6bd67dbc5f1e5d0defc31a1df3",
        "An agent loop is not told whether it generates for validation, which has budgets of its own, nor which "
        "tokens of the model's generation config end a turn; what it raises goes to its worker's log only, so a "
        "trainer whose groups all fail could not say why.",
        "verl passes the trajectory's `validate` and the generation config to agent loops, and tags failed prompts "
        "with their error",
    ),
    override(
        "agent_loop.score",
        _LOOP,
        "AgentLoopWorker._compute_score",
        "6cfa321612555ae3104b245a0dbda7bac32843878a0069e16b605d6338e3c80e",
        "A reward that is no finite number goes into the batch, where it ends the run; in a pipeline run the group "
        "can be tried again, or given up, as one whose reward function raises. A response is complete there: the "
        "versions of its requests are put together.",
        "verl fails a prompt whose reward is not finite, and notes weight versions by token",
    ),
    override(
        "agent_loop.manager",
        _LOOP,
        "AgentLoopManager.__init__",
        "a4af982836931624760fc4c9d2eb42b7f46ff4b800000e9ad08256da945f5d04",
        "It gets the run's config before its workers do, with the class that the user typed put back.",
        _WORKERS,
    ),
    override(
        "agent_loop.manager_tq",
        _LOOP_TQ,
        "AgentLoopManagerTQ.__init__",
        "886aa1da988f687f4db60d43d0e47a2d64feb14cadd3a152e413542b231bb971",
        "It names the class that its workers are made of.",
        _WORKERS,
    ),
    override(
        "agent_loop.workers",
        _LOOP,
        "AgentLoopManager._init_agent_loop_workers",
        "4ed2ad01aaa9c16bfd47c472631cf12f1052b71a1abad53d482496a65e6ef922",
        "A manager makes its workers of a class that it holds; verl has no key for another one.",
        _WORKERS,
    ),
)
