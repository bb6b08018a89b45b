# SPDX-License-Identifier: Apache-2.0
"""Pass rates of each prompt from verl's validation dumps, which lie beside a run's metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from scalerl_verl.json_lines import read_records
from scalerl_verl.scaling.logs.metric_names import PASS_RATE
from scalerl_verl.scaling.logs.segments import ReadError, RunLog

PASS_RATE_TOLERANCE = 1e-6
"""Of two means of the same passes, summed in another order and written with at least seven digits."""


def read_prompt_scores(run: RunLog, steps: list[int]) -> np.ndarray | None:
    """[prompts, steps] pass rates from verl's validation dumps, by the default definition of a pass.

    None unless every step has the same prompts and the pass rate that the run logged, if it did: a run with a
    definition of its own is not judged by another one.
    """
    by_step = []
    logged = run.series(PASS_RATE)
    for step in steps:
        path = next((p for folder in run.validation_folders if (p := Path(folder) / f"{step}.jsonl").exists()), None)
        if path is None:
            return None
        means = _prompt_means(path)
        if step in logged and abs(float(np.mean(list(means.values()))) - logged[step]) > PASS_RATE_TOLERANCE:
            return None
        by_step.append(means)
    if not by_step or any(set(means) != set(by_step[0]) for means in by_step):
        return None
    return np.array([[means[prompt] for means in by_step] for prompt in sorted(by_step[0])])


def _prompt_means(path: Path) -> dict[tuple[str, str], float]:
    """Pass rate of each prompt of a dump; the same text with another ground truth is another prompt."""
    # Its package needs PyTorch, which a machine that only fits curves may not have.
    from scalerl_verl.advantage.passed import PassRule

    rows = read_records(path)
    try:
        passed = PassRule().judge([row["score"] for row in rows], rows)
    except ValueError as error:
        raise ReadError(f"{path}: {error}") from error
    means: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, value in zip(rows, passed.tolist(), strict=True):
        means[row["input"], json.dumps(row.get("gts"), sort_keys=True)].append(value)
    return {prompt: float(np.mean(values)) for prompt, values in means.items()}
