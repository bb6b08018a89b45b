# SPDX-License-Identifier: Apache-2.0
"""Tables of the miniature's studies (`benchmarks.miniature.studies`): a line a recipe and setting, at equal steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.compare import difference_text
from benchmarks.markdown import table, where_table
from benchmarks.miniature.runs import BENCH, LABELS, REFERENCE, Points
from benchmarks.rows import read_rows

Setting = tuple[str, float]
"""Recipe, and the learning rate or number of optimizer steps a batch."""
Found = dict[Setting, dict[int, Points]]
"""Setting -> seed -> points."""
SETTINGS = {"rate": ("lr", "learning rate"), "staleness": ("k", "steps a batch")}
"""Study -> what differs in it beside the recipe, in a row's case and in a table's head."""


def read_study(study: str, rows: Iterable[Mapping[str, Any]]) -> Found:
    """The newest run of each setting and seed."""
    key, _ = SETTINGS[study]
    found: Found = {}
    for row in rows:
        case = row["case"]
        if case.get("study") == study:
            found.setdefault((row["impl"], case[key]), {})[case["seed"]] = row["points"]
    return dict(sorted(found.items(), key=lambda item: (item[0][1], list(LABELS).index(item[0][0]))))


def at_step(points: Points, step: int) -> float:
    """Pass rate of the validation after so many optimizer steps."""
    return float(points["pass_rate"][points["updates"].index(step)])


def within_seeds(mine: Mapping[int, Points], theirs: Mapping[int, Points], step: int) -> list[float]:
    """Differences after so many optimizer steps, of the seeds that both have."""
    return [at_step(mine[seed], step) - at_step(theirs[seed], step) for seed in sorted(set(mine) & set(theirs))]


def trained_mean(runs: Mapping[int, Points], name: str) -> float:
    """Mean over seeds and validations of what training logged; nothing is logged before it."""
    return statistics.fmean(value for points in runs.values() for value in points[name] if value is not None)


def study_table(study: str, steps: Sequence[int]) -> str:
    """One line a recipe and setting: pass rates after ``steps``, and differences within seeds to ScaleRL's."""
    found = read_study(study, read_rows(BENCH))
    lines = []
    for (name, value), runs in found.items():
        cells = []
        for step in steps:
            cells.append(f"{statistics.fmean(at_step(points, step) for points in runs.values()):.3f}")
            reference = found.get((REFERENCE, value))
            is_other = name != REFERENCE and reference is not None
            cells.append(difference_text(within_seeds(runs, reference, step)) if is_other else "")
        logged = (f"{trained_mean(runs, 'clipped'):.2%}", f"{trained_mean(runs, 'log_ratio'):.3f}")
        lines.append((f"{value:g}", LABELS[name], len(runs), *cells, *logged))
    at = (text for step in steps for text in (f"after {step} steps", "to ScaleRL"))
    return table((SETTINGS[study][1], "recipe", "seeds", *at, "tokens clipped", "mean abs. log-ratio"), lines)


def where() -> str:
    """Where the studies' rows were made."""
    rows = [row for row in read_rows(BENCH) if row["case"].get("study") in SETTINGS]
    return where_table({"": rows}, ("torch",), has_commands=False)
