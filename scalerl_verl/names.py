# SPDX-License-Identifier: Apache-2.0
"""Every name of ours that a user types: where it stands in the config, what may stand there, and what asks for us.

Imports the standard library only: the guard of a plugin that failed to load reads this list, too. OmegaConf is imported
where a composed config is at hand.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from scalerl_verl.errors import ScaleRLConfigError

ACTIVE_ENV = "SCALERL_VERL_ACTIVE"
PLATFORM_ENV = "VERL_PLATFORM"

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
LOSS_SECTION = f"{ACTOR}.policy_loss"
LOSS_MODE, CISPO = f"{LOSS_SECTION}.loss_mode", "scalerl_cispo"
LOSS_AGG_MODE, PROMPT_MEAN = f"{ACTOR}.loss_agg_mode", "prompt-mean"
ADV_ESTIMATOR, ESTIMATOR = "algorithm.adv_estimator", "scalerl"
ALGORITHM_SECTION = "algorithm.scalerl"
SAMPLER_SECTION = "data.sampler"
SAMPLER_CLASS = "scalerl_verl.curriculum.NoPositiveResampling"
CHECKPOINT_BACKEND, GLOO = f"{ROLLOUT}.checkpoint_engine.backend", "gloo"
TRAINER_MODE, PIPELINE_RL, PPO_OFF_POLICY = "trainer.v1.trainer_mode", "pipeline_rl", "ppo_off_policy"
AGENT_LOOP, INTERRUPTION_LOOP = f"{ROLLOUT}.agent.default_agent_loop", "forced_interruption"
HEAD_BACKEND = f"{MODEL}.fused_kernel_options.impl_backend"
FP32, SHARED_PASS = "fp32", "fp32_shared_pass"
HF_OVERRIDES = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides"
HEAD_DTYPE, GENERATOR_DTYPE = f"{HF_OVERRIDES}.head_dtype", "float32"
PRESET_GROUP = "scalerl"

DEFAULT_EPS_MAX = 5.0
"""Absolute cap of the importance ratio; the paper finds 4, 5 and 8 alike."""

VALUES: dict[str, frozenset[str]] = {
    LOSS_MODE: frozenset({CISPO}),
    LOSS_AGG_MODE: frozenset({PROMPT_MEAN}),
    ADV_ESTIMATOR: frozenset({ESTIMATOR}),
    f"{SAMPLER_SECTION}.class_path": frozenset({SAMPLER_CLASS}),
    CHECKPOINT_BACKEND: frozenset({GLOO}),
    TRAINER_MODE: frozenset({PIPELINE_RL, PPO_OFF_POLICY}),
    AGENT_LOOP: frozenset({INTERRUPTION_LOOP}),
    HEAD_BACKEND: frozenset({FP32, SHARED_PASS}),
    HEAD_DTYPE: frozenset({GENERATOR_DTYPE, "float"}),
}
"""Config path -> our values of it."""
OWN_KEYS = (
    "adv_norm",
    "zero_variance",
    "reward_shaping",
    "interruption",
    "truncation_alarm",
    "pass_key",
    "pass_threshold",
)
"""Keys of ``algorithm.scalerl``."""
FOR_ANY_ESTIMATOR = frozenset(OWN_KEYS) - {"adv_norm", "zero_variance"}
"""Those that do not need the estimator ``scalerl``."""
LOSS_KEYS = ("eps_max", "token_mask", "sequence_trunc")
"""Beginnings of our keys of the loss."""
SECTIONS: dict[str, tuple[str, ...]] = {
    "": (PRESET_GROUP,),
    "algorithm": ("scalerl", *OWN_KEYS),
    LOSS_SECTION: LOSS_KEYS,
    "trainer.v1": (PIPELINE_RL, PPO_OFF_POLICY),
    "trainer.v1.sampler": ("poll_interval",),
    "trainer.v1.sampler.sampler_kwargs": ("poll_interval",),
}
"""Config section -> beginnings of keys that verl does not have and a user of ours may put there, rightly or not."""
_ALIKE = 0.85
"""Similarity from which a value counts as a misspelling: lets verl's `cispo` and `seq-mean-token-mean` pass."""
_PART = 6
"""Letters from which a part of a name (`pipeline`, `off_policy`) counts as one: lets verl's `cispo` pass."""
PREFIXES = ("scalerl", "fp32", "fp-32", "float32", "float-32", "torch.float32")
"""Beginnings of values that verl has none of: where one of our names may stand, such a value was meant to be one."""
Settings = TypeVar("Settings")


def is_cpu_platform(environ: Mapping[str, str] = os.environ) -> bool:
    """``VERL_PLATFORM=cpu``: verl's whole loop runs on the CPU."""
    return environ.get(PLATFORM_ENV, "").strip().lower() == "cpu"


def select(config: Any, path: str, default: Any = None) -> Any:
    """``config.a.b.c`` of a DictConfig, or ``default`` if any part is missing, null or no section."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigTypeError

    try:
        value = OmegaConf.select(config, path, default=default)
    except ConfigTypeError:  # a list where a section is meant
        return default
    return default if value is None else value


def select_list(config: Any, path: str) -> list[str]:
    """Values of a key that takes one or a list of them, such as file names; empty if it is missing or null."""
    from omegaconf import ListConfig

    value = select(config, path)
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple | ListConfig) else [str(value)]


def only_validates(config: Any) -> bool:
    """Whether a run ends after verl's validation before training: it is no attempt at the run in its folder."""
    return bool(select(config, "trainer.val_only") and select(config, "trainer.val_before_train", True))


