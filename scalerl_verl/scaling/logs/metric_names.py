# SPDX-License-Identifier: Apache-2.0
"""Find a metric of a run by its name, a part of it, or what it usually is; say what there is where it is not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from scalerl_verl.scaling.logs.segments import ReadError, RunLog

PASS_RATE = "scalerl/validation/pass_rate"
SCORE = "score"
VERLS = ("actor/", "critic/", "timing_s/", "perf/", "training/")
"""What names of metrics that verl logs at each step begin with."""
CORE = re.compile(r"val-core/.*/mean(@|_at_)\d+")
"""verl's main score of a data source; its logger for MLflow writes `_at_`."""
LIKELY = ("val", "eval", "test", "acc", "pass", "score", "reward", "correct")
"""Words that names of validation scores have."""
MAX_LISTED = 15


def find_score(run: RunLog, y: str | None) -> str:
    """Name of the score: `y`, a part of a name that only one metric has, or by default what scalerl and verl log.

    Raises:
        ReadError: no such metric, or several.
    """
    names = run.names()
    if y is not None:
        return match(run, y, "--y")
    if PASS_RATE in names:
        return PASS_RATE
    core = [name for name in names if CORE.match(name)]
    if len(core) == 1:
        return core[0]
    if core:
        raise ReadError(f"{run.name} has several validation scores: choose one with --y: {_join(core, len(core))}")
    if SCORE in names:
        return SCORE
    is_verls = any(name.startswith(VERLS) for name in names)
    more = ", or set trainer.test_freq, without which verl does not validate" if is_verls else ""
    raise ReadError(
        f"{run.name} has no score by a name that is known ({PASS_RATE}, val-core/.../mean@N, {SCORE}): name its metric "
        f"with --y{more}. It has {list_names(names)}"
    )


def match(run: RunLog, wanted: str, option: str) -> str:
    """The metric of this name, else the only one whose name holds it.

    Raises:
        ReadError: there is none, or there are several.
    """
    names = run.names()
    if wanted in names:
        return wanted
    containing = [name for name in names if wanted in name]
    if len(containing) == 1:
        return containing[0]
    if containing:
        shown = list_names(containing, wanted)
        raise ReadError(f"{option} {wanted} fits {len(containing)} metrics of {run.name}: give one of {shown}")
    close = difflib.get_close_matches(wanted, names, 5, 0.4)
    said = f"did you mean {', '.join(close)}? " if close else ""
    raise ReadError(f"{run.name} has no metric {wanted}; {said}It has {list_names(names, wanted)}")


def list_names(names: Sequence[str], wanted: str = "") -> str:
    """The names, those that are most like `wanted` first, or without it those of scores; at most `MAX_LISTED`."""
    if not names:
        return "no metric at all"

    def rank(name: str) -> float:
        if wanted:
            return difflib.SequenceMatcher(None, wanted.lower(), name.lower()).ratio()
        return sum(word in name.lower() for word in LIKELY)

    return _join(sorted(names, key=lambda name: (-rank(name), name)), len(names))


def _join(names: Sequence[str], number: int) -> str:
    more = number - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
