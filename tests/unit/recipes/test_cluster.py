# SPDX-License-Identifier: Apache-2.0
"""Launches on a cluster: the Slurm script against stand-ins, lines of the RayJob and the page through verl's config."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalerl_verl.config.checks import find_problems
from scalerl_verl.config.cluster import num_devices
from tests.paths import REPO
from tests.unit.composed import compose_config
from tests.unit.docs.test_commands import SHOWN

pytestmark = pytest.mark.usefixtures("clean_environment")

FOLDER = REPO / "recipes" / "cluster"
MAIN = ["-m", "verl.trainer.main_ppo"]
PROGRAMS = {
    "scontrol": 'printf "node%s\\n" 1 2 3',
    # Options, then the command, which runs here.
    "srun": 'echo "srun $*" >> "$LOG"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"',
    "hostname": 'echo "10.0.0.1 10.1.0.1"',
    # `--block` stays until the job ends it; the exec leaves nothing behind.
    "ray": 'echo "ray $* with ${RAY_ADDRESS:-no address}" >> "$LOG"\nexec sleep 600',
    "train": 'echo "train $* with $RAY_ADDRESS" >> "$LOG"\nexit "${CODE:-0}"',
}
"""Stand-ins of the cluster's programs."""
RAY_MODULE = """
import pathlib, os
calls = pathlib.Path(os.environ["LOG"] + ".calls")
def init(**_):
    calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
    if calls.read_text() == "x":
        raise ConnectionError("no Ray yet")
def nodes():
    return [{"Alive": True}] * int(os.environ["JOINED"]) + [{"Alive": False}]
def shutdown():
    pass
"""


def submit(tmp_path: Path, *command: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script as Slurm would on the first of three nodes."""
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ray.py").write_text(RAY_MODULE)
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "modules"),
        "LOG": str(log),
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "RAY_ADDRESS": "old:1",
        **variables,
    }
    run = ["bash", str(FOLDER / "slurm.sh"), *command]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    return done, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("code", [0, 7])
def test_slurm_job_starts_ray_on_every_node_and_the_command_on_the_first(tmp_path: Path, code: int) -> None:
    done, log = submit(tmp_path, "train", "a b", JOINED="3", CODE=str(code))
    assert done.returncode == code, done.stderr
    rays = sorted(line for line in log if line.startswith("ray "))
    assert rays == [
        "ray start --address=10.0.0.1:6379 --block with no address",
        "ray start --head --node-ip-address=10.0.0.1 --port=6379 --block with no address",
    ]
    steps = [line.removeprefix("srun --overlap ") for line in log if line.startswith("srun ")]
    assert [step for step in steps if "--exclude=node1" in step and step.startswith("--nodes=2 --ntasks=2")]
    assert log[-1] == "train a b with 10.0.0.1:6379", "when every node is there"
    assert steps[-1] == "--nodes=1 --ntasks=1 --nodelist=node1 train a b"


def test_slurm_job_with_a_node_that_does_not_join_ends_and_counts(tmp_path: Path) -> None:
    done, log = submit(tmp_path, "train", JOINED="2", RAY_START_TIMEOUT_S="1")
    assert done.returncode != 0 and "2 of 3 nodes have joined the Ray cluster" in done.stderr
    assert not [line for line in log if line.startswith("train")]


def test_slurm_script_without_a_command_says_how_to_use_it(tmp_path: Path) -> None:
    done, log = submit(tmp_path)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr and log == []


def overrides_of(line: str) -> list[str]:
    words = shlex.split(line)
    start = next(place for place in range(len(words)) if words[place : place + 2] == MAIN)
    return [word for word in words[start + 2 :] if word != "..."]


@pytest.mark.parametrize(
    "line", [line for line, page in SHOWN.items() if page.name == "cluster.md" and MAIN[1] in line]
)
def test_launch_lines_compose_and_contradict_nothing(line: str) -> None:
    assert find_problems(compose_config(*overrides_of(line))) == []


def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    return found


def test_rayjob_has_the_gpus_that_its_run_asks_for() -> None:
    config = compose_config(*overrides_of(job()["entrypoint"]))
    assert find_problems(config) == []
    cluster = job()["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"]), *((group["replicas"], group) for group in cluster["workerGroupSpecs"])]
    gpus = [
        (count, group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        for count, group in groups
    ]
    assert sum(count * number for count, number in gpus) == num_devices(config) == 16
    mounted = {
        mount["mountPath"] for mount in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    }
    assert "/dev/shm" in mounted and any(config.trainer.default_local_dir.startswith(path) for path in mounted)


def test_image_has_the_versions_of_the_pins() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    installed = dict(re.findall(r"([\w-]+)==([\d.]+)", text))
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (REPO / "recipes" / "common" / "pins-gpu.txt").read_text(), re.M))
    pins |= dict(re.findall(r"^([\w-]+)==([\d.]+)", (FOLDER.parent / "scalerl-8b-math" / "PINS.txt").read_text(), re.M))
    assert set(installed) == {"verl", "TransferQueue", "math-verify", "latex2sympy2_extended"}
    assert installed == {name: pins[name] for name in installed}
    major, minor, _ = pins["vllm"].split(".")
    assert f"vllm{major}{minor}." in text.split("FROM")[0]
