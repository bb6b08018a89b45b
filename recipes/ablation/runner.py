# SPDX-License-Identifier: Apache-2.0
"""The queue: one run after the other, each once, whatever is killed in between.

A run is a launcher (`recipes/launch`) in a session of its own, which outlives the queue. What became of it stands in
its folder, and its lock says whether it still works.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from recipes.ablation.spec import Run, SweepError
from recipes.launch.folder import Paths, state_of
from recipes.launch.lock import has_launcher, try_lock

POLL_S = 0.2
Say = Callable[[str], None]


def run_folder(out: Path, run: Run) -> Path:
    """Where a run's files are."""
    return out / "runs" / run.name


def describe(out: Path, run: Run) -> str:
    """A run's state as the table shows it; `killed`: it was running, and its launcher is gone."""
    folder = run_folder(out, run)
    return "running" if has_launcher(folder) else state_of(Paths(folder))


def lock_queue(out: Path) -> IO[str]:
    """Make this the only queue of a folder.

    Raises:
        SweepError: there is another one.
    """
    out.mkdir(parents=True, exist_ok=True)
    stream = try_lock(out / "queue.lock")
    if stream is None:
        raise SweepError(f"another queue works in {out}: wait for it, or give another --out")
    return stream


def work(runs: Sequence[Run], out: Path, data: Path | None, retry_failed: bool, say: Say) -> int:
    """Bring every run to its end; returns the number that failed.

    A finished run is left alone. One that was interrupted or killed is started again by the same command, which resumes
    it from its checkpoint. A failed one is left for `retry_failed`. One that still runs without a queue is waited for.

    Raises:
        SweepError: a run in the folder was made by another command.
        KeyboardInterrupt: after the current run was ended.
    """
    num_failed = 0
    for number, run in enumerate(runs, 1):
        folder, name = run_folder(out, run), f"[{number}/{len(runs)}] {run.name}"
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_launcher(folder, run, say)
        _refuse_other(folder, run)
        state = state_of(Paths(folder))
        if state == "finished":
            continue
        if state == "failed" and not retry_failed:
            num_failed += 1
            say(f"{name}: failed before, see {folder / 'attempts.log'} (--retry-failed)")
            continue
        say(f"{name}: {'starting' if state == 'waiting' else 'resuming'}")
        code = _run_once(folder, run.command(folder, data))
        num_failed += code != 0
        say(f"{name}: {'finished' if code == 0 else f'failed with code {code}'}")
    return num_failed


def _wait_for_launcher(folder: Path, run: Run, say: Say) -> None:
    if has_launcher(folder):
        say(f"{run.name} still runs from a queue that is gone: waiting for it")
    while has_launcher(folder):
        time.sleep(POLL_S)


def _refuse_other(folder: Path, run: Run) -> None:
    settings = Paths(folder).settings
    if settings.exists() and json.loads(settings.read_text(encoding="utf-8")) != run.settings(folder):
        raise SweepError(
            f"{folder} was made by another command: the sweep has changed since. Give another --out, or move the "
            "folder away to have the run made anew"
        )


def _run_once(folder: Path, command: Sequence[str]) -> int:
    """One attempt; returns its exit code."""
    with (folder / "attempts.log").open("a", encoding="utf-8") as log:
        # In a session of its own: what ends this queue by force does not end the run.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The launcher ends its run before itself.
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