def _peek(config: Any, path: str) -> Any:
    """`select`, or None where the way there is no section or refers to what is not there: both are reported apart."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        return select(config, path)
    except OmegaConfBaseException:
        return None


def generator_head_dtype(config: Any) -> Any:
    """vLLM's head dtype as configured, or None; `hf_overrides` may be a section or JSON text."""
    overrides = _peek(config, HF_OVERRIDES)
    if isinstance(overrides, str):
        try:
            overrides = json.loads(overrides)
        except ValueError:
            return None  # vLLM refuses such text itself
    if isinstance(overrides, dict):
        return overrides.get("head_dtype")
    return _peek(config, HEAD_DTYPE) if hasattr(overrides, "keys") else None


def _value(config: Any, path: str) -> str:
    """The value at a path as text."""
    return str((generator_head_dtype(config) or "") if path == HEAD_DTYPE else _peek(config, path) or "")


def near_miss(value: str, names: Iterable[str]) -> str | None:
    """The name of ours that ``value`` was probably meant to be; None if it is one of them or like none."""
    if value in names:
        return None
    folded = value.casefold().replace("_", "-")
    for name in sorted(names):
        own = name.replace("_", "-")
        part = len(folded) >= _PART and (own.startswith(f"{folded}-") or own.endswith(f"-{folded}"))
        if part or folded.startswith(PREFIXES) or difflib.SequenceMatcher(None, folded, own).ratio() >= _ALIKE:
            return name
    return None


def near_misses(config: Any) -> dict[str, tuple[str, str]]:
    """Config path -> (value given, name probably meant)."""
    found = {}
    for path, names in VALUES.items():
        value = _value(config, path)
        meant = near_miss(value, names)
        if meant is not None:
            found[path] = (value, meant)
    return found


def asked_names(config: Any) -> dict[str, str]:
    """Config path -> value for each of our names in use (near misses too); the CPU platform counts as one."""
    found = {path: value for path, (value, _) in near_misses(config).items()}
    for path, names in VALUES.items():
        value = _value(config, path)
        if value in names:
            found[path] = value
    for section, prefixes in SECTIONS.items():
        keys = _peek(config, section) if section else config
        for key in keys if hasattr(keys, "keys") else ():
            if str(key).casefold().startswith(prefixes):
                found[f"{section}.{key}".lstrip(".")] = "set"
    if is_cpu_platform():
        found[PLATFORM_ENV] = "cpu"
    return found


def asks_on_command_line(arguments: Iterable[str], environ: Mapping[str, str]) -> bool:
    """Whether overrides or the environment use one of our names, before any config is composed.

    Args:
        arguments: Hydra's overrides; a value that merely contains one of our names (a path) asks for nothing.
        environ: the process's environment.
    """
    return environ.get(ACTIVE_ENV) == "1" or is_cpu_platform(environ) or any(map(_is_ours, arguments))


def _is_ours(argument: str) -> bool:
    """One override: ``[+|++]key[@package]=value``; the value may be a dict that holds the rest of the path."""
    key, equals, value = argument.strip("'\"").partition("=")
    if not equals or key.startswith("~"):
        return False
    path = key.lstrip("+").partition("@")[0].strip("/")
    if _in_section(path):
        return True
    value = value.strip("'\"")
    if path in VALUES:
        return value in VALUES[path] or near_miss(value, VALUES[path]) is not None
    return any(_holds(value, path, ours) for ours in VALUES) or any(_holds_section(value, path, s) for s in SECTIONS)


def _in_section(path: str) -> bool:
    inside = {s: path if not s else path.removeprefix(f"{s}.") for s in SECTIONS if not s or path.startswith(f"{s}.")}
    return any(rest.casefold().startswith(SECTIONS[section]) for section, rest in inside.items())


def _holds(value: str, path: str, ours: str) -> bool:
    """Whether a dict given at ``path`` holds our value of ``ours``: ``hf_overrides={head_dtype:float32}``."""
    if not ours.startswith(f"{path}."):
        return False
    leaf = re.escape(ours.rpartition(".")[2])
    found = re.findall(rf"\b{leaf}['\"]?\s*[:=]\s*['\"]?([\w.\-]+)", value)
    return any(name in VALUES[ours] or near_miss(name, VALUES[ours]) is not None for name in found)


def _holds_section(value: str, path: str, section: str) -> bool:
    """Whether a dict given at ``path`` has keys of ours: ``algorithm={scalerl:{adv_norm:batch}}``."""
    if not section or not (section == path or section.startswith(f"{path}.")):
        return False
    keys = re.findall(r"([\w.\-]+)['\"]?\s*:", value)
    return any(key.startswith(SECTIONS[section]) for key in keys)


def unknown_keys(section: str, given: Iterable[Any], known: Collection[str]) -> list[str]:
    """What to say of keys of a section that do not exist, a line each; the one that was probably meant is named."""
    problems = []
    for key in sorted(set(map(str, given)) - set(known)):
        near = difflib.get_close_matches(key, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        problems.append(f"{section}.{key} does not exist: the keys are {', '.join(known)}{meant}")
    return problems


def read_section(cls: type[Settings], name: str, section: Mapping[str, Any] | None) -> Settings:
    """Build a dataclass of settings from a config section (or its absence).

    Args:
        cls: the dataclass, whose fields are the keys.
        name: the section's path, for messages.
        section: its content.

    Raises:
        ScaleRLConfigError: an unknown key or value.
    """
    given = dict(section or {})
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    problems = unknown_keys(name, given, known)
    try:
        settings = cls(**{key: value for key, value in given.items() if key in known})
    except ScaleRLConfigError as error:
        problems += error.problems
    if problems:
        raise ScaleRLConfigError(problems)
    return settings
