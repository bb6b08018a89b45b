# SPDX-License-Identifier: Apache-2.0
"""The queue: one run after the other, each once, whatever is killed in between."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import attempt
from spec import Run, SweepError

POLL_S = 0.2
Say = Callable[[str], None]


def run_folder(out: Path, run: Run) -> Path:
    """Where a run's status and files are."""
    return out / "runs" / run.name


def describe(out: Path, run: Run) -> str:
    """A run's state as the table shows it; `killed`: it was running, and nothing of it is left."""
    folder = run_folder(out, run)
    status = attempt.read_status(folder)
    if status is None:
        return "waiting"
    if status.state != "running":
        return status.state
    lock = attempt.try_lock(folder)
    if lock is None:
        return "running"
    lock.close()
    return "killed"


def lock_queue(out: Path) -> IO[str]:
    """Make this the only queue of a folder.

    Raises:
        SweepError: there is another one.
    """
    out.mkdir(parents=True, exist_ok=True)
    stream = (out / "queue.lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise SweepError(f"another queue works in {out}: wait for it, or give another --out") from None
    return stream


def work(runs: Sequence[Run], out: Path, retry_failed: bool, say: Say) -> int:
    """Bring every run to its end; returns the number that failed.

    A finished run is left alone. One that was interrupted or killed is started again by the same command, which resumes
    it from its checkpoint. A failed one is left for `retry_failed`. One that still runs without a queue is waited for.

    Raises:
        SweepError: a run in the folder was made by another command.
        KeyboardInterrupt: after the current run was ended.
    """
    num_failed = 0
    for number, run in enumerate(runs, 1):
        folder = run_folder(out, run)
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_orphan(folder, run, say)
        command, status = run.command(folder), attempt.read_status(folder)
        if status is not None and status.fingerprint != attempt.fingerprint(command):
            raise SweepError(
                f"{folder} was made by another command: the sweep has changed since. Give another --out, or move the "
                "folder away to have the run made anew"
            )
        state = status.state if status else "waiting"
        if state == "finished":
            continue
        if state == "failed" and not retry_failed:
            num_failed += 1
            say(f"[{number}/{len(runs)}] {run.name}: failed before, see {folder / 'attempts.log'} (--retry-failed)")
            continue
        say(f"[{number}/{len(runs)}] {run.name}: {'starting' if state == 'waiting' else 'resuming'}")
        code = _run_once(folder, command)
        num_failed += code != 0
        say(f"[{number}/{len(runs)}] {run.name}: {'finished' if code == 0 else f'failed with code {code}'}")
    return num_failed


def _wait_for_orphan(folder: Path, run: Run, say: Say) -> None:
    told = False
    while (lock := attempt.try_lock(folder)) is None:
        if not told:
            say(f"{run.name} still runs from a queue that is gone: waiting for it")
            told = True
        time.sleep(POLL_S)
    lock.close()


def _run_once(folder: Path, command: Sequence[str]) -> int:
    """One attempt; returns its exit code."""
    # In a session of its own: what ends this queue by force does not end the run.
    process = subprocess.Popen([sys.executable, attempt.__file__, str(folder), "--", *command], start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
