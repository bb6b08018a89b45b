# SPDX-License-Identifier: Apache-2.0
"""CPU time of the runs below a folder, whatever else the machine does meanwhile (Linux).

    python -m benchmarks.evidence.cpu_seconds outputs/ablation SAMPLES.jsonl &      # ends with kill %1

A process belongs to the run whose metrics file its environment names (VERL_FILE_LOGGER_PATH): Ray's workers, which are
nobody's children, are found, too. Every few seconds a line a run: time, CPU seconds so far, lines of its metrics file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from scalerl_verl.json_lines import read_records

INTERVAL_S = 4.0
LOGGER = b"VERL_FILE_LOGGER_PATH="
TICKS = os.sysconf("SC_CLK_TCK")


def read_processes(below: str) -> dict[str, dict[str, float]]:
    """Metrics file -> process (its id and start) -> CPU seconds in user and kernel mode."""
    found: dict[str, dict[str, float]] = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            fields = (
                Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
        except OSError:
            continue  # it ended meanwhile, or is another user's
        named = [text.removeprefix(LOGGER).decode() for text in environment if text.startswith(LOGGER)]
        if named and named[0].startswith(below):
            # fields 14, 15 and 22 of proc(5), counted from the third
            used = (int(fields[11]) + int(fields[12])) / TICKS
            found.setdefault(named[0], {})[f"{process}.{fields[19]}"] = used
    return found


def cpu_by_step(samples: Path, run: str) -> dict[int, float]:
    """CPU seconds when a step was first seen in the metrics of the run whose metrics file contains ``run``.

    A line stands for a step, the first for the validation before training.
    """
    seconds: dict[int, float] = {}
    for sample in read_records(samples):
        if run in sample["run"] and sample["lines"] > 0:
            seconds.setdefault(sample["lines"] - 1, sample["cpu_s"])
    return seconds


def main() -> int:
    folder, samples = str(Path(sys.argv[1]).resolve()), Path(sys.argv[2])
    most: dict[str, dict[str, float]] = {}
    with samples.open("a", encoding="utf-8") as out:
        while True:
            for run, processes in read_processes(folder).items():
                most.setdefault(run, {}).update(processes)
            for run, processes in most.items():
                lines = Path(run).read_bytes().count(b"\n") if Path(run).exists() else 0
                total = round(sum(processes.values()), 2)
                out.write(json.dumps({"t": time.time(), "run": run, "cpu_s": total, "lines": lines}) + "\n")
            out.flush()
            time.sleep(INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main())
