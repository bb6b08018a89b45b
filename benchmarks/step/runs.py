# SPDX-License-Identifier: Apache-2.0
"""Command lines of the step benchmark: verl's own GRPO and the recipe, alike in all that is not the algorithm."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks import launching
from benchmarks.pipeline.assets import SIZES as MODELS
from benchmarks.pipeline.assets import make_model
from benchmarks.pipeline.runs import PLUGIN

GRPO, GRPO_FUSED = "verl grpo", "verl grpo, Triton head"
RECIPE, INTERRUPTED = "recipe", "recipe, interruption"
WAYS = (GRPO, GRPO_FUSED, RECIPE, INTERRUPTED)


@dataclass(frozen=True)
class Load:
    """A model of the pipeline benchmark, and what it answers in a step.

    Args:
        model: name of its size.
        prompts, group: of a batch.
        prompt_tokens, response_tokens: of every prompt and response. A random model does not end by itself.
        answer_tokens: of those of a response, for the answer after forced interruption.
        micro_tokens: of a micro-batch.
    """

    model: str
    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int
    answer_tokens: int
    micro_tokens: int

    @property
    def max_length(self) -> int:
        return self.prompt_tokens + self.response_tokens


LOADS = {"2B": Load("2B", 48, 16, 64, 852, 48, 32_768), "cpu": Load("cpu", 4, 4, 8, 40, 8, 512)}


def make_assets(folder: Path, load: Load) -> None:
    """Model and prompts, once."""
    import pandas

    if (folder / "model").exists():
        return
    (folder / "model").mkdir(parents=True)
    make_model(folder / "model", MODELS[load.model])
    drawing, rows = random.Random(0), []
    for index in range(64 * load.prompts):
        words = " ".join(f"w{drawing.randrange(MODELS[load.model].vocab // 2)}" for _ in range(load.prompt_tokens - 2))
        rows.append(
            {
                "data_source": "bench", "prompt": [{"role": "user", "content": words}], "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": index},
            }
        )  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")


def algorithm(way: str, load: Load) -> list[str]:
    """The names that make the difference."""
    if way in (GRPO, GRPO_FUSED):
        fused = [
            "actor_rollout_ref.model.use_fused_kernels=True",
            "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton",
        ]
        return [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.n={load.group}",
            f"data.train_batch_size={load.prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={load.prompts}",
            *(fused if way == GRPO_FUSED else []),
        ]
    # every group has a signal, as good as always: what a batch trains does not depend on chance
    lines = ["algorithm.scalerl.zero_variance=keep", f"actor_rollout_ref.rollout.n={load.group}"]
    lines += [f"data.train_batch_size={load.prompts}"]
    if way == RECIPE:
        return [*lines, "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"]
    section = "algorithm.scalerl.interruption"
    answer, end = load.answer_tokens, load.response_tokens
    thinking = [end - 3 * answer, end - 2 * answer]
    settings = {
        "thinking_budget": json.dumps(thinking), "answer_budget": answer, "start_marker": "null",
        "phrase": '"w1 w2 w3 </think>"',
    }  # fmt: skip
    return [*lines, *(f"++{section}.{key}={value}" for key, value in settings.items())]


def presets(way: str, *, on_gpu: bool) -> list[str]:
    """Of the run: the recipe; the CPU."""
    found = [*(["recipe"] if way in (RECIPE, INTERRUPTED) else []), *([] if on_gpu else ["cpu"])]
    return [f"+scalerl=[{','.join(found)}]"] if found else []


ON_GPU = (
    *launching.ON_GPU,
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    "actor_rollout_ref.rollout.agent.num_workers=4",
)


def overrides(way: str, load: Load, assets: Path, folder: Path, num_steps: int, *, on_gpu: bool) -> list[str]:
    """The whole command line."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    num_responses = load.prompts * load.group
    return [
        *presets(way, on_gpu=on_gpu),
        *([*ON_GPU, f"{rollout}.cudagraph_capture_sizes=[1,16,64,256,512,{num_responses}]"] if on_gpu else []),
        "trainer.v1.trainer_mode=sync",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/val.parquet",
        f"data.max_prompt_length={load.prompt_tokens}",
        f"data.max_response_length={load.response_tokens}",
        "data.seed=0",
        f"actor_rollout_ref.model.path={assets}/model",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={load.micro_tokens}",
        f"{actor}.optim.lr=1e-6",
        f"{rollout}.max_model_len={load.max_length}",
        f"{rollout}.max_num_seqs={num_responses}",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.log_prob_use_dynamic_bsz=True",
        f"{rollout}.log_prob_max_token_len_per_gpu={load.micro_tokens}",
        f"reward.custom_reward_function.path={PLUGIN}/scalerl_bench/reward.py",
        *launching.ONLY_STEPS,
        "trainer.experiment_name=step",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.default_local_dir={folder}/checkpoints",
        *algorithm(way, load),
    ]
