# SPDX-License-Identifier: Apache-2.0
"""Child program of test_patches.py: runs pytest in several copies of upstream, each in a fork of this process.

python patch_runner.py JOBS.json RESULTS.json

What upstream stands on (PyTorch, transformers, Ray and so on) is imported once, before the first fork; a copy is
imported in its own fork only. JOBS.json lists {"folder", "tests"}; RESULTS.json gets [exit code, output] for each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

SHARED = (
    "numpy",
    "pandas",
    "torch",
    "transformers",
    "peft",
    "datasets",
    "tensordict",
    "ray",
    "hydra",
    "transfer_queue",
)
AT_ONCE = 2
"""Forks that run at the same time."""


def run_tests(folder: Path, tests: list[str]) -> int:
    """Run pytest on the copy in ``folder``; in a fork, whose output goes to a file there."""
    log = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    import pytest

    return int(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *tests]))


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    sys.path.pop(0)  # the folder of this program
    for name in SHARED:
        with contextlib.suppress(ImportError):  # a copy that needs it will say so
            importlib.import_module(name)
    assert not {"verl", "vllm"} & set(sys.modules), "the copies must be imported in their own forks"
    codes: dict[int, int] = {}
    running: dict[int, int] = {}
    waiting = list(range(len(jobs)))
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number = waiting.pop(0)
            process = os.fork()
            if process == 0:
                code = 70
                try:
                    code = run_tests(Path(jobs[number]["folder"]), jobs[number]["tests"])
                except BaseException:  # noqa: BLE001 - a fork must end here, whatever happened
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            running[process] = number
        process, status = os.wait()
        codes[running.pop(process)] = os.waitstatus_to_exitcode(status)
    results = [[codes[n], (Path(job["folder"]) / "output.txt").read_text()] for n, job in enumerate(jobs)]
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
