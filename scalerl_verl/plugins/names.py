# SPDX-License-Identifier: Apache-2.0
"""Which of our names a composed config uses."""

from __future__ import annotations

import difflib
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.plugins import head_settings
from scalerl_verl.upstream.activation import PLATFORM_ENV, is_cpu_platform

_VALUES: dict[str, frozenset[str]] = {
    "actor_rollout_ref.actor.policy_loss.loss_mode": frozenset({"scalerl_cispo"}),
    "actor_rollout_ref.actor.loss_agg_mode": frozenset({"prompt-mean"}),
    "algorithm.adv_estimator": frozenset({"scalerl"}),
    "data.sampler.class_path": frozenset({"scalerl_verl.curriculum.NoPositiveResampling"}),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": frozenset({"gloo"}),
    "trainer.v1.trainer_mode": frozenset({"pipeline_rl", "ppo_off_policy"}),
    "actor_rollout_ref.rollout.agent.default_agent_loop": frozenset({"forced_interruption"}),
    head_settings.BACKEND: frozenset(head_settings.BACKENDS),
    head_settings.HEAD_DTYPE: frozenset({head_settings.GENERATOR_DTYPE, "float"}),
}
OWN_KEYS = ("adv_norm", "zero_variance", "reward_shaping", "interruption", "truncation_alarm")
"""Keys of ``algorithm.scalerl``."""
FOR_ANY_ESTIMATOR = frozenset({"reward_shaping", "interruption", "truncation_alarm"})
"""Those that do not need the estimator ``scalerl``."""
LOSS_SECTION = "actor_rollout_ref.actor.policy_loss"
LOSS_KEYS = ("eps_max", "token_mask", "sequence_trunc")
"""Beginnings of our keys of the loss."""
_SECTIONS: dict[str, tuple[str, ...]] = {
    "": ("scalerl",),
    "algorithm": ("scalerl", *OWN_KEYS),
    LOSS_SECTION: LOSS_KEYS,
    "trainer.v1": ("pipeline_rl", "ppo_off_policy"),
    "trainer.v1.sampler": ("poll_interval",),
    "trainer.v1.sampler.sampler_kwargs": ("poll_interval",),
}
"""Config section -> beginnings of keys that verl does not have and a user of ours may put there, rightly or not."""
_ALIKE = 0.85
"""Similarity from which a value counts as a misspelling: lets verl's `cispo` and `seq-mean-token-mean` pass."""
PREFIXES = ("scalerl", "fp32", "fp-32", "float32", "float-32", "torch.float32")
"""Beginnings of values that verl has none of: where one of our names may stand, such a value was meant to be one."""


def select(config: DictConfig, path: str, default: Any = None) -> Any:
    """``config.a.b.c`` or ``default`` if any part is missing or null."""
    value = OmegaConf.select(config, path, default=default)
    return default if value is None else value


def _value(config: DictConfig, path: str) -> str:
    """The value at a path as text; vLLM's overrides may be JSON text themselves."""
    if path == head_settings.HEAD_DTYPE:
        return str(head_settings.generator_head_dtype(config) or "")
    return str(select(config, path, ""))


def near_miss(value: str, names: frozenset[str]) -> str | None:
    """The name of ours that ``value`` was probably meant to be; None if it is one of them or like none."""
    if value in names:
        return None
    folded = value.casefold().replace("_", "-")
    for name in sorted(names):
        own = name.replace("_", "-")
        if folded.startswith(PREFIXES) or difflib.SequenceMatcher(None, folded, own).ratio() >= _ALIKE:
            return name
    return None


def near_misses(config: DictConfig) -> dict[str, tuple[str, str]]:
    """Config path -> (value given, name probably meant)."""
    found = {}
    for path, names in _VALUES.items():
        value = _value(config, path)
        meant = near_miss(value, names)
        if meant is not None:
            found[path] = (value, meant)
    return found


def asked_names(config: DictConfig) -> dict[str, str]:
    """Config path -> value for each of our names in use (near misses too); the CPU platform counts as one."""
    found = {path: value for path, (value, _) in near_misses(config).items()}
    for path, names in _VALUES.items():
        value = _value(config, path)
        if value in names:
            found[path] = value
    for section, prefixes in _SECTIONS.items():
        keys = OmegaConf.select(config, section) if section else config
        if isinstance(keys, DictConfig):
            for key in keys:
                if str(key).casefold().startswith(prefixes):
                    found[f"{section}.{key}".lstrip(".")] = "set"
    if is_cpu_platform():
        found[PLATFORM_ENV] = "cpu"
    return found
