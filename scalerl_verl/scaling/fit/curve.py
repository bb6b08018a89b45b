# SPDX-License-Identifier: Apache-2.0
"""The compute-performance sigmoid of ScaleRL (arXiv 2510.13786, Eq. 1), its inverse and its linear form."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.integer]
LOG_ZERO = -1e5
"""Stands for the logarithm of zero compute: the rise there is exactly 0 for every B >= 0.01, and no product is NaN."""


def sigmoid(
    compute: ArrayLike, A: float | Array, B: float | Array, C_mid: float | Array, R0: float | Array = 0.0
) -> Array:
    """Return the score of the compute-performance curve at `compute`.

        R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

    It is R0 at C = 0, and half way between R0 and A at C_mid.

    Args:
        compute: C, >= 0, in any unit and shape; all arguments broadcast against each other.
        A: ceiling, the score in the limit of infinite compute.
        B: steepness, > 0.
        C_mid: compute at half of the rise, > 0, in the unit of `compute`.
        R0: score at zero compute.

    Returns:
        Scores, float64, of the broadcast shape.

    Raises:
        ValueError: B or C_mid is not positive, or a compute value is negative.

    Source: arXiv 2510.13786, Eq. 1.
    """
    compute = np.asarray(compute, dtype=np.float64)
    if not (np.all(np.asarray(B) > 0) and np.all(np.asarray(C_mid) > 0)):
        raise ValueError(f"B={B} and C_mid={C_mid} must both be positive.")
    if np.any(compute < 0):
        raise ValueError(f"compute must be 0 or more; the smallest value given is {compute.min()}.")
    with np.errstate(divide="ignore"):
        log_compute = np.log(compute)  # -inf at C = 0, where the rise is 0
    return R0 + (np.asarray(A) - R0) * rise(log_compute, np.log(B), np.log(C_mid))


def rise(log_compute: ArrayLike, log_B: ArrayLike, log_C_mid: ArrayLike) -> Array:
    """Return `1 / (1 + (C_mid / C)^B)`, between 0 and 1, from logarithms; never overflows."""
    return expit(np.exp(log_B) * (np.asarray(log_compute) - log_C_mid))


def invert(score: float, A: float, B: float, C_mid: float, R0: float) -> float:
    """Return the compute at which Eq. 1 reaches `score`: 0 at or below R0, infinity at or above A."""
    if score <= R0:
        return 0.0
    if score >= A:
        return float("inf")
    return float(C_mid * ((score - R0) / (A - score)) ** (1 / B))


def linear_form(score: ArrayLike, A: float, R0: float) -> Array:
    """Return `F(R) = 1 / ((A - R0)/(R - R0) - 1) = (C / C_mid)^B`: against C, log-log, a line of slope B.

    NaN where the score lies outside (R0, A), which noise can do: there F has no logarithm.
    """
    score = np.asarray(score, dtype=np.float64)
    inside = (score > R0) & (score < A)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(inside, (score - R0) / (A - score), np.nan)
