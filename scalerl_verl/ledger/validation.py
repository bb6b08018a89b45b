# SPDX-License-Identifier: Apache-2.0
"""Mean pass rate of a validation and its standard error, from the passes of single generations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PassRate:
    """pass_rate: mean over prompts of their mean over generations; stderr: see `measure_pass_rate`."""

    pass_rate: float
    stderr: float
    num_prompts: int
    num_generations: int


def measure_pass_rate(prompts: Sequence[str], passes: Sequence[float]) -> PassRate:
    """Average the generations of every prompt, then the prompts.

    Args:
        prompts: id of the prompt of every generation. passes: 1 passed, 0 failed.

    Returns:
        The standard error is the standard deviation of the prompts' means over sqrt(prompts): both prompts and
        generations scatter in it. With one prompt it is that of its generations, with one generation nan.

    Raises:
        ValueError: no generations, or lists of different lengths.
    """
    if len(prompts) != len(passes) or not prompts:
        raise ValueError(f"{len(prompts)} prompt ids and {len(passes)} passes: one of each per generation is needed")
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for prompt, value in zip(prompts, passes, strict=True):
        by_prompt[prompt].append(float(value))
    means = [float(np.mean(values)) for values in by_prompt.values()]
    scattered = means if len(means) > 1 else next(iter(by_prompt.values()))
    stderr = float(np.std(scattered, ddof=1) / np.sqrt(len(scattered))) if len(scattered) > 1 else float("nan")
    return PassRate(float(np.mean(means)), stderr, len(means), len(passes))
