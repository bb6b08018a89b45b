# SPDX-License-Identifier: Apache-2.0
"""Tables of the miniature's recordings that go over several groups: more problems, another k, larger models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.evidence.recipes import EARLY, MAIN, add_p, correction, mean_at, of_pairs, setting_text, with_power
from benchmarks.miniature.runs import (
    LABELS,
    MANY,
    REFERENCE,
    Group,
    Points,
    Row,
    Rows,
    paired,
    points_of,
    provenance,
    read_group,
    shared,
)

SIZES = ("0.3M", "3M", "11M", "27M")

P = dict[tuple[str, float], float]


@dataclass(frozen=True)
class Variant:
    """A group of runs to stand beside the base group, from which it differs in one thing.

    Attributes:
        column: what that thing is.
        value: what a group has there.
        prefix: before that value in running text.
        names: recipes to compare, those of them that the group has.
        options: of ``benchmarks.miniature.bench``, to record the group.
    """

    group: Group
    column: str
    value: Callable[[Group], str]
    prefix: str
    names: Sequence[str]
    options: str

    def told(self, group: Group) -> str:
        return f"{self.prefix}{self.value(group)}"


PROBLEMS = Variant(
    Group(problems=MANY),
    "training problems",
    lambda group: f"{group.problems:,}",
    "",
    MAIN,
    f"--warm warm/0.3M --out out/0.3M.{MANY} --train-problems {MANY}",
)
K = Variant(Group(k=1), "k", lambda group: f"{group.k}", "k = ", MAIN[:2], "--warm warm/0.3M --out out/0.3M.k1 --k 1")


def many_table() -> str:
    """Recipes on many problems beside themselves on few."""
    return variant_table(PROBLEMS)


def k_table() -> str:
    """Recipes that train once on each generated batch beside themselves training eight times."""
    return variant_table(K)


def variant_table(variant: Variant) -> str:
    """Recipes of a group beside themselves in the base group, and beside ScaleRL of their own, within seeds."""
    base = Group()
    theirs = named(variant.group, variant.names)
    rows: dict[tuple[Group, str], dict[int, Row]] = {
        **{(base, name): found for name, found in named(base, tuple(theirs)).items()},
        **{(variant.group, name): found for name, found in theirs.items()},
    }
    runs = {key: {seed: row["points"] for seed, row in found.items()} for key, found in rows.items()}
    budgets = common_budgets(runs.values()) if theirs else [0.0]
    if budgets[-1] < EARLY:  # cut off earlier, they have hardly begun
        return _not_run(variant.options, variant.names)
    heads = [
        f"pass rate at {budget / 1e6:g}M tokens | to itself with {variant.told(base)} | to ScaleRL"
        for budget in budgets
    ]
    lines = [f"| {variant.column} | recipe | {' | '.join(heads)} |", "|---" * (2 + 3 * len(budgets)) + "|"]
    p: P = {}
    for (group, name), found in runs.items():
        label = f"{LABELS[name]} with {variant.told(group)}"
        against = [((base, name), f"{label} to {variant.told(base)}"), ((group, REFERENCE), f"{label} to ScaleRL")]
        cells = []
        for budget in budgets:
            score = mean_at(found, budget)
            cells.append("not run so far" if score is None else f"{score:.3f}")
            for other, comparison in against:
                is_other = other != (group, name) and other in runs
                cells.append(_difference(found, runs[other], budget, comparison, p) if is_other else "")
        lines.append(f"| {variant.value(group)} | {_of_seeds(name, len(found))} | {' | '.join(cells)} |")
    told = {f"{LABELS[name]} with {variant.told(group)}": list(found.values()) for (group, name), found in rows.items()}
    flat = _flat(told.values())
    lines.append(
        f"\n{setting_text(flat)}; {shared(flat, 'test_problems'):,} held-out problems, 4 samples each. Differences "
        f"within seeds with 95% intervals, in bold where 0 is outside. {provenance(told)}; "
        f"`benchmarks.miniature.bench`. {correction(p)}"
    )
    return "\n".join(lines)


def _difference(mine: Mapping[int, Points], theirs: Mapping[int, Points], budget: float, label: str, p: P) -> str:
    differences = paired(mine, theirs, budget)
    add_p(p, (label, budget), differences)
    return of_pairs(differences, len(set(mine) & set(theirs)))


def sizes_table() -> str:
    """Recipes on many problems by size of the model, beside ScaleRL of that size, early and as far as all of it go."""
    sizes = {size: found for size in SIZES if (found := named(Group(size, problems=MANY), MAIN))}
    if not sizes:
        return _not_run(f"--warm warm/3M --out out/3M.{MANY} --train-problems {MANY} --lr 2e-4", MAIN)
    lines = [
        f"| parameters | seeds | learning rate | recipe | pass rate before training | at {EARLY / 1e6:g}M tokens "
        "| difference | detectable | at the end | difference | detectable |",
        "|---" * 11 + "|",
    ]
    p: P = {}
    for size, rows in sizes.items():
        lines += _size_lines(size, rows, p)
    told = {
        f"{LABELS[name]} with {size}": list(found.values())
        for size, rows in sizes.items()
        for name, found in rows.items()
    }
    flat = _flat(told.values())
    lines.append(
        "\nEach seed of a size has a warm start of its own that all recipes share; "
        f"k = {shared(flat, 'k')} optimizer steps of 32 x 16 responses on a generated batch; {MANY:,} training "
        f"problems; {shared(flat, 'test_problems'):,} held-out problems, 4 samples each. *At the end*: the last tenth "
        f"of a million tokens that all runs of a size reach. Differences to *{LABELS[REFERENCE]}* of the same size "
        "within seeds with 95% intervals, in bold where 0 is outside; *detectable*: what so many seeds of this spread "
        f"show in 80% of tries. {provenance(told)}; `benchmarks.miniature.bench`. {correction(p)}"
    )
    return "\n".join(lines)


def _size_lines(size: str, rows: Rows, p: P) -> list[str]:
    """Lines of one size; its comparisons are added to ``p``."""
    runs = points_of(rows)
    lr = shared(_flat(found.values() for found in rows.values()), "lr")
    last = common_budgets(runs.values())[-1]
    lines = []
    for name, found in runs.items():
        start = statistics.fmean(points["pass_rate"][0] for points in found.values())
        cells = [size, str(len(found)), f"{lr:g}", LABELS[name], f"{start:.3f}"]
        reference = runs.get(REFERENCE, {})
        is_alone = name == REFERENCE or not reference
        for budget, is_end in ((EARLY, False), (last, True)):
            score = mean_at(found, budget)
            if score is None:
                cells.append("not run so far | | ")
            elif is_end and budget == EARLY:
                cells.append(f"as at {budget / 1e6:g}M | | ")
            else:
                differences = paired(found, reference, budget)
                add_p(p, (f"{LABELS[name]} with {size}", budget), differences)
                compared = with_power(differences, len(set(found) & set(reference)), is_alone)
                cells.append(f"{score:.3f}{f' at {budget / 1e6:g}M' if is_end else ''} | {compared}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def named(group: Group, names: Sequence[str]) -> Rows:
    return {name: found for name, found in read_group(group).items() if name in names}


def _flat(rows: Iterable[Iterable[Row]]) -> list[Row]:
    return [row for found in rows for row in found]


def _not_run(options: str, names: Sequence[str]) -> str:
    recipes = " ".join(f"--recipe {name}" for name in names)
    return f"Not run yet: `python -m benchmarks.miniature.bench {options} {recipes}`."


def _of_seeds(name: str, num: int) -> str:
    return f"{LABELS[name]}, {num} seed{'s' * (num > 1)}"


def common_budgets(runs: Iterable[Mapping[int, Points]]) -> list[float]:
    """The early budget, and the last tenth of a million tokens that all runs reach."""
    last = math.floor(min(points["tokens"][-1] for found in runs for points in found.values()) / 1e5) * 1e5
    return [EARLY, last] if last > EARLY else [last]
