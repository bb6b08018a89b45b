# SPDX-License-Identifier: Apache-2.0
"""A sweep file: groups of runs, each a change of one recipe, times seeds."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from recipes.launch.command import RECIPES, parse_arguments, settings_of

KEYS = ("recipe", "config", "seeds", "common", "groups")
RUN_KEYS = ("config", "presets", "overrides")


class SweepError(ValueError):
    """The sweep cannot be run as it is; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        name: `group/name/seedN`, also its folder.
        recipe: folder of the recipe.
        config: of the recipe.
        presets: of ours, in front of the config.
        overrides: Hydra's.
        seed: of data, sampling and training.
    """

    name: str
    recipe: Path
    config: str
    presets: tuple[str, ...]
    overrides: tuple[str, ...]
    seed: int

    def command(self, out: Path, data: Path | None = None) -> list[str]:
        """The command that runs it, or resumes it, with its files in ``out``, on its recipe's data or these."""
        return [sys.executable, str(RECIPES / "launch" / "run.py"), *self._arguments(out, data)]

    def settings(self, out: Path) -> dict[str, object]:
        """What the launcher keeps of the command in the run's folder."""
        return settings_of(parse_arguments(self._arguments(out, None)))

    def _arguments(self, out: Path, data: Path | None) -> list[str]:
        presets = list(itertools.chain.from_iterable(("--preset", name) for name in self.presets))
        options = ["--config", self.config, *presets, "--out", str(out), "--seed", str(self.seed)]
        options += [] if data is None else ["--data", str(data)]
        return [str(self.recipe), *options, "--", *self.overrides]


def read_sweep(path: Path, recipe: str | None = None) -> list[Run]:
    """The runs of a sweep file: every run with the first seed, then every run with the next.

    Args:
        path: YAML.
        recipe: to use in place of the file's.

    Raises:
        SweepError: an unknown key, or one of the wrong kind.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SweepError(
            f"{path} does not exist: give --sweep a sweep file, such as those beside this script"
        ) from None
    except yaml.YAMLError as error:
        raise SweepError(f"{path} is no YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("groups"), dict):
        raise SweepError(f"{path} needs a mapping `groups` of groups of runs")
    unknown = sorted(set(content) - set(KEYS))
    if unknown:
        raise SweepError(f"{path}: {', '.join(unknown)} does not exist, the keys are {', '.join(KEYS)}")
    folder = RECIPES / str(recipe or content.get("recipe", ""))
    if not folder.is_dir() or folder == RECIPES:
        raise SweepError(f"recipe {recipe or content.get('recipe')!r} is no folder of {RECIPES}")
    common = _texts(content.get("common", []), "common")
    runs = []
    for seed in content.get("seeds", [0]):
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise SweepError(f"seeds: {seed!r} is no whole number from 0")
        for group, members in content["groups"].items():
            for name, given in members.items():
                entry = given if isinstance(given, dict) else {"overrides": given}
                where = f"{group}/{name}"
                unknown = sorted(set(entry) - set(RUN_KEYS))
                if unknown:
                    raise SweepError(
                        f"{where}: {', '.join(unknown)} does not exist, the keys are {', '.join(RUN_KEYS)}"
                    )
                runs.append(
                    Run(
                        name=f"{where}/seed{seed}",
                        recipe=folder,
                        config=str(entry.get("config", content.get("config", "config"))),
                        presets=tuple(_texts(entry.get("presets", []), f"{where}.presets")),
                        overrides=(*common, *_texts(entry.get("overrides", []), f"{where}.overrides")),
                        seed=seed,
                    )
                )
    _refuse_missing_configs(runs)
    _refuse_twins(runs)
    return runs


def _refuse_missing_configs(runs: Sequence[Run]) -> None:
    """A recipe in place of the sweep's may have others."""
    for run in runs:
        if not (run.recipe / f"{run.config}.yaml").is_file():
            missing = f"{run.name}: recipe {run.recipe.name} has no {run.config}.yaml"
            raise SweepError(f"{missing}; give --sweep a file made for that recipe")


def _refuse_twins(runs: Sequence[Run]) -> None:
    """A run under two names would be paid for twice."""
    seen: dict[Run, str] = {}
    for run in runs:
        key = dataclasses.replace(run, name="")
        if key in seen:
            raise SweepError(f"{run.name} is the same run as {seen[key]}: leave one of them out")
        seen[key] = run.name


def _texts(value: Any, where: str) -> list[str]:
    """A list of texts; a list within it (a YAML anchor) is spread out."""
    if not isinstance(value, list):
        raise SweepError(f"{where} must be a list, given: {value!r}")
    flat = [text for item in value for text in (item if isinstance(item, list) else [item])]
    wrong = [text for text in flat if not isinstance(text, str)]
    if wrong:
        raise SweepError(f"{where}: {wrong[0]!r} is no text")
    return flat


def choose(runs: Sequence[Run], patterns: Sequence[str]) -> list[Run]:
    """Runs whose name, or a folder above it, matches one of the patterns (`leave_one_out`, `*/seed0`); all without one.

    Raises:
        SweepError: a pattern that matches none.
    """
    if not patterns:
        return list(runs)
    for pattern in patterns:
        if not any(_matches(run, pattern) for run in runs):
            names = ", ".join(sorted({run.name.partition("/")[0] for run in runs}))
            raise SweepError(
                f"--only {pattern} matches no run: give a group ({names}), GROUP/NAME, or a pattern such as '*/seed0'"
            )
    return [run for run in runs if any(_matches(run, pattern) for pattern in patterns)]


def _matches(run: Run, pattern: str) -> bool:
    return fnmatch.fnmatch(run.name, pattern) or fnmatch.fnmatch(run.name, f"{pattern}/*")
