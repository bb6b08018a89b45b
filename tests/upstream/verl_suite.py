# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.upstream.verl_suite [--jobs N] [--out FOLDER] [PART ...]``: verl's own tests, with and without us.

verl's wheel ships tests. Each of its test files runs in a process and a copy of its own, in three states: ``without``
(verl loads no plugin), ``installed`` (loaded as in any run; none of our names is used) and ``active`` (all is patched
that a run with our names patches). What differs from ``without`` is run again, alone, in both states, and counts if the
two never agreed; what agreed once is unsteady by itself and listed apart. Tests that want a GPU or the network fail, or
run into the time limit, in every state and say nothing; they are counted.

FOLDER (default ``outputs/verl_suite``) gets ``record.json`` (versions, commit, counts, differences) and each process's
output. The record is written after each file, and a command with the same states and limits on the same commit and
versions adds to it: a run that was ended goes on. The exit code is 1 if anything differs, or if the plugin was not
where it should have been. PARTs choose files by their path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.rows import run_facts
from recipes.launch.processes import end_processes, run_marks, see_processes
from scalerl_verl.upstream.activation import ACTIVE_ENV, PLATFORM_ENV, STATUS_DIR_ENV
from tests.paths import REPO

STATES: dict[str, dict[str, str]] = {
    "without": {"VERL_USE_EXTERNAL_PLUGINS": "none", "VLLM_PLUGINS": ""},
    "installed": {},
    "active": {ACTIVE_ENV: "1"},
}
UNSET = ("VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS", ACTIVE_ENV, PLATFORM_ENV, "RAY_ADDRESS", "PYTEST_ADDOPTS")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""A test that wants to download something fails at once instead of trying again until its time is over."""
FILE = "the file"
"""Stands among a file's tests for what became of its process."""
ENDED, TIMED_OUT = "ended", "timed out"

Outcomes = dict[str, str]
"""Test (or ``FILE``) -> what became of it, in one process."""


def outcome_of(case: ElementTree.Element) -> str:
    """``passed``, ``skipped``, ``timed out`` or ``failed: ERROR``, so that another error is another outcome."""
    bad = next((child for child in case if child.tag in ("failure", "error")), None)
    if bad is None:
        return "passed" if case.find("skipped") is None else "skipped"
    text = bad.text or ""
    if "from pytest-timeout" in text:
        return TIMED_OUT
    errors = re.findall(r"^\S+:\d+: (\w+)$", text, re.MULTILINE) or re.findall(r"^E +([\w.]+):", text, re.MULTILINE)
    return f"failed: {errors[-1] if errors else 'unknown'}"


def read_report(report: Path, file: Path) -> Outcomes:
    """Outcomes of pytest's JUnit report about ``file``; of several for one test (subtests, a teardown) the worst."""
    module, found = ".".join(file.with_suffix("").parts), Outcomes()
    for case in ElementTree.parse(report).iter("testcase"):
        owner = (case.get("classname") or "").removeprefix(module).strip(".")
        name = f"{owner}::{case.get('name')}" if owner else str(case.get("name"))
        if found.get(name, "passed") in ("passed", "skipped"):
            found[name] = outcome_of(case)
    return found


