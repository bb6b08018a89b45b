# SPDX-License-Identifier: Apache-2.0
"""The sweep file as it is, composed run by run; and the queue on real processes that are killed at awkward moments."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import yaml

from recipes.ablation import spec as ablation_spec
from recipes.launch.command import build_command, parse_arguments
from recipes.launch.folder import Paths, read_attempts, state_of
from recipes.launch.processes import is_alive
from scalerl_verl.config.checks import find_problems
from scalerl_verl.json_lines import read_records
from scalerl_verl.planning.resolve import compose_run
from tests.paths import RECIPES
from tests.unit.verl.test_leave_one_out import ROWS

ABLATION = RECIPES / "ablation"
NAMES = {
    "the loss": "loss",
    "the prompt average": "prompt_average",
    "batch normalisation": "batch_normalisation",
    "zero-variance filtering": "zero_variance_filtering",
    "no-positive-resampling": "no_positive_resampling",
    "forced interruption": "forced_interruption",
    "the FP32 head": "fp32_head",
}
"""Row of the table in docs/adopt.md -> run of leave_one_out; the eighth piece, PipelineRL, is no part of `recipe`."""


@pytest.fixture(scope="module")
def spec() -> ModuleType:
    return ablation_spec


@pytest.fixture(scope="module")
def runs(spec: ModuleType) -> dict[str, Any]:
    """Runs of the committed sweep by name."""
    return {run.name: run for run in spec.read_sweep(ABLATION / "sweep.yaml")}


def launch_line(run: Any, tmp_path: Path) -> list[str]:
    """What the run's launcher gives to main_ppo."""
    arguments = parse_arguments(run.command(tmp_path, tmp_path)[2:])
    return build_command(arguments, Paths(tmp_path))


def kind_of(run: Any) -> tuple[Any, ...]:
    """What a run sets, whatever to: runs of one kind differ in seed and numbers."""
    return run.config, run.presets, tuple(text.partition("=")[0] for text in run.overrides)


def test_every_kind_of_run_composes_and_contradicts_nothing(runs: dict[str, Any], tmp_path: Path) -> None:
    problems = {}
    seen = set()
    for name, run in runs.items():
        if kind_of(run) not in seen:
            seen.add(kind_of(run))
            command = launch_line(run, tmp_path)
            config = compose_run([f"hydra.searchpath=['file://{command[4]}']", *command[5:]])
            problems[name] = find_problems(config)
            gpus = config.trainer.n_gpus_per_node
            if config.trainer.v1.trainer_mode == "pipeline_rl":
                gpus += config.actor_rollout_ref.rollout.n_gpus_per_node
            assert gpus == 2, f"{name}: runs are compared in GPU-hours of the same two GPUs"
    assert len(problems) >= 15 and not any(problems.values()), problems


@pytest.mark.parametrize("name", ["one-gpu", "two-gpus", "cpu"])
def test_smaller_sweeps_change_what_the_large_one_changes(spec: ModuleType, runs: dict[str, Any], name: str) -> None:
    """They were run as they are; a key that the large sweep, composed above, does not know is one of sizes."""
    known = {text.lstrip("+~").partition("=")[0] for run in runs.values() for text in run.overrides}
    sizes = ("trainer.", "data.", "actor_rollout_ref.rollout.")
    for run in spec.read_sweep(ABLATION / f"{name}.yaml"):
        for text in run.overrides:
            key = text.lstrip("+~").partition("=")[0]
            assert key in known or key.startswith(sizes), f"{run.name}: {key}"


def test_leave_one_out_has_eight_pieces_and_does_what_the_readme_says(runs: dict[str, Any]) -> None:
    left_out = {name.split("/")[1]: run for name, run in runs.items() if name.startswith("leave_one_out/")}
    assert set(left_out) == {*NAMES.values(), "pipeline_rl"}
    common = runs["scalerl/all_pieces/seed0"].overrides
    for row, name in NAMES.items():
        own = left_out[name].overrides[len(common) :]
        # tiny-gpu also has settings of the interruption, which nobody would read without it.
        assert [text for text in own if text != "~algorithm.scalerl.interruption"] == ROWS[row]


def test_sweep_has_the_values_it_promises(runs: dict[str, Any]) -> None:
    text = "\n".join(itertools.chain.from_iterable((run.name, *run.overrides) for run in runs.values()))
    for value in ("eps_max=4", "eps_max=8", "high=0.24", "high=0.28", "high=4e-3", "high=5e-3"):
        assert value in text
    for name in ("staleness/pipeline_1", "staleness/pipeline_4", "staleness/off_policy_1", "batch/responses_1024"):
        assert f"{name}/seed0" in runs and f"{name}/seed1" in runs


