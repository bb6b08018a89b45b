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
        _checked[:] = [config]
        return original(config, *args, **kwargs)

    _bind_in_launchers(original, validate_config, module)
    return validate_config


def _bind_in_launchers(original: Any, ours: Any, module: ModuleType) -> None:
    """Another plugin may have imported verl's launchers before us, with the original in them."""
    for name, launcher in list(sys.modules.items()):
        bound = getattr(launcher, "__dict__", {}).get(ours.__name__) if name.startswith("verl.") else None
        if bound is not None and bound is original and launcher is not module:
            vars(launcher)[ours.__name__] = ours


_checked: list[Any] = []
"""The config that passed last, as the object it is."""


def _build_launch(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def run_ppo(config: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(config is checked for checked in _checked):
            from scalerl_verl.verl.startup import prepare_launch

            prepare_launch(config, [*args, *kwargs.values()], module)
        return original(config, *args, **kwargs)

    _bind_in_launchers(original, run_ppo, module)
    return run_ppo


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
    PatchSpec(
        name="verl.launch_check",
        module="verl.trainer.main_ppo",
        target="run_ppo",
        build=_build_launch,
        kind="wrap",
        why="Entry points of verl beside main_ppo (fully_async_main, one_step_off_policy, recipes) start Ray through "
        "it without validate_config: our names had no effect there, or failed in a worker with another reason.",
        sources=("16cd2df01be6db77e68c8a55d5e13c3f3d0e9d7a9e15357342b2b4715a7acc2d",),
        when="always",
        removal="verl offers a config-validation hook to plugins",
        late_ok=True,
        guard=True,
    ),
)
