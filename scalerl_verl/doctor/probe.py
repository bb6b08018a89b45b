# SPDX-License-Identifier: Apache-2.0
"""One process as a run would have it: loads the plugin, imports what we patch, prints its status as JSON.

Run as ``python -m scalerl_verl.doctor.probe driver|worker|engine``, or as ``... cluster ADDRESS`` to ask all nodes of a
running cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
import warnings
from typing import Any

ROLES = ("driver", "worker", "engine")
MARK = "SCALERL_PROBE "


def probe_here(role: str) -> dict[str, Any]:
    """Load the plugin the way a process of this role does and import every patched module.

    Returns:
        The process status (see `scalerl_verl.upstream.status`) plus ``role`` and ``import_errors``.
    """
    from scalerl_verl.upstream import status
    from scalerl_verl.upstream.spec import is_importable
    from scalerl_verl.verl.patches import VERL_SPECS, VLLM_SPECS

    errors: dict[str, str] = {}
    if role == "engine":
        plugins = importlib.import_module("vllm.plugins")
        plugins.load_general_plugins()
        specs = VLLM_SPECS
    else:
        importlib.import_module("verl")
        specs = VERL_SPECS
    for name in sorted({spec.module for spec in specs if is_importable(spec)}):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken upstream import is a finding to report, of any type
            errors[name] = f"{type(error).__name__}: {error}"
    return {**status.process_status(), "role": role, "import_errors": errors}


def probe_ray_worker() -> dict[str, Any]:
    """The same inside a Ray worker of a local cluster that lives for this call."""
    import ray

    # Of its own, also where RAY_ADDRESS names a running one, which takes no number of CPUs.
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        return ray.get(ray.remote(probe_here).remote("worker"))
    finally:
        ray.shutdown()


def look() -> dict[str, Any]:
    """What is installed where it runs: versions, entry points and sources. For a node that has this package."""
    from importlib import metadata

    from scalerl_verl.names import PLUGIN
    from scalerl_verl.upstream.source_check import static_mismatch
    from scalerl_verl.upstream.spec import installed_version
    from scalerl_verl.verl.patches import SYMBOLS

    present = [spec for spec in SYMBOLS if installed_version(spec.distribution) is not None]
    problems = list(dict.fromkeys(reason for reason in map(static_mismatch, present) if reason is not None))
    for group in ("verl.plugins", "vllm.general_plugins"):
        if PLUGIN not in {point.name for point in metadata.entry_points(group=group)}:
            problems.append(f"no entry point {PLUGIN!r} in {group}: reinstall scalerl-verl there")
    return {"problems": problems}


def probe_cluster(address: str) -> dict[str, Any]:
    """Every node of a running cluster: name, devices, versions, problems; or ``error``, why it did not answer.

    Where there is no cluster, or ``address`` is none, ``error`` stands alone.
    """
    import ray

    from scalerl_verl.upstream.nodes import ask_here, ask_nodes, first_line, node_name, working_nodes

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        return {"error": first_line(error)}
    try:
        nodes = working_nodes()
        versions, looks = ask_nodes(ask_here, nodes), ask_nodes(look, nodes)
    finally:
        ray.shutdown()
    found = []
    for node in nodes:
        answer, seen = versions[node["NodeID"]], looks[node["NodeID"]]
        entry: dict[str, Any] = {"name": node_name(node, answer)}
        amounts = {kind: int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU")}
        entry["devices"] = ", ".join(f"{amount} {kind}s" for kind, amount in amounts.items() if amount)
        if isinstance(answer, Exception):
            entry["error"] = first_line(answer)
        else:
            entry |= answer
            has_us = answer["versions"]["scalerl_verl"] is not None  # else its absence is said already
            failed = [first_line(seen)] if has_us and isinstance(seen, Exception) else []
            entry["problems"] = failed if isinstance(seen, Exception) else seen["problems"]
        found.append(entry)
    return {"nodes": found}


def main() -> int:
    """Print one marked line of JSON; whatever libraries print on import goes to stderr."""
    role, *rest = sys.argv[1:] or [""]
    if role not in (*ROLES, "cluster") or len(rest) != (role == "cluster"):
        raise SystemExit(f"usage: python -m scalerl_verl.doctor.probe {'|'.join(ROLES)}|cluster ADDRESS")
    warnings.simplefilter("ignore")
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise):
        if role == "cluster":
            result = probe_cluster(rest[0])
        else:
            result = probe_ray_worker() if role == "worker" else probe_here(role)
    print(noise.getvalue(), file=sys.stderr)
    print(MARK + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
