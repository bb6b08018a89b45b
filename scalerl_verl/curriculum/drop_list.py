# SPDX-License-Identifier: Apache-2.0
"""The file that lists which prompts were dropped, when and why: one JSON object a line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scalerl_verl.bookkeeping import bookkeeping
from scalerl_verl.curriculum import DroppedPrompt, EpochChange, ResamplingRules
from scalerl_verl.json_lines import append_line, set_aside
from scalerl_verl.names import SAMPLER_SECTION

Describe = Callable[[str], Mapping[str, Any]]


class DropList:
    """Appends the changes of each epoch; what an interrupted run had written beyond its checkpoint is taken out.

    Lines are ``{"event": "dropped" | "kept_by_floor" | "readmitted" | "epoch", "epoch": n, "utc": ..., ...}``. Lines
    that are taken out (epochs that a resumed run repeats, or an earlier run in the same folder) go to
    ``<name>.superseded``.

    Args:
        path: the file; its folder is made.
        rules: why a prompt was dropped.
        describe: prompt id -> what a reader needs to find the prompt in the data.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(self, path: str | Path, rules: ResamplingRules, describe: Describe) -> None:
        self._path = Path(path).expanduser()
        self._rules = rules
        self._describe = describe
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("ab").close()
        except OSError as error:
            raise ValueError(
                f"{SAMPLER_SECTION}.log_file={path} cannot be written ({error}): set it to a file in a folder that can"
            ) from error

    def epoch_began(self, change: EpochChange) -> None:
        """Write the changes of an epoch; the first one of a new run begins a new file."""
        if change.epoch == 1:
            self.resumed(0)
        lines = [self._judged("dropped", change.epoch, prompt) for prompt in change.dropped]
        lines += [self._judged("kept_by_floor", change.epoch, prompt) for prompt in change.kept_by_floor]
        lines += [
            {"event": "readmitted", "epoch": change.epoch, "prompt_id": key, **self._describe(key)}
            for key in change.readmitted
        ]
        counts = {
            "num_dropped": len(change.dropped),
            "num_readmitted": len(change.readmitted),
            "num_dropped_in_all": change.num_dropped,
            "num_remaining": change.num_remaining,
        }
        lines.append({"event": "epoch", "epoch": change.epoch, **counts})
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = "\n".join(json.dumps({**line, "utc": now}, ensure_ascii=False) for line in lines)
        with self._bookkeeping():
            # Half a surrogate pair, which UTF-8 has no bytes for, becomes JSON's escape for it.
            append_line(self._path, text.encode("utf-8", "backslashreplace"))

    def _bookkeeping(self) -> contextlib.AbstractContextManager[None]:
        return bookkeeping(self._path.name, "It lacks epochs; what is dropped does not depend on it")

    def resumed(self, epoch: int) -> None:
        """Take out the lines of epochs after ``epoch``."""
        with self._bookkeeping():
            set_aside(self._path, lambda line: _epoch_of(line) > epoch)

    def _judged(self, event: str, epoch: int, prompt: DroppedPrompt) -> dict[str, Any]:
        rate = (
            f"{self._rules.history} pass rate {prompt.pass_rate:.4g} ({prompt.passed} of {prompt.responses} responses)"
        )
        why = f"{rate} >= {self._rules.threshold}"
        if event == "kept_by_floor":
            why += f", but fewer than {self._rules.min_prompts} prompts would be left"
        return {
            "event": event,
            "epoch": epoch,
            "prompt_id": prompt.prompt_id,
            "pass_rate": prompt.pass_rate,
            "passed": prompt.passed,
            "responses": prompt.responses,
            "history": self._rules.history,
            "last_visit_step": prompt.step,
            "why": why,
            **self._describe(prompt.prompt_id),
        }


def _epoch_of(line: bytes) -> int:
    """Epoch of a line; a line cut off by a crash belongs to no epoch that a checkpoint knows."""
    try:
        return int(json.loads(line.decode("utf-8", "replace"))["epoch"])
    except (ValueError, KeyError, TypeError):
        return 2**31
