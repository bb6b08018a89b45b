# SPDX-License-Identifier: Apache-2.0
"""In which keys of verl's config the baseline presets differ from ``recipe``."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table

PRESETS = ("recipe", "grpo", "drgrpo", "dapo", "gspo", "cispo_minimax", "reinforce_tis")


@functools.cache
def composed(preset: str) -> dict[str, Any]:
    """verl's whole config with a preset of ours, interpolations unresolved."""
    import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[f"+scalerl={preset}"])
    return OmegaConf.to_container(config, resolve=False)


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
    lines = []
    for key in keys:
        cells = [f"`{json.dumps(config[key])}`" if key in config else "" for config in flat.values()]
        if len(set(cells)) > 1:
            lines.append((f"`{key}`", *cells))
    return table(("key", *(f"`{preset}`" for preset in PRESETS)), lines)
