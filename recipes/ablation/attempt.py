# SPDX-License-Identifier: Apache-2.0
"""One attempt at a run, in a process of its own that outlives the queue: `attempt.py FOLDER -- COMMAND...`.

It holds the folder's lock, runs the command, and writes what came of it, so that a queue that was killed meanwhile
finds out. The command inherits the lock: as long as either lives, nobody starts the run a second time.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

STATES = ("running", "finished", "failed", "interrupted")
GRACE_S = 120.0
"""How long an interrupted run may take to end its processes."""


@dataclasses.dataclass
class Status:
    """What is known of a run, in `status.json` of its folder.

    Args:
        state: one of `STATES`; `running` without a holder of the lock is a run that was killed.
        fingerprint: of its command.
        attempts: begin, end (Unix seconds) and exit code of each; end and code are null while it runs, or if it was
            killed.
    """

    state: str
    fingerprint: str
    attempts: list[dict[str, float | int | None]]


def fingerprint(command: Sequence[str]) -> str:
    """A hash of a command without the interpreter, which may move."""
    return hashlib.sha256(json.dumps(list(command[1:])).encode()).hexdigest()[:16]


def read_status(folder: Path) -> Status | None:
    """The status of a run; None if it was never started."""
    try:
        return Status(**json.loads((folder / "status.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def write_status(folder: Path, status: Status) -> None:
    """Replace the status in one step: a reader sees the old or the new one."""
    partial = folder / "status.json.partial"
    partial.write_text(json.dumps(dataclasses.asdict(status), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / "status.json")


def try_lock(folder: Path) -> IO[str] | None:
    """The run's lock, or None if somebody holds it."""
    stream = (folder / "attempt.lock").open("a", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    return stream


def main(argv: Sequence[str]) -> int:
    """Run the command once; returns its exit code (130 if interrupted)."""
    folder, command = Path(argv[0]), list(argv[2:])
    lock = try_lock(folder)
    if lock is None:
        print(f"{folder} is locked: its run goes on", file=sys.stderr)
        return 75
    known = read_status(folder)
    attempts = known.attempts if known else []
    attempts.append({"began": time.time(), "ended": None, "code": None})
    status = Status("running", fingerprint(command), attempts)
    write_status(folder, status)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    interrupted = False
    with (folder / "attempts.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[lock.fileno()]
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:
            interrupted, code = True, _end(process)
    status.state = "interrupted" if interrupted else ("failed" if code else "finished")
    attempts[-1] |= {"ended": time.time(), "code": code}
    write_status(folder, status)
    return 130 if interrupted else code


def _end(process: subprocess.Popen) -> int:
    """End a run as a user would, and by force if it does not; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        # The launcher cleans up after its own processes, so it alone is asked first.
        process.send_signal(signal.SIGINT)
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
