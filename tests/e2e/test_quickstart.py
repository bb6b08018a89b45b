# SPDX-License-Identifier: Apache-2.0
"""The quickstart's launcher: ctrl-C leaves nothing, a second start resumes, the report is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scalerl_verl.platform.reap import find_shared_memory
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, REPO

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


def _launch(assets: Path, out: Path, log: Path) -> subprocess.Popen:
    command = [sys.executable, str(REPO / "recipes" / "quickstart" / "launch.py"), "--data", str(assets)]
    command += ["--out", str(out), "--steps", str(STEPS), "--", *OVERRIDES]
    with log.open("w") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)


def _wait(condition: Callable[[], bool], process: subprocess.Popen, timeout_s: float = 400) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, "the launcher ended early"
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.2)


def _run_processes(out: Path) -> list[int]:
    """Processes whose environment names this run's metrics file."""
    wanted = f"VERL_FILE_LOGGER_PATH={out / 'run' / 'metrics.jsonl'}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def interrupted(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that got ctrl-C after its first step; yields its output folder."""
    out = tmp_path_factory.mktemp("quickstart")
    process = _launch(tiny_assets, out, out / "first.log")
    latest = out / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    _wait(latest.exists, process)
    assert len(_run_processes(out)) > 5
    segments = find_shared_memory((out / ".run-id").read_text())
    assert segments, "vLLM's engine talks to its worker through shared memory"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert _run_processes(out) == []
    assert segments & set(os.listdir("/dev/shm")) == set()
    yield out


def test_interrupt_says_how_to_go_on(interrupted: Path) -> None:
    assert "re-run to resume" in (interrupted / "first.log").read_text()
    assert not (interrupted / "summary.json").exists()


def test_second_start_resumes_and_reports(interrupted: Path, tiny_assets: Path) -> None:
    process = _launch(tiny_assets, interrupted, interrupted / "second.log")
    code = process.wait(timeout=500)
    text = (interrupted / "second.log").read_text()
    assert code == 0, text
    assert "resuming the interrupted run" in text
    summary = json.loads((interrupted / "summary.json").read_text())
    assert summary["steps"] == STEPS and summary["generated_tokens"] > 0
    assert [point["step"] for point in summary["points"]][-1] == STEPS
    assert summary["wall_s"] > 0 and 1 < summary["peak_gib"] < 12
    assert (interrupted / "learning_curve.png").stat().st_size > 5000
    assert _run_processes(interrupted) == []
