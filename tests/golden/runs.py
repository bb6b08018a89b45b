# SPDX-License-Identifier: Apache-2.0
"""Metrics, weights and gradients of short runs of verl on the CPU, one a trainer mode, whose responses are seeded.

The first trains its first batch once more under each of `tests.e2e.toggles`. What is still a matter of time (of the
asynchronous modes almost all) differs between two recordings of the same code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.e2e import interrupting, prompts_ahead
from tests.e2e.conftest import NAMED
from tests.e2e.launching import CPU_ENVIRONMENT, launch_verl, make_assets
from tests.e2e.toggles import all_toggles

WHOLE_PROMPTS = "actor_rollout_ref.rollout.max_num_batched_tokens=4096"
"""All requests at once, each in one piece: vLLM on a CPU ends with an error where a prompt in pieces has a seed."""


def record(folder: Path) -> dict[str, dict[str, float]]:
    """``<mode> step <number>`` or ``replay of <toggle>`` -> metric -> value; runs go below ``folder``."""
    assets, toggles, found = make_assets(folder / "assets"), folder / "toggles.json", {}
    _grade_by_length(assets)
    toggles.write_text(json.dumps(all_toggles()), encoding="utf-8")
    for name, lines in _modes(assets, folder):
        (folder / name).mkdir()
        replayed = {"PROBE_TOGGLES": str(toggles)} if name == "sync" else {}
        run = launch_verl(
            folder / name, assets, [*lines, WHOLE_PROMPTS], {**CPU_ENVIRONMENT, "PROBE_SEED": "1", **replayed}
        )
        assert run.code == 0, run.tail()
        found |= {f"{name} step {step}": metrics for step, metrics in run.metrics.items()}
        weights = folder / name / "weights"
        found[f"{name}, weights and gradients"] = dict(_project(weights))
        if replayed:
            kept = json.loads((weights / "replay.json").read_text(encoding="utf-8"))
            found |= {f"replay of {toggle}": metrics for toggle, metrics in kept.items()}
    return found


def _grade_by_length(assets: Path) -> None:
    """Of `k of n` responses those that come first are right, which is a matter of time."""
    import pandas

    for path in (assets / "kinds.parquet", assets / "mixed.parquet"):
        rows = pandas.read_parquet(path)
        for model in rows["reward_model"]:
            model["ground_truth"] = re.sub(r"\d of \d", "even", model["ground_truth"])
        rows.to_parquet(path)


def _modes(assets: Path, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Name of a run -> what Hydra gets."""
    stopping, steps = f"actor_rollout_ref.model.path={assets}/stopping", "trainer.total_training_steps=2"
    validation = ["trainer.val_before_train=True", "trainer.test_freq=2", "trainer.total_training_steps=3"]
    yield "sync", [*NAMED, f"data.train_files={assets}/kinds.parquet", stopping, *validation]
    mixed = [f"data.train_files={assets}/mixed.parquet", steps]
    yield "colocate_async", [*NAMED[:2], *interrupting.make_inputs(assets, folder), *mixed]
    ahead = prompts_ahead.asynchronous_overrides(assets / "mixed.parquet", folder / "rollouts")
    yield "separate_async", [*NAMED[:2], *ahead, "trainer.save_freq=-1", steps]
    for k in (0, 4):
        bound = f"trainer.v1.pipeline_rl.max_staleness={k}"
        yield f"pipeline_rl {k}", ["+scalerl=[scalerl,cpu]", *NAMED[1:], *mixed, stopping, bound]
    updates = ["trainer.v1.ppo_off_policy.num_updates=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    yield "ppo_off_policy", ["+scalerl=[ppo_off_policy,cpu]", *NAMED[1:], *mixed, stopping, *updates]


def _project(folder: Path) -> Iterator[tuple[str, float]]:
    """Weights sent after each step, and gradients of replays: their length along one fixed direction."""
    import torch

    for path in sorted([*folder.glob("sent-*.pt"), *folder.glob("gradient of *.pt")]):
        tensors = torch.load(path, map_location="cpu")
        flat = torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])
        direction = torch.randn(len(flat), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        yield path.stem, float(flat @ direction / direction.norm())
