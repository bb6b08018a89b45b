# SPDX-License-Identifier: Apache-2.0
"""The data of a fit: validation points, and the reasons to refuse them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scalerl_verl.scaling.fit.curve import LOG_ZERO, Array, Mask

MIN_STDERR_SHARE = 0.1
"""A standard error below this share of the median one is raised to it: a lucky 0 must not outweigh all other points."""

MAX_NAMED = 3
COMPUTE_RANGE = 1e-100, 1e100
"""Of compute above zero: beyond it products of numbers overflow, and nothing that can be spent is there."""


class FitRefused(ValueError):
    """The data hold no curve to fit; the message says why and what would help, `code` names the reason."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.code, str(self))


@dataclass(frozen=True)
class Points:
    """Validation points in the order of their compute.

    compute: [N] distinct, 0 or more, any unit; a point at 0 is the score before training, an observation of R0.
    score: [N] mean pass rates from 0 to 1. stderr: [N] standard errors of the scores, or None. prompt_scores:
    [prompts, N] pass rate of each prompt at each point, or None. `make` checks.
    """

    compute: Array
    score: Array
    stderr: Array | None = None
    prompt_scores: Array | None = None

    @classmethod
    def make(
        cls,
        compute: ArrayLike,
        score: ArrayLike,
        stderr: ArrayLike | None = None,
        prompt_scores: ArrayLike | None = None,
        places: Sequence[str] = (),
    ) -> Points:
        """Sort and check.

        Args:
            compute, score, stderr, prompt_scores: as the fields, in any order.
            places: where each point stands in its source, for messages; none: its number.

        Raises:
            FitRefused: the values are no points of a curve.
        """
        compute, score = (np.asarray(values, dtype=np.float64) for values in (compute, score))
        errors = None if stderr is None else np.asarray(stderr, dtype=np.float64)
        prompts = None if prompt_scores is None else np.asarray(prompt_scores, dtype=np.float64)
        _check_shapes(compute, score, errors, prompts)
        _check_values(compute, score, errors, places or [f"point {i}" for i in range(1, len(score) + 1)])
        order = np.argsort(compute)
        errors = None if errors is None else errors[order]
        return cls(compute[order], score[order], errors, None if prompts is None else prompts[:, order])

    def __len__(self) -> int:
        return len(self.compute)

    @property
    def start(self) -> float | None:
        """Score before training: that of the point at zero compute; None without one."""
        return float(self.score[0]) if len(self) and self.compute[0] == 0 else None

    @property
    def trained(self) -> Points:
        """The points with compute > 0."""
        return self if self.start is None else self.select(self.compute > 0)

    @property
    def log_compute(self) -> Array:
        """Logarithms of the compute values, [N]; `LOG_ZERO` at zero compute."""
        positive = self.compute > 0
        return np.where(positive, np.log(np.where(positive, self.compute, 1.0)), LOG_ZERO)

    def weights(self) -> Array:
        """1 / stderr^2 scaled to a mean of 1, [N]; ones without standard errors."""
        if self.stderr is None or not self.stderr.any():
            return np.ones(len(self))
        floor = MIN_STDERR_SHARE * float(np.median(self.stderr[self.stderr > 0]))
        weights = 1 / np.maximum(self.stderr, floor) ** 2
        return weights / weights.mean()

    def unit_variance(self) -> float | None:
        """Variance of a point of weight 1 according to the standard errors; None without them."""
        if self.stderr is None or not self.stderr.any():
            return None
        floor = MIN_STDERR_SHARE * float(np.median(self.stderr[self.stderr > 0]))
        return float(1 / np.mean(1 / np.maximum(self.stderr, floor) ** 2))

    def select(self, keep: Mask) -> Points:
        """The points where the boolean array `keep` is true."""
        return Points(
            self.compute[keep],
            self.score[keep],
            None if self.stderr is None else self.stderr[keep],
            None if self.prompt_scores is None else self.prompt_scores[:, keep],
        )

    def after(self, warm_up: float) -> Points:
        """The points whose compute is at least `warm_up`, and the score before training."""
        return self.select((self.compute >= warm_up) | (self.compute == 0))