MAIN_PPO = """
import json, os, pathlib, sys, time
out = pathlib.Path(os.environ["VERL_FILE_LOGGER_PATH"]).parents[1]
def note(what):
    with (out / what).open("a") as stream:
        stream.write(what + "\\n")
note("starts")
gate = pathlib.Path(os.environ["GATE"])
while "wait" in sys.argv and not gate.exists():
    time.sleep(0.02)
if "fail" in sys.argv and not gate.exists():
    sys.exit(9)
rows = [{"step": step, "data": {"scalerl/compute/gpu_hours": step / 10, "scalerl/validation/pass_rate": step / 9}}
        for step in range(4)]
rows[2]["data"].pop("scalerl/validation/pass_rate")
(out / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
note("ends")
"""
"""In verl's place: it counts its starts, waits for a permission, and leaves metrics as verl's file logger does."""


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Path]:
    """``sweep(first=[...], ...)``: a sweep file of a group with these runs."""
    package = tmp_path / "site" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package / "main_ppo.py").write_text(MAIN_PPO)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").touch()

    def write(**members: list[str]) -> Path:
        path = tmp_path / "sweep.yaml"
        path.write_text(yaml.safe_dump({"recipe": "tiny-gpu", "groups": {"group": members}}))
        return path

    return write


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """``queue(sweep_file, options)``: a queue in a process of its own."""
    started = []

    def start(path: Path, *options: str) -> subprocess.Popen:
        command = [sys.executable, str(ABLATION / "sweep.py"), "--sweep", str(path), "--out", str(tmp_path / "out")]
        python_path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [*command, "--data", str(tmp_path), *options],
            env={**os.environ, "PYTHONPATH": python_path, "GATE": str(tmp_path / "gate")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    (tmp_path / "gate").touch()  # lets go what a failed test left waiting
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def folder(tmp_path: Path, name: str) -> Path:
    return tmp_path / "out" / "runs" / "group" / name / "seed0"


def count(tmp_path: Path, name: str, what: str) -> int:
    path = folder(tmp_path, name) / what
    return path.read_bytes().count(b"\n") if path.exists() else 0


def state(tmp_path: Path, name: str) -> str:
    return state_of(Paths(folder(tmp_path, name)))


def codes(tmp_path: Path, name: str) -> list[Any]:
    return [attempt["code"] for attempt in read_attempts(Paths(folder(tmp_path, name)))]


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 30 s")


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_queue_runs_each_once_marks_failures_and_goes_on(sweep, queue, tmp_path: Path) -> None:
    path = sweep(first=[], second=["fail"], third=["x=1"])
    code, out = finish(queue(path))
    assert code == 3, out
    assert [state(tmp_path, name) for name in ("first", "second", "third")] == [
        "finished",
        "failed",
        "finished",
    ]
    assert codes(tmp_path, "second") == [9]
    code, out = finish(queue(path))
    assert code == 3 and "group/second/seed0: failed before" in out
    assert [count(tmp_path, name, "starts") for name in ("first", "second", "third")] == [1, 1, 1]
    (tmp_path / "gate").touch()  # the reason of the failure is gone
    code, out = finish(queue(path, "--retry-failed"))
    assert code == 0, out
    assert [count(tmp_path, name, "starts") for name in ("first", "second", "third")] == [1, 2, 1]
    assert "group/second/seed0  finished" in finish(queue(path, "--list"))[1]


def test_killed_queue_leaves_a_run_that_the_next_one_waits_for(sweep, queue, tmp_path: Path) -> None:
    path = sweep(first=["wait"], second=[])
    killed = queue(path)
    wait_until(lambda: count(tmp_path, "first", "starts") == 1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert "group/first/seed0   running" in finish(queue(path, "--list"))[1]
    following = queue(path)
    assert following.stdout is not None and "still runs from a queue that is gone" in following.stdout.readline()
    (tmp_path / "gate").touch()
    code, out = finish(following)
    assert code == 0, out
    assert [count(tmp_path, name, what) for name in ("first", "second") for what in ("starts", "ends")] == [1, 1, 1, 1]


def test_killed_run_is_resumed_by_the_same_command(sweep, queue, tmp_path: Path) -> None:
    path = sweep(first=["wait"])
    killed = queue(path)
    wait_until(lambda: count(tmp_path, "first", "starts") == 1)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    # As after a reboot: the attempt and its command are gone without a word.
    processes = _processes_with(str(folder(tmp_path, "first")))
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, processes)))
    assert state(tmp_path, "first") == "killed"
    assert "group/first/seed0  killed" in finish(queue(path, "--list"))[1]
    (tmp_path / "gate").touch()
    code, out = finish(queue(path))
    assert code == 0 and "group/first/seed0: resuming" in out
    assert codes(tmp_path, "first") == [None, 0]
    assert (count(tmp_path, "first", "starts"), count(tmp_path, "first", "ends")) == (2, 1)


