# SPDX-License-Identifier: Apache-2.0
"""What a person who waits gets to see: stages, steps, and the reason of a failure."""

from __future__ import annotations

import json
import statistics
import time

from recipes.launch.folder import Paths

STAGES = (
    ("Started a local Ray instance", "Ray is up; starting the trainer (about 20 s)"),
    ("After FSDP", "the trainer holds the model; starting vLLM (about 30 s)"),
    ("(AgentLoopWorker", "vLLM is up; measuring the start level"),
)
"""What verl prints at a stage -> what it means to a reader who waits."""


class Progress:
    """Turns verl's log and metrics into a line a person can follow."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._started = time.monotonic()
        # A resumed run appends to the log of the attempt before.
        self._log_offset = paths.log.stat().st_size if paths.log.exists() else 0
        self._metric_lines = 0
        self._stage = -1

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:5.0f} s] {text}", flush=True)

    def poll(self) -> None:
        self._poll_log()
        if not self._paths.metrics.exists():
            return
        lines = self._paths.metrics.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[self._metric_lines :]:
            self._show(json.loads(line))
        self._metric_lines = len(lines)

    def _poll_log(self) -> None:
        if not self._paths.log.exists() or self._stage + 1 >= len(STAGES):
            return
        with self._paths.log.open(errors="replace", encoding="utf-8") as stream:
            stream.seek(self._log_offset)
            text = stream.read()
            self._log_offset = stream.tell()
        for index, (mark, meaning) in enumerate(STAGES):
            if index > self._stage and mark in text:
                self._stage = index
                self.say(meaning)

    def _show(self, entry: dict) -> None:
        data = entry["data"]
        parts = [f"step {entry['step']:3d}"]
        if "critic/score/mean" in data:
            parts.append(f"training pass rate {(data['critic/score/mean'] + 1) / 2:.2f}")
            parts.append(f"{data['response_length/mean']:.1f} tokens a response")
            parts.append(f"{data['timing_s/step']:.1f} s")
        # one a data source, which all hold as many problems in our recipes; best@N and maj@N stand beside it
        held_out = [value for key, value in data.items() if key.startswith("val-core/") and "/acc/mean@" in key]
        if held_out:
            parts.append(f"HELD-OUT pass rate {statistics.fmean(held_out):.3f}")
        self.say(", ".join(parts))


def explain_failure(paths: Paths) -> None:
    """Print the part of the log that says why."""
    lines = paths.log.read_text(errors="replace", encoding="utf-8").splitlines()
    refusal = [index for index, line in enumerate(lines) if "scalerl_verl refuses to start" in line]
    marks = refusal or [index for index, line in enumerate(lines) if "Error" in line]
    start = max(marks[-1] - 12, 0) if marks and not refusal else (marks[-1] if marks else max(len(lines) - 15, 0))
    print(f"\nThe run failed. From {paths.log}:\n" + "\n".join(line[:300] for line in lines[start : start + 25]))
