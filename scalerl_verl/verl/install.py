# SPDX-License-Identifier: Apache-2.0
"""Everything ``import verl`` triggers: names into verl's registries, patches scheduled, Hydra's search path."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.names import ESTIMATOR, LOSSES
from scalerl_verl.upstream import registry, status
from scalerl_verl.upstream.activation import is_active, is_cpu_platform, keep_warnings
from scalerl_verl.upstream.import_hooks import ModuleCallback, after_import
from scalerl_verl.upstream.source_check import stay_out
from scalerl_verl.verl.patches import VERL_SPECS


def install_verl() -> None:
    """Register names and schedule patches. ``verl`` is only half imported now: heavy parts wait for its modules."""
    if is_active():
        keep_warnings()
    if is_cpu_platform():
        from scalerl_verl.cpu.vllm_alias import install_vllm_alias

        install_vllm_alias()
        # Registering the platform class must come before the first get_platform().
        import scalerl_verl.cpu.platform  # noqa: F401

    registry.install(VERL_SPECS)
    for name, register in _NAMES_OF_OURS.items():
        after_import(name, functools.partial(_register, register))
    registry.on_change.append(status.record)
    status.record("verl")


def _register(register: ModuleCallback, module: ModuleType) -> None:
    """Put names into a registry; where that fails, a run that uses none of them goes on."""
    try:
        register(module)
    except Exception as error:  # an upstream of another shape fails in any way
        if is_active():
            raise
        stay_out(f"its names cannot be put into {module.__name__}: {type(error).__name__}: {error}")


def register_algorithms(core_algos: ModuleType) -> None:
    """Register our policy losses and estimator; what they need is imported at the first call.

    Raises:
        ValueError: another plugin registered one of them (verl would overwrite a policy loss without a word).
    """
    for name in LOSSES:
        other = core_algos.POLICY_LOSS_REGISTRY.get(name)
        if other is not None and other is not _policy_loss:
            raise ValueError(
                f"another plugin registered the policy loss {name!r} ({other.__module__}), a name of scalerl_verl: "
                "uninstall one of them, or leave it out with VERL_USE_EXTERNAL_PLUGINS"
            )
        core_algos.register_policy_loss(name)(_policy_loss)
    core_algos.register_adv_est(ESTIMATOR)(_estimate_advantages)


def _policy_loss(*args: Any, **kwargs: Any) -> Any:
    from scalerl_verl.verl import algorithms

    return algorithms.policy_loss(*args, **kwargs)


def _estimate_advantages(*args: Any, **kwargs: Any) -> Any:
    from scalerl_verl.verl import algorithms

    return algorithms.estimate_advantages(*args, **kwargs)


def _register_checkpoint_engine(_: ModuleType) -> None:
    import scalerl_verl.cpu.gloo_checkpoint  # noqa: F401


def _register_agent_loop(_: ModuleType) -> None:
    import scalerl_verl.interruption.verl  # noqa: F401


def _register_engines(engines: ModuleType) -> None:
    # They have our loss and head: verl takes them in a run of ours only.
    if is_active():
        from scalerl_verl.verl import engine

        engine.register(engines)


def _register_trainers(_: ModuleType) -> None:
    # They subclass a good part of verl: a run that does not ask for them shall not depend on their import.
    if is_active():
        import scalerl_verl.verl.trainer  # noqa: F401


def _register_search_path(plugins_module: ModuleType) -> None:
    from scalerl_verl.verl.hydra_search_path import ScaleRLSearchPath

    plugins_module.Plugins.instance().register(ScaleRLSearchPath)


_NAMES_OF_OURS: dict[str, ModuleCallback] = {
    "verl.trainer.ppo.core_algos": register_algorithms,
    "verl.checkpoint_engine.base": _register_checkpoint_engine,
    "verl.experimental.agent_loop": _register_agent_loop,
    "verl.workers.engine": _register_engines,
    "verl.trainer.ppo.v1": _register_trainers,
    "hydra.core.plugins": _register_search_path,
}
"""Module of a registry -> what puts our names there at the end of its import."""
