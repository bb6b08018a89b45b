# SPDX-License-Identifier: Apache-2.0
"""The quickstart's launcher: ctrl-C leaves nothing, what SIGKILL leaves is ended, a new start resumes and reports.

The first two runs wait before their second step (the probe's PROBE_HOLD_STEP), so what they are killed in does not
depend on how fast this machine is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

from recipes.launch.processes import find_shared_memory, is_alive, see_processes
from tests.e2e.launching import CPU_ENVIRONMENT, GROUP_SIZE, NUM_PROMPTS, PROBE, REPO, title_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 3
OVERRIDES = (
    f"data.train_batch_size={NUM_PROMPTS}",
    f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
    # The tiny data set is no chain sum: grade it by the tests' own reward.
    f"reward.custom_reward_function.path={REPO / 'tests' / 'e2e' / 'reward.py'}",
)


def _launch(assets: Path, out: Path, log: Path, hold: bool) -> subprocess.Popen:
    """Start the launcher; with ``hold`` its run touches ``out/held`` before its second step and goes no further."""
    command = [sys.executable, str(REPO / "recipes" / "launch" / "run.py"), str(REPO / "recipes" / "quickstart")]
    command += ["--data", str(assets), "--out", str(out), "--again", "--steps", str(STEPS), "--", *OVERRIDES]
    environment = {**os.environ, **CPU_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    environment.pop("RAY_ADDRESS", None)
    if hold:
        (out / "held").unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, [str(PROBE), os.environ.get("PYTHONPATH")]))
        environment |= {"PROBE_DIR": str(out), "PROBE_HOLD_STEP": "2", "PYTHONPATH": path}
    with log.open("w") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, env=environment)


def _wait(condition: Callable[[], bool], process: subprocess.Popen, timeout_s: float = 600) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the launcher ended early"
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.2)


def _run_processes(out: Path) -> list[psutil.Process]:
    """Processes whose environment names this run's metrics file."""
    wanted = str(out / "run" / "metrics.jsonl")
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("VERL_FILE_LOGGER_PATH") == wanted:
                found.append(process)
    return found


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run or are still ending; a dead one whose new parent has not asked for its end does not.

    Asked of processes that were seen before: one that is ending shows no environment.
    """
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _run_id(out: Path) -> str:
    return (out / ".lock").read_text()


@pytest.fixture(scope="module")
def interrupted(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that got ctrl-C after its first step."""
    out = tmp_path_factory.mktemp("quickstart")
    process = _launch(tiny_assets, out, out / "first.log", hold=True)
    _wait((out / "held").exists, process)
    members = _run_processes(out)
    assert len(members) > 5
    # Its daemons, too: what Linux shows of the environment of some is up to their titles.
    family = psutil.Process(process.pid).children(recursive=True)
    assert {"ray::RuntimeEnvAgent", "ray::DashboardAgent"} <= {title_of(member.pid) for member in family}
    segments = find_shared_memory(_run_id(out))
    assert segments, "vLLM's engine talks to its worker through shared memory"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert _run_processes(out) == []
    assert _living([*members, *family]) == []
    assert segments & set(os.listdir("/dev/shm")) == set()
    return out


def test_interrupt_says_how_to_go_on(interrupted: Path) -> None:
    assert "re-run to resume" in (interrupted / "first.log").read_text()
    assert not (interrupted / "summary.json").exists()


@pytest.fixture(scope="module")
def orphaned(interrupted: Path, tiny_assets: Path) -> Path:
    """The same folder, resumed by a launcher that was then killed: its run goes on."""
    process = _launch(tiny_assets, interrupted, interrupted / "second.log", hold=True)
    _wait(lambda: len(_run_processes(interrupted)) > 5, process)
    process.kill()
    process.wait()
    assert _run_processes(interrupted)
    return interrupted


def test_third_start_ends_the_orphan_resumes_and_reports(orphaned: Path, tiny_assets: Path) -> None:
    orphan_id = _run_id(orphaned)
    orphans = see_processes(orphan_id)
    assert orphans, "there is nothing to end"
    process = _launch(tiny_assets, orphaned, orphaned / "third.log", hold=False)
    _wait(lambda: "starting; its full log" in (orphaned / "third.log").read_text(), process)
    assert _run_id(orphaned) != orphan_id
    assert see_processes(orphan_id) == set()
    assert not any(map(is_alive, orphans))
    code = process.wait(timeout=600)
    text = (orphaned / "third.log").read_text()
    assert code == 0, text
    assert "lost its launcher" in text and "shared-memory segments" in text
    assert "resuming the interrupted run" in text
    summary = json.loads((orphaned / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["generated_tokens"] > 0
    assert [point["step"] for point in summary["points"]][-1] == STEPS
    assert summary["wall_s"] > 0 and 1 < summary["peak_gib"] < 12
    assert (orphaned / "learning_curve.png").stat().st_size > 5000
    assert _run_processes(orphaned) == []
