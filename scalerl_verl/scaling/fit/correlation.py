# SPDX-License-Identifier: Apache-2.0
"""How residuals of neighbouring points correlate, and how much that widens an interval.

Validation scores wander: what pushed the policy up at one point still does at the next. The model is AR(1) along the
points, correlation rho between neighbours; points may be unevenly spaced, their order counts.

rho is not known, and a plugged-in estimate makes intervals too narrow, so it is averaged over: the residual likelihood
of rho (of what the curve's parameters leave, Patterson and Thompson 1971) times a prior of half its mass at 0 and half
spread evenly up to 0.95. For each rho a parameter's t interval is wider than for independent residuals by the root of

    s^2(rho) / s^2(0) * [H J' S(rho) J H]_kk / H_kk,   H = (J'J)^-1,   S(rho)_ij = rho^|i - j|

with J the curve's weighted gradient and s^2 the noise, times `MARGIN`; the interval that is used is the quantile of the
mixture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter
from scipy.special import ndtr, stdtr

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.curve import Array
from scalerl_verl.scaling.fit.solver import Problems

RHOS = np.linspace(0.0, 0.95, 39)
PRIOR_INDEPENDENT = 0.5
MARGIN = 1.1
"""On the half-widths for every rho above 0. With rho known they would miss in 5%, and rho is read off the residuals,
which are nearer to independent than the noise: without the margin simulated runs of 100 points with rho .3 miss in 5 to
6% (`benchmarks/fit/coverage.py`)."""
RMSE_FLOOR = 1e-6
"""Scores are not taken to be more exact than this."""
HALVINGS = 40


@dataclass(frozen=True)
class Correlation:
    """Of one fit. lag_1: correlation of each residual with the one before, as it was seen.

    weight: posterior of `RHOS`, [R]. noise: s^2(rho) / s^2(0), [R]. H: [K, K]; spread: H J'S(rho)J H, [R, K, K]; both 0
    in rows and columns of parameters that do not move. dof: degrees of freedom; None: the noise is known.
    """

    lag_1: float
    weight: Array
    noise: Array
    H: Array
    spread: Array
    dof: int | None

    def widening(self, gradient: Array, level: float) -> Array:
        """Factors, 1 or more, on the half-widths of intervals of linear functions of the parameters, [V, K] -> [V]."""
        most = (1 + RHOS) / (1 - RHOS)
        alone = np.einsum("vi,ij,vj->v", gradient, self.H, gradient)[:, None]
        spread = np.einsum("vi,rij,vj->vr", gradient, self.spread, gradient)
        # What cannot be told from this fit takes the most that rho can do.
        ratio = np.where(alone > 1e-14, spread / np.maximum(alone, 1e-300), most)
        variance = np.maximum(np.minimum(ratio, most) * self.noise, 1.0)
        scale = np.sqrt(variance) * np.where(RHOS > 0, MARGIN, 1.0)
        return self._quantile(scale, level) / self._quantile(np.ones((1, len(RHOS))), level)

    def _quantile(self, scale: Array, level: float) -> Array:
        """Quantiles of the mixtures of scaled t (or normal) distributions, scale [V, R], by halving."""
        low, high = np.zeros(len(scale)), np.full(len(scale), 1e3)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            z = middle[:, None] / scale
            below = (ndtr(z) if self.dof is None else stdtr(self.dof, z)) @ self.weight < 0.5 + level / 2
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return (low + high) / 2


def estimate(problems: Problems, theta: Array, num_parameters: int, is_noise_known: bool) -> Correlation:
    """Of one fit, theta [4], of one problem."""
    root_w = np.sqrt(problems.w[0])
    gradient = (solver.jacobian(problems, theta[None])[0] * root_w).T
    residual = (problems.y[0] - solver.scores(problems, theta[None])[0]) * root_w
    inside = (theta > problems.low + 1e-9) & (theta < problems.high - 1e-9)
    return of_design(residual, gradient * inside, len(residual) - num_parameters, is_noise_known)


def of_design(residual: Array, design: Array, dof: int, is_noise_known: bool = False) -> Correlation:
    """Of the residuals [N] of a linear fit with a design [N, K]; columns of zeros do not take part."""
    num, num_columns = design.shape
    inside = np.any(design != 0, axis=0)
    J, place = design[:, inside], np.ix_(inside, inside)
    H, spread = np.zeros((num_columns, num_columns)), np.zeros((len(RHOS), num_columns, num_columns))
    H[place] = inverse = np.linalg.pinv(J.T @ J, rcond=1e-12, hermitian=True)
    for r, rho in enumerate(RHOS):
        spread[r][place] = inverse @ (J.T @ _correlate(J, rho)) @ inverse
    known_dof = None if is_noise_known else dof
    total = float(residual @ residual)
    if total <= num * RMSE_FLOOR**2:
        return Correlation(0.0, np.where(RHOS == 0, 1.0, 0.0), np.ones(len(RHOS)), H, spread, known_dof)
    log_likelihood, sums = _residual_likelihood(residual, J, dof)
    prior = np.full(len(RHOS), (1 - PRIOR_INDEPENDENT) / (len(RHOS) - 1))
    prior[0] = PRIOR_INDEPENDENT
    weight = prior * np.exp(log_likelihood - log_likelihood.max())
    # Where the noise is known only the correlation widens.
    noise = np.ones(len(RHOS)) if is_noise_known else sums / sums[0]
    lag_1 = float(residual[1:] @ residual[:-1]) / total
    return Correlation(lag_1, weight / weight.sum(), noise, H, spread, known_dof)


def _residual_likelihood(residual: Array, J: Array, dof: int) -> tuple[Array, Array]:
    """Log of the residual likelihood of every rho, the noise profiled out, and the sums of squares it leaves, [R]."""
    log_likelihood, sums = np.zeros(len(RHOS)), np.zeros(len(RHOS))
    for r, rho in enumerate(RHOS):
        e, K = _whiten(residual, rho), _whiten(J, rho)
        values, basis = np.linalg.eigh(K.T @ K)
        kept = values > 1e-12 * values.max(initial=0.0)
        part = (basis.T @ (K.T @ e))[kept]
        sums[r] = max(e @ e - (part**2 / values[kept]).sum(), 1e-300)
        determinant = (len(e) - 1) * np.log(1 - rho**2) + np.log(values[kept]).sum()
        log_likelihood[r] = -0.5 * (determinant + dof * np.log(sums[r]))
    return log_likelihood, sums


def _whiten(values: Array, rho: float) -> Array:
    """Values [N, ...] made independent if they are AR(1) with variance 1."""
    out = values.copy()
    out[1:] = (values[1:] - rho * values[:-1]) / np.sqrt(1 - rho**2)
    return out


def _correlate(values: Array, rho: float) -> Array:
    """S(rho) values, [N, K], by one filter forwards and one backwards."""
    forwards = lfilter([1.0], [1.0, -rho], values, axis=0)
    backwards = lfilter([1.0], [1.0, -rho], values[::-1], axis=0)[::-1]
    return np.asarray(forwards + backwards - values)
