# SPDX-License-Identifier: Apache-2.0
"""Changes of the recipe, one piece or a whole baseline each, under which a run trains its first batch again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss"
_VERL_LOSS = {f"{_LOSS}.eps_max": None, f"{_LOSS}._target_": "verl.workers.config.PolicyLossConfig"}
_NO_LOWER_CLIP = {f"{_ACTOR}.clip_ratio_low": 1.0}

TOGGLES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "advantages only centred": {"algorithm.scalerl.adv_norm": "none"},
    "advantages by group": {"algorithm.scalerl.adv_norm": "prompt"},
    "zero variance kept": {"algorithm.scalerl.zero_variance": "keep"},
    "verl's estimator": {"algorithm.adv_estimator": "grpo", "algorithm.scalerl": None},
    "token average": {f"{_ACTOR}.loss_agg_mode": "token-mean"},
    "sample average": {f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    "cap of 1": {f"{_LOSS}.eps_max": 1.0},
    "no cap": {f"{_LOSS}.eps_max": 1e9},
    "range of ratios": {f"{_LOSS}.token_mask_range": [0.5, 2.0]},
    "ratio of the response": {f"{_LOSS}.sequence_truncation": "product"},
    "verl's cispo": {f"{_LOSS}.loss_mode": "cispo", f"{_ACTOR}.clip_ratio_high": 4.0, **_NO_LOWER_CLIP, **_VERL_LOSS},
    "verl's PPO, no clip": {
        f"{_LOSS}.loss_mode": "vanilla",
        f"{_ACTOR}.clip_ratio_high": 1e9,
        f"{_ACTOR}.clip_ratio_c": 1e9,
        **_NO_LOWER_CLIP,
        **_VERL_LOSS,
    },
    "no curriculum": {"data.sampler": None},
}
"""Name -> config key -> value; None takes the key away."""

BASELINES = ("grpo", "drgrpo", "dapo", "gspo", "cispo_minimax")
"""Presets that train on such a batch; `reinforce_tis` needs old log-probs of its own, and more fields in the queue."""
_NOT_SATURATED = {"gspo": {f"{_ACTOR}.clip_ratio_low": 1.0, f"{_ACTOR}.clip_ratio_high": 1e9}}
"""An update moves whole responses of this tiny model further than GSPO's clip range: no gradient would be left of most
batches. Its ratio of the sequence and its average are what the replay is to show."""
_SECTIONS = ("data.sampler", "algorithm.scalerl")
_OBJECTIVE = ("actor_rollout_ref.actor.", "algorithm.", "data.sampler")
_OF_GENERATION = "algorithm.filter_groups"


def baseline_toggle(preset: str) -> dict[str, Any]:
    """What turns the recipe into a baseline preset, from verl's composed configs.

    The objective alone: the model, with the precision of its head, is loaded, and the responses are sampled.
    """
    recipe, other = _composed("recipe"), _composed(preset)
    found: dict[str, Any] = {path: value for path, value in other.items() if recipe.get(path, ...) != value}
    for path in recipe.keys() - other.keys():
        section = next((section for section in _SECTIONS if path.startswith(section)), path)
        found[section] = None  # takes it away
    found |= {f"{_LOSS}._target_": _VERL_LOSS[f"{_LOSS}._target_"], **_NOT_SATURATED.get(preset, {})}
    return {
        path: value
        for path, value in found.items()
        if path.startswith(_OBJECTIVE) and not path.startswith(_OF_GENERATION)
    }


def _composed(preset: str) -> dict[str, Any]:
    """Config path -> value of verl's config with a preset, interpolations unresolved."""
    import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"+scalerl={preset}"])
    return dict(_leaves(OmegaConf.to_container(config, resolve=False)))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), node


def all_toggles() -> dict[str, dict[str, Any]]:
    """Pieces and baselines."""
    return TOGGLES | {preset: baseline_toggle(preset) for preset in BASELINES}
