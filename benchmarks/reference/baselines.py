# SPDX-License-Identifier: Apache-2.0
"""How each baseline preset differs from ``recipe``, read from the composed configs."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any

PRESETS = ("recipe", "grpo", "drgrpo", "dapo", "gspo", "cispo_minimax", "reinforce_tis")
_MAX_VERL_RATIO = math.exp(20)
"""verl's PPO loss clamps log-ratios to 20: a dual clip from here on never acts."""


@functools.cache
def composed(preset: str) -> dict[str, Any]:
    """verl's whole config with a preset of ours, interpolations unresolved."""
    import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"+scalerl={preset}"])
    return OmegaConf.to_container(config, resolve=False)


def describe(config: dict[str, Any]) -> dict[str, str]:
    """Column -> text, for one preset's config."""
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    loss, aggregation = actor["policy_loss"]["loss_mode"], f"`{actor['loss_agg_mode']}`"
    if actor["loss_scale_factor"] is not None:
        aggregation += f" / `{actor['loss_scale_factor']}`"
    return {
        "loss": f"`{loss}`",
        "ratio": _ratio(loss, actor, algorithm["rollout_correction"]),
        "aggregation": aggregation,
        "advantages": _advantages(algorithm),
        "prompts of equal rewards": _equal_rewards(algorithm),
        "unfinished thinking": "closed at its budget"
        if config["actor_rollout_ref"]["rollout"]["agent"]["default_agent_loop"] == "forced_interruption"
        else "cut at the length limit",
        "mastered prompts": _mastered(config["data"]),
        "old log-probs": "recorded at sampling"
        if algorithm["rollout_correction"]["bypass_mode"]
        else "recomputed before the update",
    }


def _ratio(loss: str, actor: dict[str, Any], correction: dict[str, Any]) -> str:
    """What bounds the importance ratio.

    Raises:
        ValueError: a loss this table does not know.
    """
    low, high = actor["clip_ratio_low"], actor["clip_ratio_high"]
    bounds = f"[{1 - low:.4g}, {1 + high:.4g}]"
    if loss == "scalerl_cispo":
        return f"token, at most {actor['policy_loss']['eps_max']:g}"
    if loss == "vanilla":
        dual = "" if actor["clip_ratio_c"] > _MAX_VERL_RATIO else f", dual clip {actor['clip_ratio_c']:g}"
        return f"token, PPO clip {bounds}{dual}"
    if loss == "gspo":
        return f"sequence, PPO clip {bounds}"
    if loss == "cispo":
        return f"token, within {bounds}" if low < 1 else f"token, at most {1 + high:g}"
    if loss == "gpg" and correction["rollout_is"] is not None:
        return f"{correction['rollout_is']}, at most {correction['rollout_is_threshold']:g}"
    raise ValueError(f"the table of baselines does not know loss_mode={loss}: add it to {__file__}")


def _advantages(algorithm: dict[str, Any]) -> str:
    if algorithm["adv_estimator"] == "scalerl":
        divisor = {"batch": "the batch", "prompt": "the group", "none": ""}[algorithm["scalerl"]["adv_norm"]]
    else:
        divisor = "the group" if algorithm["norm_adv_by_std_in_grpo"] else ""
    return f"centred by group, / std of {divisor}" if divisor else "centred by group"


def _equal_rewards(algorithm: dict[str, Any]) -> str:
    if algorithm["filter_groups"]["enable"]:
        return "replaced by other prompts"
    if algorithm["adv_estimator"] == "scalerl" and algorithm["scalerl"]["zero_variance"] == "drop":
        return "dropped from every denominator"
    return "kept, with advantage 0"


def _mastered(data: dict[str, Any]) -> str:
    if "sampler" not in data:
        return "drawn again"
    options = data["sampler"]
    return f"not drawn from epoch {options['first_epoch']} on, if {options['threshold']:g} of a visit passed"


def overview_table() -> str:
    """One line a preset; in bold what is not the recipe's."""
    recipe = describe(composed("recipe"))
    lines = [f"| preset | {' | '.join(recipe)} |", "|---" * (len(recipe) + 1) + "|"]
    for preset in PRESETS:
        mine = describe(composed(preset))
        cells = [text if text == recipe[column] else f"**{text}**" for column, text in mine.items()]
        lines.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf of nested mappings; an empty mapping is a leaf."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from flatten(value, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), node


def keys_table() -> str:
    """Every key of verl's config in which a baseline differs from the recipe."""
    flat = {preset: dict(flatten(composed(preset))) for preset in PRESETS}
    keys = sorted({key for config in flat.values() for key in config})
    lines = [f"| key | {' | '.join(f'`{preset}`' for preset in PRESETS)} |", "|---" * (len(PRESETS) + 1) + "|"]
    for key in keys:
        cells = [f"`{json.dumps(config[key])}`" if key in config else "" for config in flat.values()]
        if len(set(cells)) > 1:
            lines.append(f"| `{key}` | {' | '.join(cells)} |")
    return "\n".join(lines)
