# SPDX-License-Identifier: Apache-2.0
"""The compute ledger through restarts, against sums worked out by hand."""

from __future__ import annotations

import json

import pytest

from scalerl_verl.ledger.compute import ComputeLedger, Totals, ValidationPoint
from scalerl_verl.ledger.forecast import describe_forecast, fit_validations
from scalerl_verl.ledger.validation import measure_pass_rate


def run_steps(ledger: ComputeLedger, steps: range, seconds: float, start_s: float) -> tuple[list[dict], dict]:
    """Steps of 10 generated and 8 trained tokens; the state at every end, and as saved inside the last step."""
    log, saved, now = [], {}, start_s
    ledger.tick(now)
    for step in steps:
        now += seconds
        ledger.tick(now)
        ledger.add(generated_tokens=10, trained_tokens=8, model_flops=1e3, steps=step)
        saved = json.loads(json.dumps(ledger.state_dict()))
        now += 1.0  # weight sync, validation
        ledger.tick(now)
        log.append(json.loads(json.dumps(ledger.state_dict())))
    return log, saved


def test_time_counts_for_every_gpu_and_work_adds_up():
    ledger = ComputeLedger(num_gpus=4)
    run_steps(ledger, range(1, 4), seconds=9.0, start_s=100.0)
    assert ledger.totals == Totals(3 * 10 * 4.0, 30, 24, 3e3, 3)
    assert ledger.metrics()["scalerl/compute/gpu_hours"] == pytest.approx(120 / 3600)


def test_resumed_run_continues_and_what_was_lost_is_wasted():
    first = ComputeLedger(num_gpus=2)
    log, _ = run_steps(first, range(1, 3), 9.0, 0.0)
    saved = log[-1] | {"totals": log[-1]["totals"] | {"gpu_seconds": log[-1]["totals"]["gpu_seconds"] - 2.0}}
    more, _ = run_steps(first, range(3, 5), 9.0, 20.0)  # steps 3 and 4 die with the process
    second = ComputeLedger(num_gpus=2)
    second.tick(0.0)
    second.tick(5.0)  # start-up
    second.restore(saved, log + more)
    # The end of step 2 counts, although the checkpoint was saved a second before it.
    assert second.totals == Totals(40.0 + 10.0, 20, 16, 2e3, 2)
    assert (second.wasted_gpu_seconds, second.wasted_tokens) == (40.0, 20)
    again, _ = run_steps(second, range(3, 4), 9.0, 5.0)
    assert second.totals == Totals(70.0, 30, 24, 3e3, 3)
    # All that was ever spent: 4 steps and start-up and one more step.
    assert second.totals.gpu_seconds + second.wasted_gpu_seconds == 80.0 + 10.0 + 20.0
    third = ComputeLedger(num_gpus=2)
    third.restore(saved, log + more + again)
    assert third.totals.gpu_seconds == 40.0, "the checkpoint of step 2 again: the second attempt is wasted too"
    assert third.wasted_gpu_seconds == 80.0 + 10.0 + 20.0 - 40.0


def test_restart_before_the_first_checkpoint_wastes_everything():
    first = ComputeLedger(num_gpus=1)
    log, _ = run_steps(first, range(1, 3), 9.0, 0.0)
    second = ComputeLedger(num_gpus=1)
    second.restore(None, log)
    assert second.totals == Totals() and second.wasted_gpu_seconds == 20.0 and second.wasted_tokens == 20


def test_checkpoint_alone_is_enough():
    first = ComputeLedger(num_gpus=1)
    _, saved = run_steps(first, range(1, 3), 9.0, 0.0)
    second = ComputeLedger(num_gpus=1)
    second.restore(saved)
    assert second.totals == Totals(19.0, 20, 16, 2e3, 2) and second.wasted_gpu_seconds == 0


def test_unknown_flops_stay_unknown_and_are_not_logged():
    ledger = ComputeLedger(num_gpus=1)
    ledger.add(generated_tokens=5, model_flops=None)
    ledger.add(generated_tokens=5, model_flops=7.0)
    assert ledger.totals.model_flops is None
    assert "scalerl/compute/model_flops" not in ledger.metrics()


def test_state_of_another_version_is_refused():
    with pytest.raises(ValueError, match="keys"):
        Totals.from_dict({"gpu_seconds": 1.0, "petals": 3})


def test_pass_rate_averages_prompts_and_its_error_is_over_prompts():
    measured = measure_pass_rate(["a", "a", "b", "b", "c"], [1, 0, 1, 1, 0])
    assert measured.pass_rate == pytest.approx(0.5) and (measured.num_prompts, measured.num_generations) == (3, 5)
    assert measured.stderr == pytest.approx(0.5 / 3**0.5)  # means .5, 1, 0: standard deviation .5
    with pytest.raises(ValueError, match="one of each"):
        measure_pass_rate(["a"], [])


def make_points(num: int) -> list[ValidationPoint]:
    from scalerl_verl.scaling import sigmoid

    points = [ValidationPoint(Totals(360.0), 0.3, 0.01, 100, 400)]
    for step in range(1, num + 1):
        hours = float(step)
        score = float(sigmoid(hours, 0.7, 1.8, 4.0, 0.3))
        points.append(ValidationPoint(Totals(3600 * hours, 10 * step, 8 * step, 1.0, 10 * step), score, 0.01, 100, 400))
    return points


def test_forecast_appears_when_there_are_enough_points():
    assert describe_forecast(make_points(4), 200, fit_validations(make_points(4))) == {
        "scalerl/forecast/num_points": 4,
        "scalerl/forecast/identified": 0,
    }
    metrics = describe_forecast(make_points(16), 320, fit_validations(make_points(16)))
    assert metrics["scalerl/forecast/identified"] == 1
    assert metrics["scalerl/forecast/A"] == pytest.approx(0.7, abs=2e-3)
    assert metrics["scalerl/forecast/end_gpu_hours"] == pytest.approx(32.0)
    assert metrics["scalerl/forecast/end_score"] == pytest.approx(0.3 + 0.4 / (1 + (4 / 32) ** 1.8), abs=2e-3)
    assert (
        metrics["scalerl/forecast/end_low"]
        <= metrics["scalerl/forecast/end_score"]
        <= metrics["scalerl/forecast/end_high"]
    )
