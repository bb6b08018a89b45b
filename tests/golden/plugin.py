# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that records what each test made our checks, errors and logs say, line by line.

It does nothing unless GOLDEN_PROBLEMS names a folder. Keys are test functions with their parameters: files may move.
"""

from __future__ import annotations

import collections
import functools
import inspect
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden import normalise

FOLDER = os.environ.get("GOLDEN_PROBLEMS")
_said: collections.defaultdict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
_now: dict[str, Any] = {"test": "", "checks": 0}


def _say(kind: str, text: object) -> None:
    """Once, however often, and without its place in a list."""
    for line in f"{kind}: {text}".splitlines() if _now["test"] else ():
        _said[_now["test"]][normalise(re.sub(r"^ *\d+\. ", "", line))] += 0


@functools.cache
def _recording(check: Any) -> Any:
    """A check whose problems are recorded, unless another check calls it: which one does may change."""

    @functools.wraps(check)
    def recording(*args: Any, **kwargs: Any) -> Any:
        _now["checks"] += 1
        try:
            found = list(check(*args, **kwargs))
        finally:
            _now["checks"] -= 1
        for problem in found if not _now["checks"] else ():
            _say("problem", problem)
        return iter(found) if inspect.isgeneratorfunction(check) else found

    return recording


if FOLDER:

    def pytest_configure() -> None:
        from scalerl_verl.errors import ScaleRLError

        def __init__(self: ScaleRLError, *args: object) -> None:
            super(ScaleRLError, self).__init__(*args)
            _say(type(self).__name__, self)

        ScaleRLError.__init__ = __init__  # type: ignore[method-assign]
        log = logging.Handler()
        log.emit = lambda record: _say(record.levelname, record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("scalerl_verl").addHandler(log)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Any:
        for module in [sys.modules[name] for name in sys.modules if name.startswith(("scalerl_verl", "test"))]:
            for name, value in list(vars(module).items()):  # tests import checks by name
                if name.startswith("find_") and name.endswith("problems") and not hasattr(value, "__wrapped__"):
                    setattr(module, name, _recording(value))
        _now["test"] = normalise(item.name)
        _said[_now["test"]]["ran"] += 1
        try:
            return (yield)
        finally:
            _now["test"] = ""

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.outcome != "passed" and _now["test"]:
            _said[_now["test"]][f"{report.when} {report.outcome}"] += 1

    def pytest_sessionfinish() -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        (Path(FOLDER) / f"problems-{worker}.json").write_text(json.dumps(_said), encoding="utf-8")
