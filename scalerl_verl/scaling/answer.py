# SPDX-License-Identifier: Apache-2.0
"""What a curve command answers: one JSON schema for one or many runs, the same as text, refusals, the exit code."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalerl_verl.scaling.fit.points import FitRefused
from scalerl_verl.scaling.logs.reading import ERRORS
from scalerl_verl.scaling.logs.segments import ReadError
from scalerl_verl.terminal import as_text, say

SCHEMA = 1
"""Of the JSON; a higher one when a field goes or changes its meaning, not when one is added."""
OK, WRONG, NOT_IDENTIFIED, REFUSED = 0, 1, 3, 4
UNREADABLE = "unreadable"
"""Code of a refusal whose log cannot be read; every other one is that of a `FitRefused`."""


@dataclass(frozen=True)
class Refusal:
    """A run without an answer. code: stable name for scripts; reason: what was seen and what would help."""

    run: str
    code: str
    reason: str

    def __str__(self) -> str:
        if self.code == UNREADABLE:  # its reason names the file
            return f"error: {self.reason}"
        return f"refused: {self.run + ': ' if self.run else ''}{self.reason}"


@dataclass
class Answer:
    """What a command found so far.

    runs: an object a run, for JSON. groups: an object a group of runs. more: what only this command has. parts: the
    text, a part a table. refused: runs that have no answer, or only a part of it. is_identified: A is, in every fit.
    error: of an argument, where the command ended.
    """

    command: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    is_identified: bool = True
    error: str | None = None

    @contextlib.contextmanager
    def about(self, run: str) -> Iterator[None]:
        """Note the refusal of a run, or that its log cannot be read, and go on after the block."""
        try:
            yield
        except FitRefused as refusal:
            self.refuse(run, refusal)
        except np.linalg.LinAlgError as error:
            self.refused.append(Refusal(run, "no_solution", f"its numbers cannot be fitted: {error}"))
        except ReadError as error:
            self.refused.append(Refusal(run, UNREADABLE, str(error)))

    @contextlib.contextmanager
    def reading(self, run: str) -> Iterator[None]:
        """As `about`, for the files of a run: whatever a file makes a reader raise is said of that run alone."""
        with self.about(run):
            try:
                yield
            except (FitRefused, ReadError):
                raise
            except ERRORS as error:
                raise ReadError(f"{run} cannot be read: {type(error).__name__}: {error}") from error

    def refuse(self, run: str, refusal: FitRefused) -> None:
        """Note a refusal."""
        self.refused.append(Refusal(run, refusal.code, str(refusal)))

    @property
    def exit_code(self) -> int:
        """The first that holds: an argument or log is wrong, a run was refused, A is not identified, none of these."""
        if self.error is not None or any(refusal.code == UNREADABLE for refusal in self.refused):
            return WRONG
        if self.refused:
            return REFUSED
        return OK if self.is_identified else NOT_IDENTIFIED

    def to_dict(self) -> dict[str, Any]:
        """For JSON: without NaN and infinity."""
        whole = {
            "schema": SCHEMA,
            "command": self.command,
            "runs": self.runs,
            "groups": self.groups,
            **self.more,
            "refused": [vars(refusal) for refusal in self.refused],
            "error": self.error,
        }
        plain: dict[str, Any] = make_plain(whole)
        return plain

    def show(self, as_json: bool) -> None:
        """Print the answer, then on standard error what was refused, and the error that ended it."""
        if as_json:
            say(json.dumps(self.to_dict(), indent=2, allow_nan=False))
        elif self.parts:
            say("\n\n".join(self.parts))
        for refusal in self.refused:
            print(refusal, file=sys.stderr)
        if self.error is not None:
            print(f"error: {self.error}", file=sys.stderr)


def make_plain(value: Any) -> Any:
    """Values as JSON has them, which knows neither infinity nor NaN, which are null, nor text that is no UTF-8."""
    if isinstance(value, dict):
        return {make_plain(key): make_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return make_plain(value.tolist())
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
