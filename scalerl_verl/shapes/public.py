# SPDX-License-Identifier: Apache-2.0
"""Facts of public models, as their ``config.json`` has them: planning needs neither a download nor a cache."""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("public.json")
"""A list of ``{"models": {id: longest sequence, ...}, "config": entries that these models share}``."""


@cache
def read_public() -> dict[str, dict[str, Any]]:
    """Model id -> the entries of its ``config.json`` that a shape is read from."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        model: {**entry["config"], "max_position_embeddings": positions}
        for entry in entries
        for model, positions in entry["models"].items()
    }


def describe_public(model: str) -> str:
    """Which models are known, for a message about ``model``, which is not: the nearest ids, or the families."""
    nearest = difflib.get_close_matches(model, read_public(), n=4, cutoff=0.75)
    if nearest:
        return f"near it are {', '.join(nearest)}"
    return f"{len(read_public())} of Qwen3, Qwen2.5, Llama 3 and SmolLM2 are known, for example Qwen/Qwen3-8B"
