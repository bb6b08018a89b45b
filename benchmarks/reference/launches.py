# SPDX-License-Identifier: Apache-2.0
"""Kinds of launch from launches.yaml, as overrides with one of our presets, and the table of the edits they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.markdown import table

FILE = Path(__file__).with_name("launches.yaml")
PRESETS = {
    "cispo": "cispo",
    "prompt_mean": "prompt_mean",
    "advantage": "advantage",
    "recipe": "recipe",
    "recipe,pipeline": "[recipe,pipeline]",
}
"""Name in launches.yaml -> what follows ``+scalerl=``."""
DELETED = "~"


@dataclass(frozen=True)
class Edits:
    """What a script has to change beside the line with a preset.

    Args:
        drop: keys whose lines go.
        set: key -> new value; ``~`` deletes the preset's key.
        renamed: key -> the new name of the same thing.
    """

    drop: Sequence[str] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that changes."""
        return (*self.drop, *self.set, *self.renamed)


@dataclass(frozen=True)
class Launch:
    """One kind of launch.

    Args:
        name: for a reader.
        like: the script that sets these keys.
        settings: key (with `+` where verl has none) -> value.
        changes: preset -> edits; absent where none is needed.
        refused: preset -> keys that it cannot go with.
        model: of the model's config.json, what matters to a start-up check.
    """

    name: str
    like: str
    settings: Mapping[str, Any]
    changes: Mapping[str, Edits]
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def edits(self, preset: str) -> Edits:
        """What to change for a preset of `PRESETS`."""
        return self.changes.get(preset, Edits())

    def lines(self, edits: Edits = Edits()) -> dict[str, str]:
        """Key -> override, of the script with its edits."""
        found = {key.lstrip("+"): f"{key}={_shown(value)}" for key, value in self.settings.items()}
        for key, new in edits.renamed.items():
            found[new] = f"++{new}={found.pop(key).partition('=')[2]}"
        for key in edits.drop:
            del found[key]
        return found | {
            key: f"~{key}" if value == DELETED else f"++{key}={_shown(value)}" for key, value in edits.set.items()
        }

    def overrides(self, preset: str, edits: Edits = Edits()) -> list[str]:
        """The whole launch line, as Hydra's overrides."""
        return [f"+scalerl={PRESETS[preset]}", *self.lines(edits).values()]


def _shown(value: Any) -> str:
    """A value as a command line has it."""
    return "null" if value is None else str(value)


def read_launches() -> list[Launch]:
    """Every launch of the file."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))["launches"]
    return [
        Launch(**{**entry, "changes": {preset: Edits(**edits) for preset, edits in entry["changes"].items()}})
        for entry in entries
    ]


def _cell(launch: Launch, preset: str) -> str:
    if preset in launch.refused:
        return "refused"
    edits = launch.edits(preset)
    old = f" + {len(edits.renamed)} old" if edits.renamed else ""
    return f"{len(edits.drop) + len(edits.set)}{old}"


def launches_table() -> str:
    """One line a launch: how many of its lines change for each preset."""
    heads = ("launch", *(f"`{preset}`" for preset in PRESETS))
    return table(heads, [(launch.name, *(_cell(launch, preset) for preset in PRESETS)) for launch in read_launches()])
