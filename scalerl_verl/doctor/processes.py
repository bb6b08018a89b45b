# SPDX-License-Identifier: Apache-2.0
"""Processes as a run has them, started by the doctor: is the plugin loaded and every patch active in each?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from scalerl_verl.doctor.probe import MARK
from scalerl_verl.doctor.report import Report
from scalerl_verl.upstream.activation import ACTIVE_ENV, PLATFORM_ENV
from scalerl_verl.upstream.spec import PatchSpec, is_importable
from scalerl_verl.verl.patches import SYMBOLS

TITLES = {"driver": "driver", "worker": "Ray worker", "engine": "vLLM process"}
_TIMEOUT_S = 300


def probe(report: Report, role: str, use_cpu: bool) -> None:
    """Start a process of a role and judge its answer."""
    env = {**os.environ, ACTIVE_ENV: "1"}
    if use_cpu:
        env[PLATFORM_ENV] = "cpu"
    answer = ask(report, TITLES[role], [role], env)
    if answer is not None:
        report.probes[role] = answer
        judge(report, TITLES[role], answer, use_cpu)


def ask(report: Report, title: str, arguments: list[str], env: dict[str, str]) -> dict[str, Any] | None:
    """The answer of `scalerl_verl.doctor.probe` in a process of its own; None, and a problem, if there is none."""
    command = [sys.executable, "-m", "scalerl_verl.doctor.probe", *arguments]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        report.trouble(f"{title}: no answer within {_TIMEOUT_S} s")
        return None
    answers = [line for line in done.stdout.split("\n") if line.startswith(MARK)]
    if not answers:
        tail = "\n      ".join(done.stderr.strip().split("\n")[-4:])
        report.trouble(f"{title}: the probe failed with exit code {done.returncode}\n      {tail}")
        return None
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix(MARK))
    return answer


def _due(spec: PatchSpec, use_cpu: bool) -> bool:
    """A process imports no module that needs a package which is not installed here, so nothing is applied there."""
    return (spec.when != "cpu" or use_cpu) and is_importable(spec)


def judge(report: Report, title: str, answer: dict[str, Any], use_cpu: bool) -> None:
    """Which patches a process should have, and has."""
    patches = answer["patches"]
    due = {spec.name for spec in SYMBOLS if _due(spec, use_cpu)} & set(patches)
    applied = {name for name in due if patches[name]["status"] == "applied"}
    loaders = ", ".join(answer["loaded_by"]) or "nobody"
    report.tell(f"{title}: plugin loaded by {loaders}; patches active {len(applied)}/{len(due)}")
    if not answer["loaded_by"]:
        report.trouble(f"{title}: the plugin was not loaded: reinstall scalerl-verl beside verl and vLLM")
    for name, error in answer["import_errors"].items():
        report.trouble(f"{title}: {name} cannot be imported: {error}")
    for name in sorted(due - applied):
        report.trouble(f"{title}: patch {name} is {patches[name]['status']} {patches[name]['detail']}")
    for name in sorted(name for name in applied if patches[name]["late"]):
        report.trouble(f"{title}: patch {name} came too late, its module had been imported before")
