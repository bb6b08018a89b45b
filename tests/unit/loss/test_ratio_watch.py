# SPDX-License-Identifier: Apache-2.0
"""The part of the log-ratio that age explains, and the alarm of the effective sample size."""

from __future__ import annotations

import logging
import math

import pytest

from scalerl_verl.loss.age_split import EXPLAINED_BY_AGE, SQUARE_OF_ALL, SQUARE_OF_ENGINES
from scalerl_verl.loss.ratio_watch import ESS, ESS_ALARM, RatioWatch
from scalerl_verl.names import LOW_ESS_FRAC


def test_batches_without_a_fresh_response_use_the_engines_of_the_last_that_had_one() -> None:
    watch, seen = RatioWatch(), []
    for of_all, of_engines in ((8.0, None), (8.0, 2.0), (4.0, None), (4.0, 3.0), (4.0, None)):
        metrics = {SQUARE_OF_ALL: of_all}
        if of_engines is not None:
            metrics[SQUARE_OF_ENGINES] = of_engines
        watch.observe(metrics)
        seen.append(metrics.get(EXPLAINED_BY_AGE))
    assert seen == [None, 0.75, 0.5, 0.25, 0.25]


def test_runs_without_versions_get_no_split() -> None:
    metrics = {ESS: 1.0, "actor/loss": 2.0}
    RatioWatch().observe(metrics)
    assert set(metrics) == {ESS, "actor/loss", ESS_ALARM}
    nothing: dict[str, float] = {}
    RatioWatch().observe(nothing)
    assert not nothing


def test_alarm_is_a_metric_of_every_step_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch, seen, warnings = RatioWatch(), [], []
    with caplog.at_level(logging.WARNING):
        for ess in (1.0, LOW_ESS_FRAC, LOW_ESS_FRAC - 0.01, 0.9, 0.1, math.nan):
            metrics = {ESS: ess, SQUARE_OF_ALL: 4.0, SQUARE_OF_ENGINES: 1.0}
            watch.observe(metrics)
            seen.append(metrics[ESS_ALARM])
            warnings.append(len(caplog.records))
    assert seen == [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert warnings == [0, 0, 1, 1, 1, 1]
    # What was measured, what age has to do with it, and the keys that change it.
    for said in ("49.0%", "75%", "trainer.v1.pipeline_rl.max_staleness", "+scalerl=fp32_head"):
        assert said in caplog.text
