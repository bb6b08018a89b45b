# SPDX-License-Identifier: Apache-2.0
"""Which runs are seeds of one recipe: by `--group NAME=GLOB`, by a pattern of run names, or by W&B's group."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.scaling.logs.wandb_group import read_wandb_group

WANDB = "wandb"
"""What `--group-by` takes in place of a pattern, to group by the field `group` of W&B's runs."""


def choose_groups(options: argparse.Namespace, places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Names of runs by group, in the order of the options or of the runs; empty where no grouping was asked for.

    Args:
        options: with `group` and `group_by`.
        places: by name of the run, what was given for it, then the files that were read.

    Raises:
        ReadError: a group without a run, a run in none or two groups, or text that is no grouping.
    """
    if options.group and options.group_by:
        raise ReadError("--group and --group-by: give one of them")
    if options.group:
        return group_by_globs(options.group, places)
    if options.group_by == WANDB:
        return group_by_wandb(places)
    return {} if options.group_by is None else group_by_pattern(options.group_by, list(places))


def group_by_globs(texts: Sequence[str], places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Groups by `NAME=GLOB`; a glob is compared with the run's name, its path as given, and the name of its file.

    Raises:
        ReadError: see `choose_groups`.
    """
    groups: dict[str, list[str]] = {}
    for text in texts:
        name, equals, glob = text.partition("=")
        if not (name and equals and glob):
            raise ReadError(f"--group {text}: give NAME=GLOB, such as base='base.seed*'")
        found = [run for run, (given, *_) in places.items() if _fits(glob, run, given)]
        if not found:
            raise ReadError(f"--group {text} matches no run; the runs are {_listed(places)}")
        members = groups.setdefault(name, [])
        members += [run for run in found if run not in members]
    for run in places:
        mine = [name for name, members in groups.items() if run in members]
        if len(mine) > 1:
            raise ReadError(f"run {run} is in the groups {' and '.join(mine)}: narrow a --group, a run has one recipe")
        if not mine:
            raise ReadError(
                f"run {run} is in no group ({', '.join(groups)}): give it a --group of its own, such as --group "
                f"{run}={run}, or leave the run out"
            )
    return groups


def _fits(glob: str, run: str, given: str) -> bool:
    return any(fnmatch.fnmatchcase(text, glob) for text in (run, given, Path(given).name, Path(given).stem))


def _listed(runs: Mapping[str, object] | Sequence[str]) -> str:
    names = list(runs)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def group_by_pattern(pattern: str, runs: Sequence[str]) -> dict[str, list[str]]:
    """Groups by what the one capture group of a regular expression finds in the names of runs.

    Raises:
        ReadError: no expression with one capture group, or a run that it does not fit.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ReadError(f"--group-by {pattern} is no regular expression: {error}") from None
    if expression.groups != 1:
        raise ReadError(
            f"--group-by {pattern} has {expression.groups} capture groups: give a regular expression with one, which "
            rf"finds the recipe in a run's name, such as '(.+)\.seed\d+', or `{WANDB}` for the group of W&B's runs"
        )
    groups: dict[str, list[str]] = {}
    for run in runs:
        found = expression.search(run)
        if found is None or not found[1]:
            raise ReadError(f"--group-by {pattern} finds no group in run {run}; the runs are {_listed(runs)}")
        groups.setdefault(found[1], []).append(run)
    return groups


def group_by_wandb(places: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Groups by the field `group` in the files of W&B's offline runs.

    Raises:
        ReadError: a run without that field, or with attempts in two groups.
    """
    groups: dict[str, list[str]] = {}
    for run, (_, *files) in places.items():
        if not files:  # it could not be read
            continue
        found = {group for file in files if Path(file).suffix == ".wandb" and (group := read_wandb_group(Path(file)))}
        if len(found) > 1:
            raise ReadError(f"run {run} is in the W&B groups {' and '.join(sorted(found))}: a run has one recipe")
        if not found:
            raise ReadError(f"run {run} has no W&B group: group by a pattern of names, or by --group NAME=GLOB")
        groups.setdefault(found.pop(), []).append(run)
    return groups