@dataclass(frozen=True)
class Suite:
    """Tests in ``root`` (``names``: all that they need, relative to it) and how they are run."""

    root: Path
    names: Sequence[Path]
    logs: Path
    limit_s: float
    """Of a file; then its processes are killed."""
    test_limit_s: float

    def run(self, file: Path, state: str, attempt: int = 1) -> tuple[Outcomes, bool]:
        """Run one file in a fresh copy; its outcomes, and whether a process of it loaded our plugin."""
        log = self.logs / state / f"{'.'.join(file.with_suffix('').parts)}.{attempt}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="vs", ignore_cleanup_errors=True) as name:
            folder, scratch = Path(name) / "copy", Path(name)
            for item in self.names:
                (folder / item).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.root / item, folder / item)
            report, status, ray = scratch / "report.xml", scratch / "status", scratch / "r"
            ray.mkdir()
            path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
            environment = {key: value for key, value in os.environ.items() if key not in UNSET} | OFFLINE
            environment |= {STATUS_DIR_ENV: str(status), "RAY_TMPDIR": str(ray), "PYTHONPATH": path, **STATES[state]}
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", str(file)]
            command += [f"--junitxml={report}", f"--timeout={self.test_limit_s:g}", "--timeout-method=signal"]
            end = self._wait(command, log, cwd=folder, env=environment)
            if end == ENDED and not report.exists():
                end = "wrote no report"
            outcomes = {FILE: end, **(read_report(report, file) if end == ENDED else {})}
            return outcomes, status.is_dir()

    def _wait(self, command: list[str], log: Path, cwd: Path, env: dict[str, str]) -> str:
        """``ended``, ``timed out`` or the signal that killed it; nothing that it started is left."""
        run_id = uuid.uuid4().hex  # daemons leave the session, and a killed test does not end its own
        env = {**env, **run_marks(run_id)}
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, cwd=cwd, env=env)
            try:
                code = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                return TIMED_OUT
            finally:
                started = see_processes(run_id)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                end_processes(run_id, grace_s=0, known=started)
        return ENDED if code >= 0 else f"killed by {signal.Signals(-code).name}"


def find_suspects(runs: dict[str, list[Outcomes]]) -> dict[str, set[str]]:
    """State -> tests that never had an outcome in common with ``without``, over all runs that ended.

    If none ended in one state and one did in the other, ``FILE`` stands for the tests.
    """
    suspects: dict[str, set[str]] = {}
    for state in runs.keys() - {"without"}:
        sides = [runs["without"], runs[state]]
        ended = [[outcomes for outcomes in side if outcomes[FILE] == ENDED] for side in sides]
        if not all(ended):
            ended = [[{FILE: outcomes[FILE]} for outcomes in side] for side in sides]
        for test in set().union(*ended[0], *ended[1]):
            if not {o.get(test) for o in ended[0]} & {o.get(test) for o in ended[1]}:
                suspects.setdefault(state, set()).add(test)
    return suspects


def run_again(suite: Suite, file: Path, runs: dict[str, list[Outcomes]], tries: int) -> None:
    """Run what differs again, in both states, until it has agreed once or ``tries`` runs are over."""
    while len(runs["without"]) < tries and (suspects := find_suspects(runs)):
        for state in ["without", *sorted(suspects)]:
            runs[state].append(suite.run(file, state, len(runs[state]) + 1)[0])


def first_runs(suite: Suite, file: Path, states: Sequence[str]) -> dict[str, Any]:
    """``{"runs": state -> [outcomes], "loaded": states with our plugin}`` of one file."""
    runs: dict[str, list[Outcomes]] = {}
    loaded = []
    for state in states:
        outcomes, ours = suite.run(file, state)
        runs[state] = [outcomes]
        loaded += [state] if ours else []
        if state == "without" and outcomes[FILE] == TIMED_OUT:
            break  # the other states would only take as long to say nothing
    return {"runs": runs, "loaded": loaded}


def summarize(files: dict[str, dict[str, Any]], states: Sequence[str]) -> dict[str, Any]:
    """Counts of the first runs, differences, and what was unsteady or timed out, from all runs of all files."""
    counts: dict[str, Counter[str]] = {state: Counter() for state in states}
    loaded = {state: sum(state in entry["loaded"] for entry in files.values()) for state in states}
    differences, unsteady = {}, {}
    for file, entry in files.items():
        runs = entry["runs"]
        for state, tries in runs.items():
            counts[state].update(word.split(":")[0] for test, word in tries[0].items() if test != FILE)
            counts[state][f"files {tries[0][FILE]}"] += 1
        last = {test for tests in find_suspects(runs).values() for test in tests}
        first = {
            test for tests in find_suspects({s: tries[:1] for s, tries in runs.items()}).values() for test in tests
        }
        for test in sorted(first | last):
            seen = {state: [outcomes.get(test, "absent") for outcomes in tries] for state, tries in runs.items()}
            (differences if test in last else unsteady)[f"{file}::{test}"] = seen
    return {
        "counts": {state: dict(sorted(count.items())) for state, count in counts.items()},
        "files_that_loaded_the_plugin": loaded,
        "differences": differences,
        "unsteady": unsteady,
        "timed_out": sorted(file for file, entry in files.items() if entry["runs"]["without"][0][FILE] == TIMED_OUT),
    }


