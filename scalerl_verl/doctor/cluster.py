# SPDX-License-Identifier: Apache-2.0
"""A running Ray cluster: what is installed on each node, compared with this machine."""

from __future__ import annotations

import os
import socket
from typing import Any

from scalerl_verl.doctor.processes import ask
from scalerl_verl.doctor.report import Report
from scalerl_verl.upstream.nodes import Answer, ask_here, compare

_CONNECT_S = 5.0


def examine_cluster(report: Report, address: str) -> None:
    """List the nodes of the cluster at ``address`` (``auto``: the one that ``ray start`` left on this machine)."""
    report.subject = f"this machine and the Ray cluster at {address}"
    if not _is_reached(address):
        report.trouble(
            f"no Ray cluster answers at {address} (--cluster, or RAY_ADDRESS), where a run from this shell would go: "
            "start Ray there, or unset RAY_ADDRESS"
        )
        return
    found = ask(report, f"cluster at {address}", ["cluster", address], dict(os.environ))
    if found is None:
        return
    if "error" in found:
        what = "no Ray cluster runs on this machine" if address == "auto" else f"no Ray cluster at {address}"
        report.trouble(
            f"{what} ({found['error']}): start one there (ray start --head), or give the address of one as --cluster "
            "HOST:PORT"
        )
        return
    nodes: list[dict[str, Any]] = found["nodes"]
    report.tell(f"cluster at {address}: {len(nodes)} node(s) that a run can use")
    here = ask_here()
    for node in nodes:
        _judge(report, here, node)


def _is_reached(address: str) -> bool:
    """Whether somebody listens; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _judge(report: Report, here: Answer, node: dict[str, Any]) -> None:
    title = f"node {node['name']}"
    if "error" in node:
        report.trouble(f"{title}: {node['error']}")
        return
    versions = ", ".join(f"{name} {version}" for name, version in node["versions"].items() if version)
    report.tell(f"  {title}: {node['devices']}; python {node['python']}, {versions}")
    hard, soft = compare(here, node)
    for text in hard:
        report.trouble(f"{title}: {text.replace('driver:', 'here:')}: a run is refused, install the same on every node")
    for text in soft:
        report.tell(f"    differs, which only warns: {text.replace('driver:', 'here:')}")
    for text in node["problems"]:
        report.trouble(f"{title}: {text}")
