# SPDX-License-Identifier: Apache-2.0
"""Record what the package does as text, before and after a refactoring, and read the differences.

    python -m tests.golden record DIR [configs] [problems] [runs]
    python -m tests.golden compare DIR... NEW

`configs`: presets and recipes as verl composes them, and what our start-up says of them. `problems`: what each test
made our checks, errors and logs say. `runs`: metrics of short runs of every trainer mode; record them twice before:
what then differs is compared by name only. Exit code 1: there are differences.
"""

from __future__ import annotations

import collections
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.paths import REPO

PARTS = ("configs", "problems", "runs")
SUITE = ("-q", "-n", "2", "--dist", "loadfile", "-m", "not gpu and not e2e", "--ignore=tests/e2e")
TOLERANCE = 1e-4
ABSENT = "(absent)"


def record(folder: Path, parts: Sequence[str]) -> None:
    """Write a file a part: name -> key -> value."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
            make = _problems if part == "problems" else importlib.import_module(f"tests.golden.{part}").record
            found = make(Path(scratch))
        text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False)
        (folder / f"{part}.json").write_text(text, encoding="utf-8")


def _problems(folder: Path) -> dict[str, collections.Counter[str]]:
    """Test with its parameters -> lines that were said -> 0; and how many tests of that name ran, and failed."""
    environment = {**os.environ, "GOLDEN_PROBLEMS": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "tests.golden.plugin", *SUITE]
    subprocess.run(command, cwd=REPO, env=environment, check=False)
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in folder.glob("problems-*.json"):
        for test, said in json.loads(path.read_text(encoding="utf-8")).items():
            found[test].update(said)
    return found


def compare(before: Sequence[Path], new: Path) -> int:
    """Print what differs, name by name; returns how many values do."""
    differences = 0
    for part in PARTS:
        files = [file for folder in (*before, new) if (file := folder / f"{part}.json").exists()]
        if len(files) < 2 or files[-1].parent != new:
            print(f"== {part}: not recorded before and after")
            continue
        *olds, now = (_flat(json.loads(file.read_text(encoding="utf-8"))) for file in files)
        keys = [(key, [old.get(key, ABSENT) for old in olds]) for key in sorted({*now, *olds[0]})]
        steady = sum(all(_same(value, old[0]) for value in old) for _, old in keys if old[0] != ABSENT)
        found = {key: old[0] for key, old in keys if _differ(old, now.get(key, ABSENT))}
        names, named = ({name for name, _ in values} for values in (olds[0], now))
        for name, keys_of in itertools.groupby(found, key=lambda key: key[0]):
            print(f"-- {part}: {name}{'' if name in names & named else ' is gone' if name in names else ' is new'}")
            for key in keys_of if name in names & named else ():
                print(f"  {key[1]}\n    - {found[key]}\n    + {now.get(key, ABSENT)}")
        print(f"== {part}: {len(found)} differences; {steady} of {len(olds[0])} values were the same every time before")
        differences += len(found)
    return differences


def _flat(values: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    return {(name, key): value for name, inner in values.items() for key, value in inner.items()}


def _differ(old: Sequence[Any], now: Any) -> bool:
    """Of what was not the same every time only the name counts."""
    if all(_same(value, old[0]) for value in old):
        return not _same(now, old[0])
    return now == ABSENT and ABSENT not in old


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


if __name__ == "__main__":
    action, *given = sys.argv[1:] or [""]
    if action == "record" and given and set(given[1:]) <= set(PARTS):
        record(Path(given[0]), given[1:] or PARTS)
    elif action == "compare" and len(given) > 1:
        sys.exit(1 if compare([Path(folder) for folder in given[:-1]], Path(given[-1])) else 0)
    else:
        sys.exit(__doc__)
