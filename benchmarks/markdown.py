# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown. Sentences are written by hand, on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def table(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Heads and lines of cells as a table."""
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *lines))
    return "\n".join([first, "|---" * len(heads) + "|", *others])


def where_table(runs: Mapping[str, Iterable[Row]], packages: Sequence[str], *, has_commands: bool = True) -> str:
    """Where recorded rows come from: one line a machine, software, commit and command.

    Args:
        runs: what the lines call rows -> rows. The column is left out where all come from the same place.
        packages: whose versions are told, of those that a row has.
        has_commands: whether a line tells the command, as it was at that commit.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for name, rows in runs.items():
        for row in rows:
            versions = ", ".join(f"{key} {row['versions'][key]}" for key in packages if key in row["versions"])
            commit = f"`{row['commit'][:10]}`{' (dirty)' if row.get('dirty') else ''}"
            command = (f"`{row['command']}`",) if has_commands else ()
            names.setdefault((_machine(row), versions, commit, *command), []).append(name)
    heads = ["measured on", "versions", "commit", *(["command at that commit"] if has_commands else [])]
    if len(names) == 1:
        return table(heads, names)
    return table(["", *heads], (["; ".join(dict.fromkeys(found)), *place] for place, found in names.items()))


def _machine(row: Row) -> str:
    driver = f", driver {row['driver']}" if "driver" in row else ""
    load = f", load average {row['load_1min']:.1f} at the start" if "load_1min" in row else ""
    return f"{row['hardware']}{driver}{load}"
