# SPDX-License-Identifier: Apache-2.0
"""The run that test_interruption.py and test_colocate_async.py look at: a model that thinks for too long, in verl's
colocate_async trainer, where weight updates fall into the middle of responses."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.thinking_model import make_thinking_model

STEPS, TOTAL = 3, 96
LOW, HIGH, ANSWER = 56, 64, 4
VAL_BUDGET, VAL_PROMPTS, VAL_RESPONSES = 30, 16, 8
PHRASE = "Stop.</think>"
BLOCK = 32
PROBES = {"PROBE_PROMPTS": "1"}


def make_inputs(assets: Path, folder: Path) -> list[str]:
    """Write model and data to ``folder``; returns the run's overrides.

    Validation prompts name their loop in verl's column ``agent_name``: every second one is verl's single-turn loop.
    """
    import pandas

    make_thinking_model(folder / "model")
    rows = pandas.read_parquet(assets / "test.parquet").to_dict("records")
    val = [
        {
            **rows[0],
            "prompt": [{"role": "user", "content": f"{100 + index}+1"}],
            "agent_name": ["forced_interruption", "single_turn_agent"][index % 2],
        }
        for index in range(VAL_PROMPTS)
    ]
    pandas.DataFrame(val).to_parquet(folder / "val.parquet")
    section = "++algorithm.scalerl.interruption"
    return [
        "trainer.v1.trainer_mode=colocate_async",
        # Trainer and generator share one logical GPU, but verl counts the rollout's by itself.
        "ray_kwargs.ray_init.num_gpus=2",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_interruption",
        f"{section}.thinking_budget=[{LOW},{HIGH}]",
        f"{section}.answer_budget={ANSWER}",
        f"{section}.val_thinking_budget=[{VAL_BUDGET},{VAL_BUDGET}]",
        f"{section}.phrase='{PHRASE}'",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={assets}/mixed.parquet",
        f"data.val_files={folder}/val.parquet",
        f"data.max_response_length={TOTAL}",
        "actor_rollout_ref.rollout.max_model_len=128",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK}",
        f"actor_rollout_ref.rollout.val_kwargs.n={VAL_RESPONSES}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.val_before_train=True",
        f"trainer.validation_data_dir={folder / 'validation'}",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
        f"trainer.total_training_steps={STEPS}",
        # too little to learn to think shorter: interruption is there in every step
        "actor_rollout_ref.actor.optim.lr=1e-5",
    ]
