# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: where its files are, whether it is resumed, its attempts, and its metrics over all of them."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path


class LaunchError(ValueError):
    """The run cannot start; the message says what to change."""


@dataclass(frozen=True)
class Paths:
    """Where a run keeps its files."""

    out: Path

    @property
    def run(self) -> Path:
        return self.out / "run"

    @property
    def log(self) -> Path:
        return self.run / "train.log"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def finished(self) -> Path:
        return self.run / "finished"

    @property
    def settings(self) -> Path:
        """What the run was started with: marks the folder as ours, and a resumed run must match it."""
        return self.run / "settings.json"

    @property
    def attempts(self) -> Path:
        """Begin and end (Unix seconds) and exit code of each attempt; the last two are null if it was killed."""
        return self.out / "attempts.json"

    @property
    def latest_checkpoint(self) -> Path:
        return self.run / "checkpoints" / "latest_checkpointed_iteration.txt"


INTERRUPTED = 130
"""Exit code of a launcher that was asked to end."""


def read_attempts(paths: Paths) -> list[dict[str, float | int | None]]:
    """Attempts at the run, oldest first; empty if there was none."""
    return json.loads(paths.attempts.read_text(encoding="utf-8")) if paths.attempts.exists() else []


def _write_attempts(paths: Paths, attempts: list[dict[str, float | int | None]]) -> None:
    """In one step: a reader sees the old or the new ones."""
    partial = paths.attempts.with_suffix(".partial")
    partial.write_text(json.dumps(attempts, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, paths.attempts)


def begin_attempt(paths: Paths) -> None:
    """Note that an attempt begins."""
    _write_attempts(paths, [*read_attempts(paths), {"began": time.time(), "ended": None, "code": None}])


def end_attempt(paths: Paths, code: int) -> None:
    """Note how the attempt that began last has ended."""
    attempts = read_attempts(paths)
    attempts[-1] |= {"ended": time.time(), "code": code}
    _write_attempts(paths, attempts)


def state_of(paths: Paths) -> str:
    """State of a run that no launcher works on: waiting, finished, interrupted, failed or killed."""
    attempts = read_attempts(paths)
    if paths.finished.exists():
        return "finished"
    if not attempts:
        return "waiting"
    code = attempts[-1]["code"]
    return {None: "killed", INTERRUPTED: "interrupted"}.get(code, "failed")


def start_files(paths: Paths, fresh: bool, settings: dict[str, object]) -> str:
    """Decide between resuming and starting anew, and lay the run's folder out; returns what was decided.

    Args:
        paths: files of the run.
        fresh: start anew even if there is something to resume.
        settings: what decides the run; an interrupted one is resumed with the same only.

    Raises:
        LaunchError: the run's folder is not ours, or was started with other settings.
    """
    if paths.run.exists():
        if paths.run.is_symlink() or (any(paths.run.iterdir()) and not paths.settings.is_file()):
            raise LaunchError(f"{paths.run} is no run of this launcher: move it away, or choose another --out")
        resumable = not fresh and not paths.finished.exists() and choose_checkpoint(paths)
        if not resumable:
            shutil.rmtree(paths.run)
        elif (started_with := json.loads(paths.settings.read_text(encoding="utf-8"))) != settings:
            raise LaunchError(
                f"the interrupted run in {paths.run} was started with {started_with}, not with {settings}: give the "
                "same, or --fresh to start anew"
            )
    resuming = paths.run.exists()
    if not resuming:
        # The result of an earlier run must not pass for this one's.
        for name in ("summary.json", "learning_curve.png"):
            if (paths.out / name).exists():
                (paths.out / name).replace(paths.out / f"previous-{name}")
    paths.run.mkdir(parents=True, exist_ok=True)
    paths.settings.write_text(json.dumps(settings), encoding="utf-8")
    if resuming and paths.metrics.exists():
        # verl truncates its metrics file when it starts: keep what the interrupted attempt wrote.
        attempt = sum(1 for _ in paths.run.glob("metrics.*.jsonl"))
        paths.metrics.rename(paths.run / f"metrics.{attempt:03d}.jsonl")
    return "resuming the interrupted run from its last checkpoint" if resuming else "starting anew"


def choose_checkpoint(paths: Paths) -> bool:
    """Point verl at the newest checkpoint whose steps were all logged; False if there is none.

    verl saves a checkpoint before it validates and logs that step: a run that was ended in between would resume after
    a step that no report ever sees.
    """
    if not paths.latest_checkpoint.exists():
        return False
    latest = int(paths.latest_checkpoint.read_text(encoding="utf-8"))
    logged = {0}
    for path in sorted(paths.run.glob("metrics*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        logged.update(json.loads(line)["step"] for line in lines)
    folders = paths.latest_checkpoint.parent.glob("global_step_*")
    steps = sorted(int(folder.name.rpartition("_")[2]) for folder in folders)
    usable = [step for step in steps if step <= latest and logged.issuperset(range(1, step + 1))]
    if usable:
        paths.latest_checkpoint.write_text(str(usable[-1]), encoding="utf-8")
    return bool(usable)


def merge_attempts(paths: Paths) -> None:
    """Put the metrics of interrupted attempts in front of the last one's, so that the report sees every step."""
    earlier = sorted(paths.run.glob("metrics.[0-9][0-9][0-9].jsonl"))
    if not paths.metrics.exists():
        raise LaunchError(f"verl ended well but wrote no {paths.metrics}: keep `file` in trainer.logger")
    # An attempt that was killed may end in half a line.
    texts = [path.read_text(encoding="utf-8") for path in (*earlier, paths.metrics)]
    paths.metrics.write_text("".join(text[: text.rfind("\n") + 1] for text in texts), encoding="utf-8")
    for path in earlier:
        path.unlink()
