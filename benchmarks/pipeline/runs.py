# SPDX-License-Identifier: Apache-2.0
"""One run of verl's main_ppo for the pipeline benchmark: command line and environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import launching
from benchmarks.pipeline.assets import Size

PLUGIN = Path(__file__).resolve().parent / "plugin"
FULLY_ASYNC = "fully_async_policy"
"""verl's trainer of another entry point, with a config of its own."""
MODES = ("pipeline_rl keep", "pipeline_rl recompute", "separate_async", FULLY_ASYNC, "sync")
PLAIN = "plain front end"
"""Option of a lane: generation as verl asks for it."""
PRESETS = ("setup", "cispo", "prompt_mean", "advantage", "fp32_head")
GPU = (
    *launching.ON_GPU,
    # lanes share devices: a fixed KV cache, and no look at what others allocate
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,8,16,32,64,96,128]",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1024",
)


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Args:
        mode: one of `MODES`.
        gpus: CUDA devices, or none: the CPU.
        trainer_gpus: of them, those that train (sync trains and generates on all).
        k: versions the trainer may be ahead of the data.
        steps: optimizer steps of each regime.
        seconds: after which the run is ended, from its start.
        more: further overrides.
        gate: file without which the run waits before its first request, or nothing. ``seconds`` count from there.
        plain: generation as verl asks for it, without the fast front end.
    """

    mode: str
    gpus: tuple[int, ...]
    trainer_gpus: int
    k: int
    steps: tuple[int, int]
    seconds: float
    more: tuple[str, ...] = ()
    gate: str = ""
    plain: bool = False

    @property
    def name(self) -> str:
        """As in the rows."""
        return f"{self.mode}, {PLAIN}" if self.plain else self.mode

    @property
    def lead(self) -> int:
        """Batches that are under way at once: 1 if generation and training take turns."""
        return 1 if self.mode == "sync" else self.k + 1


def mode_overrides(plan: Plan, size: Size) -> list[str]:
    """How the trainer mode divides devices and how far it may run ahead."""
    num = len(plan.gpus)
    if plan.mode == "sync":
        return ["trainer.v1.trainer_mode=sync", "trainer.nnodes=1", f"trainer.n_gpus_per_node={num or 1}"]
    apart = [
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        f"actor_rollout_ref.rollout.n_gpus_per_node={max(1, num - plan.trainer_gpus)}",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={plan.trainer_gpus}",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={'nccl' if num else 'gloo'}",
    ]
    if plan.mode == FULLY_ASYNC:
        return [
            *apart,
            "rollout.nnodes=1",
            f"rollout.n_gpus_per_node={max(1, num - plan.trainer_gpus)}",
            "data.gen_batch_size=1",
            # without it the agent loop that a prompt names is not asked
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            # its trainer takes a mini-batch from the queue, and hands its weights over after each
            f"actor_rollout_ref.actor.ppo_mini_batch_size={size.prompts}",
            "async_training.require_batches=1",
            "async_training.trigger_parameter_sync_step=1",
            # as far ahead of the trainer as k lets pipeline_rl be, all of it under way at once if it likes
            f"async_training.staleness_threshold={plan.k}",
            f"async_training.concurrent_samples_per_replica={plan.lead * size.prompts}",
            f"rollout.n={size.group}",
            f"rollout.total_rollout_steps={sum(plan.steps) * size.prompts}",
        ]
    if plan.mode == "separate_async":
        return [
            "trainer.v1.trainer_mode=separate_async",
            "trainer.v1.separate_async.parameter_sync_step=1",
            # as far ahead of the trainer as k lets pipeline_rl be
            f"trainer.v1.separate_async.num_warmup_batches={plan.k}",
            f"trainer.v1.sampler.max_off_policy_threshold={plan.k + 1}",
            "trainer.v1.sampler.max_off_policy_strategy=wait",
            *apart,
        ]
    return [
        "trainer.v1.trainer_mode=pipeline_rl",
        f"+trainer.v1.pipeline_rl.max_staleness={plan.k}",
        f"+trainer.v1.pipeline_rl.kv_on_update={plan.mode.removeprefix('pipeline_rl ')}",
        "++actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.rebuild_group=True",
        *apart,
    ]


def overrides(plan: Plan, size: Size, assets: Path, folder: Path) -> list[str]:
    """The whole command line."""
    prompt = max(regime.prompt_tokens for regime in size.regimes)
    response = max(regime.longest for regime in size.regimes)
    micro = 4 if plan.gpus else 8
    cpu = [] if plan.gpus else ["cpu"]
    if plan.mode == FULLY_ASYNC:  # our names are for verl's V1 trainers: its own loss, estimator, head and front end
        names = [f"+scalerl=[{','.join(['setup', *cpu])}]", "algorithm.adv_estimator=grpo"]
    else:
        presets = [*PRESETS, *([] if plan.plain else ["fast_frontend"]), *cpu]
        # what a batch trains shall not depend on chance
        names = [f"+scalerl=[{','.join(presets)}]", "algorithm.scalerl.zero_variance=keep"]
    return [
        *names,
        *(GPU if plan.gpus else ()),
        *(
            [f"+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={size.kv_bytes}"]
            if plan.gpus
            else []
        ),
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/val.parquet",
        # verl's fully_async_policy wants 0: it draws prompt by prompt
        f"data.train_batch_size={0 if plan.mode == FULLY_ASYNC else size.prompts}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={assets}/model",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        f"actor_rollout_ref.rollout.n={size.group}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro}",
        f"actor_rollout_ref.rollout.max_model_len={prompt + response}",
        "actor_rollout_ref.rollout.max_num_batched_tokens=8192",
        f"actor_rollout_ref.rollout.max_num_seqs={size.slots}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={assets}/loop.yaml",
        f"reward.custom_reward_function.path={PLUGIN}/scalerl_bench/reward.py",
        "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
        *launching.ONLY_STEPS,
        "trainer.experiment_name=pipeline",
        f"trainer.total_training_steps={sum(plan.steps)}",
        f"trainer.default_local_dir={folder}/checkpoints",
        *mode_overrides(plan, size),
        *plan.more,
    ]


def environment(plan: Plan, size: Size, folder: Path, run_id: str) -> dict[str, str]:
    """Of the run's processes, all of which inherit it."""
    return {
        **launching.environment(folder, run_id, plan.gpus, [PLUGIN]),
        "BENCH_ENGINE_LOG": str(folder),
        "BENCH_PROMPT_TOKENS": ",".join(str(regime.prompt_tokens) for regime in size.regimes),
        "BENCH_LANE": f"lane{run_id[:6]}",
        "BENCH_GATE": plan.gate,
    }


def launch(plan: Plan, size: Size, assets: Path, folder: Path) -> int | None:
    """Run to the last step, or for ``plan.seconds``; the exit code, or None if it was ended."""
    env = environment(plan, size, folder, launching.new_run_id())
    lines = overrides(plan, size, assets, folder)
    entry = "verl.experimental.fully_async_policy.fully_async_main" if plan.mode == FULLY_ASYNC else launching.MAIN_PPO
    return launching.run_verl(lines, env, folder, sum(plan.steps), plan.seconds, plan.gate, entry)
