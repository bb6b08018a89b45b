# SPDX-License-Identifier: Apache-2.0
"""What happens in the driver between composing the config and starting Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl.advantage.passing import read_pass_rule
from scalerl_verl.config import checks as config_checks
from scalerl_verl.config import machine_checks, preset_report
from scalerl_verl.config.class_checks import OURS
from scalerl_verl.config.cluster import has_own_ray
from scalerl_verl.curriculum import settings as curriculum_settings
from scalerl_verl.errors import PatchError, ScaleRLConfigError
from scalerl_verl.generator import frontend
from scalerl_verl.names import (
    ACTOR_CLASS,
    LOSS_MODE,
    LOSS_SECTION,
    PLATFORM_ENV,
    PROMPT_MEAN,
    RAY,
    TRAINER_MODE,
    VALUES,
    select,
)
from scalerl_verl.names.asking import asked_names, loss_agg_mode, loss_mode
from scalerl_verl.upstream import nodes, registry, status
from scalerl_verl.upstream.activation import FORWARDED_ENV, clear_active, is_checked, set_active
from scalerl_verl.upstream.source_check import check_sources
from scalerl_verl.verl.doors import point_at_ours, restore_manager, restore_mode
from scalerl_verl.verl.patches import SYMBOLS

_CRITIC_MODE = "critic.loss_agg_mode"


class RefusedRunError(ScaleRLConfigError, CompactHydraException):
    """Contradictions of a config; Hydra prints such an error without a traceback."""


class RefusedUpstreamError(PatchError, CompactHydraException):
    """Another verl or vLLM than the patches were written for; Hydra prints such an error without a traceback."""


def prepare_run(config: DictConfig) -> dict[str, str]:
    """Check the composed config, switch this run's processes on, and hand verl our config classes.

    A config that uses none of our names is left alone.

    Args:
        config: verl's composed config; changed in place where our names need it.

    Returns:
        Our names in use (config path -> value).

    Raises:
        ScaleRLConfigError: every contradiction found, with what to change.
        PatchError: the installed verl is not one our patches were written for.
    """
    if is_checked():  # and so may this config be: it has the user's names again
        restore_mode(config)
        restore_manager(config)
    # Most baselines name nothing of ours, and their presets can be overridden as well.
    preset_report.report(config)
    asked = asked_names(config)
    if not asked:
        clear_active()
        return asked
    try:
        check_sources(SYMBOLS)
    except PatchError as error:
        raise RefusedUpstreamError(str(error)) from None
    problems = config_checks.find_problems(config, also=machine_checks.find_problems)
    problems += _ray_problems()
    if problems:
        raise RefusedRunError(problems)
    set_active()
    registry.activate()
    _select_policy_loss_config(config)
    _select_actor_config(config)
    curriculum_settings.complete(config)
    point_at_ours(config)
    frontend.complete(config)
    if not has_own_ray(config):  # the trainer may be on another node
        nodes.note_driver()
    _forward_environment(config)
    status.record()
    names = ", ".join(f"{path}={value}" for path, value in asked.items())
    print(f"[scalerl_verl] active: {names}", file=sys.stderr, flush=True)
    print(f"[scalerl_verl] {read_pass_rule(config).describe()}", file=sys.stderr, flush=True)
    return asked


def prepare_launch(config: DictConfig, given: Iterable[Any], main_ppo: ModuleType) -> None:
    """Check a run that another entry point than main_ppo launches: what it trains with is in its task runner.

    Args:
        config: what is about to be run, not checked so far.
        given: what verl's run_ppo got beside it, with the class of the task runner.
        main_ppo: verl's module of that name.

    Raises:
        ScaleRLConfigError: the task runner is not that of verl's V1 trainer and the config uses our names, or as in
            `prepare_run`.
        PatchError: as in `prepare_run`.
    """
    runners = [_remote_class(value) for value in given]
    ours = _remote_class(main_ppo.TaskRunnerV1)
    if any(runner is not None and ours in runner.__mro__ for runner in runners):
        prepare_run(config)
        return
    asked = [f"{path}={value}" for path, value in asked_names(config).items() if path != PLATFORM_ENV]
    if asked:
        found = [f"{runner.__module__}.{runner.__qualname__}" for runner in runners if runner is not None]
        raise RefusedRunError([another_trainer(" and ".join(found) or "another task runner", asked)])


def another_trainer(what: str, asked: Iterable[str]) -> str:
    """The refusal of names of ours that an entry point without verl's V1 trainer got."""
    return (
        f"{what} is not the V1 trainer of verl.trainer.main_ppo, and our names have no effect in it, or another one: "
        f"{', '.join(asked)}. Launch with python -m verl.trainer.main_ppo (asynchronous training is +scalerl=pipeline, "
        f"or {TRAINER_MODE}=separate_async), or delete these names"
    )


def _remote_class(value: Any) -> type | None:
    """The class that a user put into ``ray.remote``; None if ``value`` is no such thing.

    Ray derives a class of its own from it.
    """
    made = getattr(getattr(value, "__ray_metadata__", None), "modified_class", None)
    bases: tuple[type, ...] = getattr(made, "__bases__", ())
    return bases[0] if bases else None


def _ray_problems() -> list[str]:
    """Whether this process started Ray for an earlier run (Hydra's multirun), whose workers do not load our pieces."""
    import ray

    if ray.is_initialized() and not is_checked():
        return [
            "Ray is already running in this process for a run without our names: launch each run by itself, with "
            "python -m verl.trainer.main_ppo (entry points of other trainers check their config after Ray has started)"
        ]
    return []


def _select_policy_loss_config(config: DictConfig) -> None:
    """verl instantiates the section by its ``_target_``, whose class refuses keys it does not know."""
    if loss_mode(config) not in VALUES[LOSS_MODE]:
        return
    with open_dict(config):
        OmegaConf.update(config, f"{LOSS_SECTION}._target_", f"{OURS}.ScaleRLPolicyLossConfig", force_add=True)


def _select_actor_config(config: DictConfig) -> None:
    """verl's classes refuse an aggregation mode that they do not know; the critic's follows the actor's by default."""
    if loss_agg_mode(config) != PROMPT_MEAN:
        return
    # A config that is checked again has our class already.
    actor = str(select(config, ACTOR_CLASS)).rpartition(".")[2].removeprefix("ScaleRL")
    with open_dict(config):
        OmegaConf.update(config, ACTOR_CLASS, f"{OURS}.ScaleRL{actor}")
        if select(config, _CRITIC_MODE) == PROMPT_MEAN:
            # Values carry no prompt weight.
            OmegaConf.update(config, _CRITIC_MODE, "token-mean")


def _forward_environment(config: DictConfig) -> None:
    """Ray copies the shell's environment on this node only; other nodes get what runtime_env lists."""
    values = {name: os.environ[name] for name in FORWARDED_ENV if name in os.environ}
    with open_dict(config):
        for name, value in values.items():
            OmegaConf.update(config, f"{RAY}.runtime_env.env_vars.{name}", value, force_add=True)
