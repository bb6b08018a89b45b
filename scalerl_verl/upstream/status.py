# SPDX-License-Identifier: Apache-2.0
"""What is loaded and patched in this process, and (on request) a file a process about it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

from scalerl_verl import __version__
from scalerl_verl.bookkeeping import bookkeeping
from scalerl_verl.json_lines import replace_file
from scalerl_verl.upstream.activation import STATUS_DIR_ENV, is_active, is_cpu_platform
from scalerl_verl.upstream.registry import states
from scalerl_verl.upstream.spec import installed_version

_loaded_by: list[str] = []
_facts: dict[str, list[dict[str, Any]]] = {}


def process_status() -> dict[str, Any]:
    """Versions, activation and patch states of this process, ready for JSON."""
    title = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "title": title,
        "process": multiprocessing.current_process().name,
        "scalerl_verl": __version__,
        "verl": installed_version("verl"),
        "vllm": installed_version("vllm"),
        "loaded_by": list(_loaded_by),
        "active": is_active(),
        "cpu_platform": is_cpu_platform(),
        "patches": {
            name: {"status": state.status, "detail": state.detail, "late": state.late}
            for name, state in states().items()
        },
        **all_facts(),
    }


def add_fact(name: str, entry: dict[str, Any]) -> None:
    """Note something found out while running (under its own key of the status), and record it."""
    _facts.setdefault(name, []).append(entry)
    record()


def read_facts(name: str) -> list[dict[str, Any]]:
    """What was noted under this key in this process, oldest first."""
    return list(_facts.get(name, []))


def all_facts() -> dict[str, list[dict[str, Any]]]:
    """What was noted in this process, by key."""
    return {name: list(entries) for name, entries in _facts.items()}


def record(loaded_by: str | None = None) -> None:
    """Note who loaded us; write ``<dir>/<host>-<pid>.json`` if ``SCALERL_VERL_STATUS_DIR`` is set.

    Several nodes may share the folder, and a pid is one only on its own.
    """
    if loaded_by is not None and loaded_by not in _loaded_by:
        _loaded_by.append(loaded_by)
    directory = os.environ.get(STATUS_DIR_ENV)
    if not directory:
        return
    with bookkeeping(f"{STATUS_DIR_ENV}={directory}", "scalerl doctor --run-dir will not know this process"):
        name = f"{socket.gethostname()}-{os.getpid()}.json"
        replace_file(Path(directory) / name, json.dumps(process_status(), indent=1).encode())
