# SPDX-License-Identifier: Apache-2.0
"""Run main_ppo to its end, whatever ends it, and clean up after it."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from recipes.launch.folder import INTERRUPTED, Paths
from recipes.launch.processes import (
    Process,
    end_processes,
    find_shared_memory,
    remove_shared_memory,
    resident_gib,
    see_processes,
)
from recipes.launch.progress import Progress


class RunWatch(threading.Thread):
    """Samples the run's processes, memory and shared-memory segments; that walks every page table, so not too often."""

    interval_s = 10.0

    def __init__(self, run_id: str) -> None:
        super().__init__(daemon=True)
        self._run_id = run_id
        self._stop_requested = threading.Event()
        self.peak_gib = 0.0
        self.segments: set[str] = set()
        self.processes: set[Process] = set()

    def sample(self) -> None:
        self.processes |= see_processes(self._run_id)
        self.peak_gib = max(self.peak_gib, resident_gib(self._run_id))
        self.segments |= find_shared_memory(self._run_id)

    def run(self) -> None:
        while not self._stop_requested.wait(self.interval_s):
            self.sample()

    def finish(self) -> None:
        self._stop_requested.set()
        if self.ident is not None:
            self.join()


def run_training(
    command: Sequence[str], environment: Mapping[str, str], paths: Paths, run_id: str, lock: IO[str]
) -> tuple[int, float]:
    """Run main_ppo to its end and leave no process and no shared memory; returns (exit code, peak GiB).

    Args:
        command: main_ppo with everything that belongs to the run.
        environment: of the run, with its `run_marks`.
        paths: files of the run.
        run_id: id by which the run's processes are found.
        lock: the open lock of the folder that the run inherits.
    """
    watch = RunWatch(run_id)
    progress = Progress(paths)
    code = 1
    # A closed terminal or a supervisor gets the same clean-up as a user who presses ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with paths.log.open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The run keeps the folder locked even if this launcher is killed.
                pass_fds=[lock.fileno()],
            )
        watch.start()
        progress.say(f"verl is starting; its full log is {paths.log}")
        while process.poll() is None:
            progress.poll()
            time.sleep(0.5)
        progress.poll()
        code = process.returncode
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # Another signal in here would leave what the first one was meant to remove.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        watch.finish()
        watch.sample()
        num_ended = end_processes(run_id, known=watch.processes)
        removed = remove_shared_memory(watch.segments)
    if code == INTERRUPTED:
        print("\ninterrupted", flush=True)
    if code != 0:
        print(f"ended {num_ended} processes, removed {len(removed)} shared-memory segments", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    return code, watch.peak_gib
