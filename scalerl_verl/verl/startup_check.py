# SPDX-License-Identifier: Apache-2.0
"""Run our start-up check in the driver, before Ray starts."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import PatchSpec


def _build(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        from scalerl_verl.verl.startup import prepare_run

        prepare_run(config)
        return original(config, *args, **kwargs)

    # Another plugin may have imported verl's launcher before us, with the original in it.
    for name, launcher in list(sys.modules.items()):
        bound = getattr(launcher, "__dict__", {}).get("validate_config") if name.startswith("verl.") else None
        if bound is not None and bound is original and launcher is not module:
            vars(launcher)["validate_config"] = validate_config
    return validate_config


SPECS = (
    PatchSpec(
        name="verl.startup_check",
        module="verl.utils.config",
        target="validate_config",
        build=_build,
        kind="wrap",
        why="Our start-up check runs here, because verl has no plugin hook between composing the config and starting "
        "Ray; without it contradictions appear minutes later in a worker, or never. A run that uses none of our names "
        "is not changed.",
        sources=("9e2d82e4b51e7099f5c295c96ba1d117c7255965a1ed14e8bc25f289f56f2028",),
        when="always",
        removal="verl offers a config-validation hook to plugins",
        # main_ppo binds the name after `import verl`, which loads us.
        late_ok=True,
        guard=True,
    ),
)
