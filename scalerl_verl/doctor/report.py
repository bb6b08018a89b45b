# SPDX-License-Identifier: Apache-2.0
"""What the doctor found: a verdict, what needs action, one line a subject, and details on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scalerl_verl import __version__
from scalerl_verl.names import COMMAND


@dataclass
class Report:
    """Findings, in the order in which they were made.

    Args:
        lines: everything that was looked at (``--verbose``).
        summary: the lines that are shown in any case.
        problems: what needs action; empty when all is well.
        probes: raw answers of the processes that were asked.
        subject: what the verdict is about.
    """

    lines: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    subject: str = "this machine"

    def add(self, text: str) -> None:
        """A detail."""
        self.lines.append(text)

    def tell(self, text: str) -> None:
        """A line that is shown in any case."""
        self.summary.append(text)
        self.lines.append(text)

    def trouble(self, text: str) -> None:
        """Something that needs action."""
        self.problems.append(text)
        self.lines.append(f"  ! {text}")

    def render(self, verbose: bool = False) -> str:
        """The verdict, the problems with what to do, then the summary or, if ``verbose``, everything."""
        count = len(self.problems)
        if count:
            what = "1 problem needs" if count == 1 else f"{count} problems need"
            head = [f"{what} action (scalerl-verl {__version__}, {self.subject}):"]
            head += [f"  {number}. {text}" for number, text in enumerate(self.problems, 1)]
        else:
            head = [f"All is well: runs can use scalerl-verl {__version__} on {self.subject}."]
        body = self.lines if verbose else self.summary
        more = [] if verbose else ["", f"Every package and symbol: {COMMAND} doctor --verbose"]
        return "\n".join([*head, "", *body, *more])