def test_interrupted_queue_ends_its_run_and_resumes_it_later(sweep, queue, tmp_path: Path) -> None:
    path = sweep(first=["wait"])
    interrupted = queue(path)
    wait_until(lambda: count(tmp_path, "first", "starts") == 1)
    processes = _processes_with(str(folder(tmp_path, "first")))
    assert processes
    interrupted.send_signal(signal.SIGINT)
    code, out = finish(interrupted)
    assert code == 130 and "call again to resume" in out
    assert state(tmp_path, "first") == "interrupted"
    assert not any(map(is_alive, processes))
    (tmp_path / "gate").touch()
    assert finish(queue(path))[0] == 0
    assert (count(tmp_path, "first", "starts"), count(tmp_path, "first", "ends")) == (2, 1)


def test_second_queue_and_changed_sweep_are_refused(sweep, queue, tmp_path: Path) -> None:
    path = sweep(first=["wait"])
    working = queue(path)
    wait_until(lambda: count(tmp_path, "first", "starts") == 1)
    code, out = finish(queue(path))
    assert code == 1 and "another queue works in" in out
    (tmp_path / "gate").touch()
    assert finish(working)[0] == 0
    code, out = finish(queue(sweep(first=["something=else"])))
    assert code == 1 and "was made by another command" in out
    assert count(tmp_path, "first", "starts") == 1


def test_results_are_what_the_curve_commands_read(sweep, queue, tmp_path: Path) -> None:
    path = sweep(first=[], second=["fail"])
    finish(queue(path))
    code, out = finish(queue(path, "--collect"))
    assert code == 0 and "1 finished runs of 2" in out
    rows = read_records(tmp_path / "out" / "results.jsonl")
    assert [(row["name"], row["seed"], row["step"]) for row in rows] == [
        ("first", 0, 0),
        ("first", 0, 1),
        ("first", 0, 3),
    ]
    assert rows[-1]["scalerl/compute/gpu_hours"] == 0.3
    from scalerl_verl.scaling.logs.reading import read_run

    log = read_run([tmp_path / "out" / "curves" / "group.first.seed0.jsonl"])
    assert sorted(log.steps) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"recipe": "tiny-gpu"}, "needs a mapping `groups`"),
        ({"recipe": "tiny-gpu", "groups": {}, "seed": 1}, "seed does not exist, the keys are"),
        ({"recipe": "nothing", "groups": {}}, "is no folder of"),
        ({"recipe": "tiny-gpu", "groups": {"g": {"a": "x=1"}}}, "g/a.overrides must be a list"),
        ({"recipe": "tiny-gpu", "groups": {"g": {"a": {"override": []}}}}, "g/a: override does not exist"),
        ({"recipe": "tiny-gpu", "groups": {"g": {"a": [1]}}}, "g/a.overrides: 1 is no text"),
        ({"recipe": "tiny-gpu", "groups": {"g": {"a": []}}, "seeds": [-1]}, "is no whole number"),
        ({"recipe": "tiny-gpu", "groups": {"g": {"a": [], "b": []}}}, "g/b/seed0 is the same run as g/a/seed0"),
        ({"recipe": "tiny-gpu", "groups": {}, "launcher": "none.py"}, "launcher does not exist, the keys are"),
    ],
)
def test_wrong_sweep_is_refused(spec: ModuleType, tmp_path: Path, content: dict[str, Any], said: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(spec.SweepError, match=said):
        spec.read_sweep(path)


def test_parts_of_a_sweep_are_chosen_by_name(spec: ModuleType, runs: dict[str, Any]) -> None:
    everything = list(runs.values())
    assert spec.choose(everything, []) == everything
    assert {run.seed for run in spec.choose(everything, ["*/seed1"])} == {1}
    assert len(spec.choose(everything, ["leave_one_out"])) == 16
    with pytest.raises(spec.SweepError, match=r"matches no run: give a group \(baselines, batch"):
        spec.choose(everything, ["leave_two_out"])


def _processes_with(text: str) -> list[psutil.Process]:
    """Processes whose command line has `text`, this one left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(text in word for word in process.cmdline()):
                found.append(process)
    return found
