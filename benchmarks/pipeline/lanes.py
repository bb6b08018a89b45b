# SPDX-License-Identifier: Apache-2.0
"""Several runs of the pipeline benchmark on one host, started together and measured one after the other.

Most of a run's time is its start. Lanes start at the same time, stop before their first request, and go on in turns:
of lanes that share devices one works at a time while the others wait with all their memory and no work.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

START_INTERVAL_S = 3.0
"""Ray instances that look for free ports at the same moment may find the same ones."""
GRACE_S = 30.0


@dataclass
class Lane:
    """One run: its mode, devices and options, and where its files go."""

    mode: str
    gpus: str
    folder: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen | None = None

    @property
    def gate(self) -> Path:
        """While this file is missing the run waits before its first request."""
        return self.folder / "gate"

    @property
    def is_ready(self) -> bool:
        """Whether it waits at the gate, or is over already."""
        return (self.folder / "gate.ready").exists() or (self.process is not None and self.process.poll() is not None)


def parse_lanes(text: str, folder: Path) -> list[Lane]:
    """``MODE@GPUS;MODE:OPTION:OPTION@GPUS...``, ``GPUS`` being numbers with commas between, or nothing: the CPU.

    An option is the name of a size, or ``plain``.

    Raises:
        ValueError: a lane twice.
    """
    lanes = []
    for part in text.split(";"):
        what, _, gpus = part.partition("@")
        mode, *options = (word.strip() for word in what.split(":"))
        folder_name = "-".join([mode.split()[-1], *options])
        lanes.append(Lane(mode, gpus.strip(), folder / folder_name, tuple(options)))
    if len({lane.folder for lane in lanes}) < len(lanes):
        raise ValueError(f"--lanes {text}: every lane may be there once")
    return lanes


def run_lanes(
    lanes: Sequence[Lane], arguments_of: dict[str, list[str]], boot_s: float, each_s: float, after: Path | None = None
) -> None:
    """Start all lanes, and let those on the same devices work in their order.

    Args:
        lanes: what to run.
        arguments_of: mode -> further arguments of ``benchmarks.pipeline.bench``.
        boot_s: after which a lane that is not ready is not waited for any more.
        each_s: seconds of work a lane has.
        after: a file without which no lane works: something else still uses the devices.
    """
    began = time.time()
    for lane in lanes:
        lane.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.pipeline.bench", "--mode", lane.mode]
        command += ["--gpus", lane.gpus, "--work", str(lane.folder), "--gate", str(lane.gate)]
        command += ["--seconds", str(each_s), *arguments_of[lane.mode]]
        for option in lane.options:
            command += ["--plain"] if option == "plain" else ["--size", option]
        with (lane.folder / "out.txt").open("w", encoding="utf-8") as out:
            lane.process = subprocess.Popen(command, stdout=out, stderr=out)
        time.sleep(START_INTERVAL_S)
    while not all(lane.is_ready for lane in lanes) and time.time() - began < boot_s:
        time.sleep(0.5)
    while after is not None and not after.exists():
        time.sleep(0.5)
    waiting = {lane.folder.name: lane.is_ready for lane in lanes}
    print(f"after {time.time() - began:.0f} s ready: {json.dumps(waiting)}", flush=True)
    queues = [[lane for lane in lanes if lane.gpus == gpus] for gpus in dict.fromkeys(lane.gpus for lane in lanes)]
    threads = [threading.Thread(target=_work_through, args=(queue, each_s)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"over after {time.time() - began:.0f} s", flush=True)


def _work_through(queue: Sequence[Lane], each_s: float) -> None:
    for lane in queue:
        assert lane.process is not None
        print(f"{time.strftime('%H:%M:%S')} {lane.folder.name}", flush=True)
        lane.gate.touch()
        try:
            lane.process.wait(each_s + GRACE_S)
        except subprocess.TimeoutExpired:
            # It ends its run's processes before itself: the next lane works on the same devices.
            lane.process.send_signal(signal.SIGINT)
            lane.process.wait()
        print((lane.folder / "out.txt").read_text(errors="replace", encoding="utf-8")[-2000:], flush=True)