def check_count(points: Points, num_parameters: int) -> None:
    """Refuse fewer observations than parameters + 2, and a score that is constant once training began.

    Raises:
        FitRefused: too few points, or all scores equal.
    """
    trained, is_started = points.trained, points.start is not None
    needed = num_parameters + 2 - is_started
    if len(trained) < needed:
        raise FitRefused(
            "too_few_points",
            f"{len(trained)} points with compute > 0; a fit of {num_parameters} parameters needs {needed}"
            + (" beside the score before training" if is_started else "")
            + ": evaluate more often"
            + (", or give the score at zero compute." if num_parameters == 4 and not is_started else "."),
        )
    if np.ptp(trained.score) == 0:
        raise FitRefused(
            "constant_score", f"every score is {trained.score[0]:g}; a constant has no ceiling to extrapolate to."
        )


def check_R0(R0: float) -> None:
    """Refuse a score at zero compute that leaves no room for a rise.

    Raises:
        FitRefused: R0 is not in [0, 0.99].
    """
    if not 0 <= R0 <= 0.99:
        raise FitRefused("bad_R0", f"R0={R0} must lie between 0 and 0.99: Eq. 1 rises from it to at most 1.")


def _check_shapes(compute: Array, score: Array, stderr: Array | None, prompts: Array | None) -> None:
    if compute.ndim != 1 or compute.shape != score.shape:
        raise FitRefused("shape", f"compute {compute.shape} and score {score.shape} must be two lists of one length.")
    if stderr is not None and stderr.shape != score.shape:
        raise FitRefused("shape", f"stderr {stderr.shape} and score {score.shape} must be two lists of one length.")
    if prompts is not None and (prompts.ndim != 2 or prompts.shape[1] != len(score)):
        raise FitRefused("shape", f"prompt_scores {prompts.shape} must be [prompts, {len(score)}].")


def _check_values(compute: Array, score: Array, stderr: Array | None, places: Sequence[str]) -> None:
    bad = ~(np.isfinite(compute) & np.isfinite(score))
    if bad.any():
        raise FitRefused(
            "not_finite",
            f"compute or score holds a NaN or an infinity in {bad.sum()} of {len(bad)} points ({_name(bad, places)}); "
            "leave those points out.",
        )
    if np.any(compute < 0):
        raise FitRefused(
            "non_positive_compute",
            f"compute must be positive, or 0 for the score before training; got {compute.min():g} "
            f"({_name(compute < 0, places)}): correct it.",
        )
    outside = (compute > 0) & ((compute < COMPUTE_RANGE[0]) | (compute > COMPUTE_RANGE[1]))
    if outside.any():
        raise FitRefused(
            "compute_out_of_range",
            f"compute must be 0 or lie between {COMPUTE_RANGE[0]:g} and {COMPUTE_RANGE[1]:g}; got "
            f"{compute[outside][0]:g} ({_name(outside, places)}): take another unit.",
        )
    if len(score) and (score.min() < 0 or score.max() > 1):
        raise FitRefused(
            "score_out_of_range",
            f"scores run from {score.min():g} to {score.max():g} ({_name((score < 0) | (score > 1), places)}); "
            "pass rates lie between 0 and 1 (divide percentages by 100; of rewards of +-1 fit the accuracy).",
        )
    values, counts = np.unique(compute, return_counts=True)
    if len(values) < len(compute):
        value = values[counts.argmax()]
        raise FitRefused(
            "duplicate_compute",
            f"compute {value:g} occurs {counts.max()} times ({_name(compute == value, places)}): keep one point for "
            "each value, or average their scores; of several runs in a table name each row's in a column `run`.",
        )
    if stderr is not None and not (np.isfinite(stderr).all() and (stderr >= 0).all()):
        raise FitRefused(
            "bad_stderr",
            "stderr holds a negative value, a NaN or an infinity "
            f"({_name(~(np.isfinite(stderr) & (stderr >= 0)), places)}); correct it or leave it out.",
        )


def _name(chosen: Mask, places: Sequence[str]) -> str:
    """The first places of those chosen."""
    named = [place for place, is_chosen in zip(places, chosen, strict=True) if is_chosen]
    return ", ".join(named[:MAX_NAMED]) + (", ..." if len(named) > MAX_NAMED else "")
