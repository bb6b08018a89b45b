# SPDX-License-Identifier: Apache-2.0
"""Rows prepared before verl's advantage estimators, weights folded into what they return (driver)."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import PatchSpec


def _build_advantage(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def compute_advantage_for_multi_trajectories(data: Any, batch_keys: Any, *args: Any, **kwargs: Any) -> Any:
        from scalerl_verl.advantage.step import fold_row_weights, prepare_rows

        prepare_rows(data, batch_keys)
        return fold_row_weights(original(data, batch_keys, *args, **kwargs))

    return compute_advantage_for_multi_trajectories


SPECS = (
    PatchSpec(
        name="verl.training_step.weights",
        module="verl.trainer.ppo.v1.trainer_base",
        target="compute_advantage_for_multi_trajectories",
        build=_build_advantage,
        kind="wrap",
        why="Row weights need whole groups, which only the driver sees, and they are multiplied in after the "
        "estimator. Rewards and sessions are read before it.",
        sources=("46c7a2240d72f694b8e836a74943a7b7c340ea5bd16e579b578fbf1b4802b0fe",),
        removal="verl has a prompt-level aggregation mode (see patches/verl)",
    ),
)
