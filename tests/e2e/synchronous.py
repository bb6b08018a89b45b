# SPDX-License-Identifier: Apache-2.0
"""The synchronous run of test_sync.py, test_pieces.py and test_curriculum.py: three epochs of no-positive-resampling.

In the order in which the first epoch draws them, eight problems are of `FIRST_KINDS`, eight earn equal rewards
throughout, and seven always pass: three steps. Two and two more steps go over the sixteen that do not always pass.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.launching import FIRST_KINDS, GROUP_SIZE, NUM_PROMPTS, problem

STEPS, SAVED = 7, 4
"""The checkpoint lies in the middle of the second epoch."""
_SEED = 0
_KINDS = (*FIRST_KINDS, *NUM_PROMPTS * ["equal"], *(NUM_PROMPTS - 1) * ["pass"], f"2 of {GROUP_SIZE}")
ROWS = len(_KINDS)


def _first_epoch() -> list[int]:
    """Rows in the order in which verl draws them first.

    A loader with workers begins its sampler twice, which draws an order each time; the second one counts.
    """
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randperm(ROWS, generator=generator).tolist() for _ in range(2)][-1]


EASY = {row for row, kind in zip(_first_epoch(), _KINDS, strict=True) if kind == "pass"}
HARD = set(range(ROWS)) - EASY


def make_data(folder: Path) -> Path:
    import pandas

    rows = [problem(index, kind) for index, kind in sorted(zip(_first_epoch(), _KINDS, strict=True))]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    return folder / "train.parquet"


def overrides(assets: Path, data: Path, rollouts: Path) -> list[str]:
    """Responses of many lengths to problems with known rewards, in an order of their own each epoch."""
    return [
        f"data.train_files={data}",
        f"actor_rollout_ref.model.path={assets}/stopping",
        "data.shuffle=True",
        f"data.seed={_SEED}",
        # verl's default loads ahead with workers; then a loader's state is older than the history.
        "data.dataloader_num_workers=2",
        f"trainer.save_freq={SAVED}",
        "trainer.test_freq=2",
        f"trainer.rollout_data_dir={rollouts}",
        "trainer.resume_mode=auto",
    ]