def run_suite(
    suite: Suite, chosen: Sequence[Path], states: Sequence[str], facts: dict[str, Any], record: Path,
    jobs: int = 1, tries: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """Run the chosen files, ``jobs`` at a time, and those that differ again; the record, as written to ``record``."""
    old = json.loads(record.read_text()) if record.exists() else {}
    goes_on = not facts["dirty"] and {key: old.get(key) for key in facts} == facts
    files: dict[str, dict[str, Any]] = dict(old["files"]) if goes_on else {}

    def write() -> dict[str, Any]:
        written = {**facts, **summarize(files, states), "files": dict(sorted(files.items()))}
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(written, indent=1) + "\n")
        return written

    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = {pool.submit(first_runs, suite, file, states): file for file in chosen if str(file) not in files}
        for number, future in enumerate(as_completed(waiting), 1):
            files[str(waiting[future])] = future.result()
            write()
            print(f"{number} of {len(waiting)}: {waiting[future]}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    for file in chosen:
        run_again(suite, file, files[str(file)]["runs"], tries)
        write()
    return write()


def verdict(record: dict[str, Any]) -> int:
    """1 if a test differs, or if the plugin was loaded where it must not be or nowhere where it must, else 0."""
    loaded = record["files_that_loaded_the_plugin"]
    wrong = [state for state, number in loaded.items() if (number > 0) != (state != "without")]
    for state in wrong:
        print(f"{state}: {loaded[state]} files loaded the plugin, so the state was not what it is called")
    return int(bool(record["differences"] or wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", action="append", choices=STATES, help="default: all; without is always among them")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time (default 1)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a file in a state (default 300)")
    parser.add_argument("--test-limit", type=float, default=90, help="seconds for a test (default 90)")
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "verl_suite")
    parser.add_argument("parts", nargs="*", metavar="PART")
    arguments = parser.parse_args()
    states = [name for name in STATES if name == "without" or name in (arguments.state or STATES)]
    names = [Path(f) for f in metadata.files("verl") or () if f.parts[0] == "tests" and f.suffix != ".pyc"]
    tests = sorted(name for name in names if name.name.startswith("test_"))
    chosen = [t for t in tests if not arguments.parts or any(part in str(t) for part in arguments.parts)]
    if not chosen:
        parser.error(f"none of the {len(tests)} test files has one of {arguments.parts} in its path")
    facts = run_facts("")
    facts = {key: facts[key] for key in ("commit", "dirty", "versions", "hardware")}
    facts |= {"states": states, "limit_s": arguments.limit, "test_limit_s": arguments.test_limit}
    root = Path(str(metadata.distribution("verl").locate_file("")))
    suite = Suite(root, names, arguments.out / "logs", arguments.limit, arguments.test_limit)
    record = run_suite(suite, chosen, states, facts, arguments.out / "record.json", arguments.jobs)
    for state, counts in record["counts"].items():
        print(f"{state}:", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for title in ("unsteady", "differences"):
        print(f"{len(record[title])} {title}")
        for test, seen in record[title].items():
            print(f"  {test}:", "; ".join(f"{state} {', '.join(outcomes)}" for state, outcomes in seen.items()))
    return verdict(record)


if __name__ == "__main__":
    sys.exit(main())
