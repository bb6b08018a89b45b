# SPDX-License-Identifier: Apache-2.0
"""Bootstrap of a fit over validation points (blocks of residuals) and over prompts.

The two ask different questions. Blocks of points: how would the fit move had the same run been evaluated again? The
same prompts are evaluated every time, so what is special about them moves every point alike and cannot be seen in the
scatter around the curve. Prompts: how would it move had other prompts been in the validation set?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scalerl_verl.scaling.fit import solver
from scalerl_verl.scaling.fit.curve import Array
from scalerl_verl.scaling.fit.fitting import pose
from scalerl_verl.scaling.fit.points import FitRefused, Points
from scalerl_verl.scaling.fit.result import CurveFit, Interval
from scalerl_verl.scaling.fit.solver import Problems

KINDS = ("points", "prompts")
CHUNK = 64
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Bootstrap:
    """Percentile intervals of a fit's parameters over resamples.

    kind: `points` or `prompts`. num_resamples, block: what was drawn; block is the length of a block of points (1 for
    prompts). level: of the intervals. theta: (A, log B, log C_mid, R0) of every resample, [num_resamples, 4].
    """

    kind: str
    num_resamples: int
    block: int
    level: float
    A_interval: Interval
    B_interval: Interval
    C_mid_interval: Interval
    theta: Array = field(repr=False, compare=False, default_factory=lambda: np.zeros((0, 4)))

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {name: value for name, value in vars(self).items() if name != "theta"}


def bootstrap(
    fit: CurveFit,
    kind: str = "points",
    num_resamples: int = 1000,
    *,
    block: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Bootstrap:
    """Refit `fit` to resampled data.

    Args:
        fit: of the method `profile`, which also fits the resamples.
        kind: `points`: moving blocks of residuals around the curve; `prompts`: rows of `points.prompt_scores`.
        num_resamples: how many.
        block: points in a block; None takes the cube root of the number of points.
        seed: of the random numbers.
        progress: called with (done, all) now and then.

    Raises:
        FitRefused: prompts were asked for and there are no scores by prompt.
        ValueError: an argument that means nothing.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: use one of {', '.join(KINDS)}")
    if num_resamples < 2:
        raise ValueError(f"num_resamples={num_resamples} must be 2 or more; 1,000 give steady 95% intervals")
    num = fit.num_observations
    block = block or max(1, round(num ** (1 / 3)))
    if not 1 <= block <= num:
        raise ValueError(f"block={block} must lie between 1 and the number of points, {num}")
    rng = np.random.default_rng(seed)
    if kind == "points":
        draw = _draw_points(fit, block, rng)
    else:
        draw, block = _draw_prompts(fit.points, rng), 1
    theta = []
    for start in range(0, num_resamples, CHUNK):
        count = min(CHUNK, num_resamples - start)
        theta.append(_refit(fit, draw(count)))
        if progress is not None:
            progress(start + count, num_resamples)
    everything = np.concatenate(theta)
    tail = 50 * (1 - fit.level)
    ends = np.percentile(everything, [tail, 100 - tail], axis=0)
    natural = [ends[:, 0], np.exp(ends[:, 1]), np.exp(ends[:, 2])]
    intervals = [(float(low), float(high)) for low, high in natural]
    of_A, of_B, of_C_mid = intervals
    return Bootstrap(kind, num_resamples, block, fit.level, of_A, of_B, of_C_mid, everything)


def _draw_points(fit: CurveFit, block: int, rng: np.random.Generator) -> Callable[[int], Array]:
    """Scores [count, N]: the curve plus blocks of its residuals, blown up for the parameters they have lost."""
    points = fit.points
    root_w = np.sqrt(points.weights())
    fitted = fit.curve(points.compute)
    residual = (points.score - fitted) * root_w
    residual = (residual - residual.mean()) * np.sqrt(fit.num_observations / fit.dof)
    num = len(residual)
    num_blocks = -(-num // block)

    def draw(count: int) -> Array:
        starts = rng.integers(0, num - block + 1, (count, num_blocks))
        places = (starts[:, :, None] + np.arange(block)).reshape(count, -1)[:, :num]
        return fitted + residual[places] / root_w

    return draw


def _draw_prompts(points: Points, rng: np.random.Generator) -> Callable[[int], Array]:
    if points.prompt_scores is None:
        raise FitRefused(
            "no_prompt_scores",
            "no scores by prompt: a bootstrap over prompts needs verl's validation dumps "
            "(trainer.validation_data_dir) beside the metrics.",
        )
    scores = points.prompt_scores
    num_prompts = len(scores)

    def draw(count: int) -> Array:
        counts = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=count)
        return counts @ scores / num_prompts

    return draw


def _refit(fit: CurveFit, score_MN: Array) -> Array:
    problem = pose(fit.points, None if fit.R0_interval is not None else fit.R0)
    problems = Problems(problem.x, score_MN, problem.w, problem.low, problem.high)
    fixed_R0 = fit.R0_interval is None
    theta, sums = solver.solve(problems, fixed_R0)
    # The fit itself is as good a start as any of the grid.
    free = np.array([True, True, True, not fixed_R0])
    again, lower = solver.minimise(problems, np.repeat(fit.theta()[None], len(score_MN), axis=0), free)
    return np.where((lower < sums)[:, None], again, theta)
