# SPDX-License-Identifier: Apache-2.0
"""Which of our names a composed config uses."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.upstream.activation import PLATFORM_ENV, is_cpu_platform

_VALUES: dict[str, frozenset[str]] = {
    "actor_rollout_ref.actor.policy_loss.loss_mode": frozenset({"scalerl_cispo"}),
    "actor_rollout_ref.actor.loss_agg_mode": frozenset({"prompt-mean"}),
    "algorithm.adv_estimator": frozenset({"scalerl"}),
    "data.sampler.class_path": frozenset({"scalerl_verl.curriculum.NoPositiveResampling"}),
    "actor_rollout_ref.rollout.checkpoint_engine.backend": frozenset({"gloo"}),
    "trainer.v1.trainer_mode": frozenset({"pipeline_rl", "ppo_off_policy"}),
    "actor_rollout_ref.rollout.agent.default_agent_loop": frozenset({"forced_interruption"}),
}
_SECTIONS = ("algorithm.scalerl", "trainer.v1.sampler.sampler_kwargs.poll_interval_s")
PREFIX = "scalerl"
PLANNED = frozenset({"pipeline_rl", "ppo_off_policy", "forced_interruption"})


def select(config: DictConfig, path: str, default: Any = None) -> Any:
    """``config.a.b.c`` or ``default`` if any part is missing or null."""
    value = OmegaConf.select(config, path, default=default)
    return default if value is None else value


def asked_names(config: DictConfig) -> dict[str, str]:
    """Config path -> value for each of our names in use; the CPU platform counts as one."""
    found: dict[str, str] = {}
    for path, values in _VALUES.items():
        value = str(select(config, path, ""))
        if value in values or value.startswith(PREFIX):
            found[path] = value
    for path in _SECTIONS:
        if OmegaConf.select(config, path) is not None:
            found[path] = "set"
    if is_cpu_platform():
        found[PLATFORM_ENV] = "cpu"
    return found
