# SPDX-License-Identifier: Apache-2.0
"""What every process of a run wrote about itself into the folder of ``SCALERL_VERL_STATUS_DIR``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scalerl_verl.doctor.report import Report
from scalerl_verl.upstream.activation import STATUS_DIR_ENV


def read_run(report: Report, folder: Path) -> None:
    """List the processes of a finished or running job, and what was refused in one."""
    files = sorted(folder.glob("*.json"))
    if not files:
        report.trouble(f"{folder} holds no status files: set {STATUS_DIR_ENV} to it before launching")
        return
    entries = [entry for path in files if (entry := _read(report, path)) is not None]
    hosts = {entry.get("host", "") for entry in entries}
    report.tell(f"run recorded in {folder}: {len(entries)} processes on {len(hosts)} host(s)")
    for entry in entries:
        # The host only where it tells apart.
        pid = f"{entry.get('host', '')}:{entry['pid']}" if len(hosts) > 1 else str(entry["pid"])
        _judge(report, pid, entry)


def _read(report: Report, path: Path) -> dict[str, Any] | None:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        report.trouble(f"{path} cannot be read ({error}): it was cut off, delete it")
        return None
    if not isinstance(entry, dict) or not {"pid", "title", "patches", "loaded_by"} <= entry.keys():
        report.trouble(f"{path} is no status file of a run: give the folder of {STATUS_DIR_ENV}")
        return None
    return entry


def _judge(report: Report, pid: str, entry: dict[str, Any]) -> None:
    applied = sum(patch["status"] == "applied" for patch in entry["patches"].values())
    refused = [name for name, patch in entry["patches"].items() if patch["status"] == "refused"]
    loaders = "+".join(entry["loaded_by"])
    report.tell(f"  {pid:>8} {entry['title'][:60]:60} loaded by {loaders}, {applied} active")
    for name in refused:
        report.trouble(f"process {pid}: patch {name} was refused")
    for head in entry.get("fp32_head", ()):
        _judge_head(report, pid, head)
    for server in entry.get("fast_frontend", ()):
        report.tell(f"  {pid:>8} fast front end: generator {server['replica']}, one answer a request")


def _judge_head(report: Report, pid: str, head: dict[str, Any]) -> None:
    """Show what a process measured of its FP32 head when it started; one that failed has ended its run."""
    if head.get("side") == "generator":
        error, unit = head["relative_error"], "of their size"
        what = f"generator, {head['dtype']} logits from {head['weight_dtype']} weights"
    else:
        error, unit = head["max_error"], "in log-probs"
        form = "fused" if head["fused"] else "logits"
        what = f"trainer, {head['backend']} ({form}) from {head['weight_dtype']} weights"
    report.tell(f"  {pid:>8} FP32 head: {what}: off by {error:.1e} {unit} from float64")
    allowed = head.get("tolerance")
    if allowed is not None and not error <= allowed:
        report.trouble(f"process {pid}: the FP32 head is off by {error:.1e}, more than {allowed:g}")
