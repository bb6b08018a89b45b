# SPDX-License-Identifier: Apache-2.0
"""Runs of test_curriculum.py, the asynchronous one of which test_separate_async.py looks at, too."""

from __future__ import annotations

from pathlib import Path

from scalerl_verl.json_lines import read_records
from tests.e2e.launching import VerlRun

ROWS, BATCH = 16, 4
EASY, HARD = set(range(0, ROWS, 2)), set(range(1, ROWS, 2))
# Four steps over everything, then two and two over the half that does not pass.
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

    def row(index: int) -> dict:
        return {
            "data_source": "tests/curriculum",
            "prompt": [{"role": "user", "content": f"{index}+1"}],
            "ability": "test",
            "reward_model": {"style": "rule", "ground_truth": "pass" if index in EASY else "2 of 4"},
            "extra_info": {"split": "train", "index": index},
        }

    pandas.DataFrame([row(index) for index in range(ROWS)]).to_parquet(folder / "train.parquet")
    return folder / "train.parquet"


def overrides(data: Path, rollouts: Path) -> list[str]:
    """Three epochs, with a checkpoint in the middle of the second."""
    return [
        # The recipe's sampler, as every run here.
        f"data.train_files={data}",
        f"data.train_batch_size={BATCH}",
        "data.shuffle=True",
        f"data.seed={SEED}",
        # verl's default loads ahead with workers; then a loader's state is older than the history.
        "data.dataloader_num_workers=2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVED}",
        f"trainer.rollout_data_dir={rollouts}",
        "trainer.resume_mode=auto",
    ]


def asynchronous_overrides(data: Path, rollouts: Path) -> list[str]:
    """Disaggregated: prompts are fetched one by one and ahead of their results.

    No step samples before all that was handed out in earlier steps is complete (verl's strategy ``wait``), and the
    oldest go first: step k trains what step k-1 handed out, the first two what the first handed out, on any machine.
    Which four of those eight come first is up to the hashes of their ids.
    """
    return [
        *overrides(data, rollouts),
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


def first_metrics(first: VerlRun) -> dict[int, dict[str, float]]:
    """Step -> metrics of a run's first attempt, also when another one was resumed in its folder."""
    path = first.folder / "metrics.first.jsonl"
    lines = read_lines(path if path.exists() else first.folder / "metrics.jsonl")
    return {entry["step"]: entry["data"] for entry in lines}
