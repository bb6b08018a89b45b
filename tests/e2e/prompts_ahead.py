# SPDX-License-Identifier: Apache-2.0
"""The asynchronous run of test_separate_async.py and test_curriculum.py, with a checkpoint and three epochs or four."""

from __future__ import annotations

from pathlib import Path

from scalerl_verl.json_lines import read_records
from tests.e2e.launching import problem

ROWS, BATCH = 16, 4
EASY, HARD = set(range(0, ROWS, 2)), set(range(1, ROWS, 2))
STEPS, SAVED = 8, 5
SEED = 0
"""Of an order in which no four of the first eight problems, nor the four of a later step, always pass all of them.

verl trains what was handed out in one step in an arbitrary order, and a step without a mixed group trains nothing.
"""
LOW, HIGH, ANSWER = 6, 9, 5
"""Budgets of forced interruption in the asynchronous run."""


def make_data(folder: Path) -> Path:
    """Problems of which every second one always passes, and of the others two responses in four."""
    import pandas

    rows = [problem(index, "pass" if index in EASY else "2 of 4") for index in range(ROWS)]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    return folder / "train.parquet"


def asynchronous_overrides(data: Path, rollouts: Path, steps: int = STEPS) -> list[str]:
    """Disaggregated: prompts are fetched one by one and ahead of their results.

    No step samples before all that was handed out in earlier steps is complete (verl's strategy ``wait``), and the
    oldest go first: step k trains what step k-1 handed out, the first two what the first handed out, on any machine.
    Which four of those eight come first is up to the hashes of their ids.
    """
    return [
        f"data.train_files={data}",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=True",
        f"data.seed={SEED}",
        # verl's default loads ahead with workers; then a loader's state is older than the history.
        "data.dataloader_num_workers=2",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={SAVED}",
        f"trainer.rollout_data_dir={rollouts}",
        "trainer.resume_mode=auto",
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
        "trainer.v1.sampler.max_off_policy_threshold=2",
        "reward.custom_reward_function.name=gated_score",
        # Two trainer ranks, two updates a step; a rank has two responses to each of the two prompts of an update.
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH // 2}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=3",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forced_interruption",
        # Short responses are rewarded as often as long ones, the first that arrive: at the usual rate, and where it may
        # end by itself, the model learns to, and then nothing is left to interrupt.
        "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        # A random model opens no thinking: all it writes counts as such.
        "++algorithm.scalerl.interruption={start_marker: null, phrase: '</think>', "
        f"thinking_budget: [{LOW}, {HIGH}], answer_budget: {ANSWER}}}",
    ]


def read_lines(path: Path) -> list[dict]:
    return read_records(path)
