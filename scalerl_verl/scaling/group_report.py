# SPDX-License-Identifier: Apache-2.0
"""Text on groups of runs: seeds of one recipe as one curve."""

from __future__ import annotations

from collections.abc import Mapping

from scalerl_verl.scaling.fit.groups import RUN_SPREAD, GroupFit
from scalerl_verl.scaling.report import interval, number, table


def describe_groups(groups: Mapping[str, GroupFit], unit: str) -> str:
    """One line a group, then what the columns mean and which groups are not to be trusted."""
    level = next(iter(groups.values())).level
    rows = [
        [
            name,
            str(len(group.fits)),
            f"{group.A:.3f}",
            interval(group.A_interval, 3),
            "-" if group.spread is None else f"{group.spread:.4f}",
            f"{group.within:.4f}",
            f"{group.B:.2f}",
            number(group.C_mid),
            f"{group.num_identified} of {len(group.fits)}",
        ]
        for name, group in groups.items()
    ]
    header = ["group", "seeds", "mean A", f"{level:.0%} of it", "between seeds", "within", "B", f"C_mid ({unit})"]
    lines = [table([*header, "identified"], rows), ""]
    lines.append(
        "Each seed is fitted by itself. A is the mean over the seeds, B and C_mid are geometric means. Between seeds: "
        "standard deviation of A over the seeds. Within: standard error of A of one seed, from its points. The "
        f"interval holds for other seeds, too: it pools the spread of these with {RUN_SPREAD:g}, that of other recipes."
    )
    lines += [
        f"{name}: one seed says nothing about the spread; that of other recipes is taken."
        for name, group in groups.items()
        if group.spread is None
    ]
    doubtful = [name for name, group in groups.items() if not group.identified]
    if doubtful:
        lines.append(f"A is not identified in every seed of: {', '.join(doubtful)}. Do not decide by these lines.")
    return "\n".join(lines)
