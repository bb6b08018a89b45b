# SPDX-License-Identifier: Apache-2.0
"""Stop verl's other trainers from replacing our policy loss without a word."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import LOSS_MODE, VALUES
from scalerl_verl.upstream.spec import PatchSpec


def _build(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def apply_bypass_mode(*args: Any, **kwargs: Any) -> Any:
        # The third argument in the version this was written for; whatever comes otherwise passes through.
        policy_loss_config = kwargs.get("policy_loss_config", args[2] if len(args) > 2 else None)
        loss = (policy_loss_config or {}).get("loss_mode", "")
        if str(loss) in VALUES[LOSS_MODE]:
            raise ScaleRLConfigError(
                [
                    f"this trainer's bypass mode would replace policy_loss.loss_mode={loss} by its own loss: launch "
                    "through python -m verl.trainer.main_ppo (V1 trainers), which keeps it"
                ]
            )
        return original(*args, **kwargs)

    return apply_bypass_mode


SPECS = (
    PatchSpec(
        name="verl.bypass_mode.keeps_loss",
        module="verl.trainer.ppo.rollout_corr_helper",
        target="apply_bypass_mode",
        build=_build,
        kind="wrap",
        why="The V0 and fully-async trainers overwrite the configured policy loss in bypass mode: ours would silently "
        "become PPO-clip, so such a run is refused. Any other loss is not touched.",
        sources=("538255bf5eb31878cb6649b4c1b382d748a98edc1b32c16fdf1af5ed12dd117a",),
        when="always",
        removal="those trainers keep the configured loss",
        guard=True,
    ),
)
