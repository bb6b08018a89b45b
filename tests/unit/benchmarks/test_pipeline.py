# SPDX-License-Identifier: Apache-2.0
"""Lines and files of the pipeline benchmark's runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import verl.experimental.fully_async_policy
from hydra import compose, initialize_config_dir

from benchmarks import launching
from benchmarks.pipeline.assets import SIZES
from benchmarks.pipeline.measure import measured_steps
from benchmarks.pipeline.runs import FULLY_ASYNC, Plan, overrides


def test_fully_async_policy_is_as_far_ahead_as_k_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, plan = SIZES["cpu"], Plan(FULLY_ASYNC, (), 1, 4, (6, 6), 300)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    folder = Path(verl.experimental.fully_async_policy.__file__).parent / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("fully_async_ppo_trainer", overrides(plan, size, tmp_path, tmp_path))
    asynchronous, batch = config.async_training, config.actor_rollout_ref.actor.ppo_mini_batch_size
    under_way = batch * asynchronous.require_batches * (asynchronous.staleness_threshold + 1)
    assert under_way == size.prompts * (plan.k + 1) == asynchronous.concurrent_samples_per_replica
    assert config.rollout.total_rollout_steps == sum(plan.steps) * size.prompts
    assert config.actor_rollout_ref.rollout.n == config.rollout.n == size.group


def test_steps_are_the_lines_that_steps_wrote(tmp_path: Path) -> None:
    wrote = {"training/global_step": 1.0}
    lines = [{"step": 1, "data": {"other": 1.0}}, {"step": 2, "data": {"other": 2.0}}, {"step": 2, "data": wrote}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = [{"step": step, "t": float(step)} for step in range(3)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    assert launching.read_steps(tmp_path) == [launching.Step(2, 1.0, 2.0, wrote)]


def test_steps_in_which_the_kinds_of_prompts_could_mix_are_left_out() -> None:
    steps = [launching.Step(number, 0.0, 1.0, {}) for number in range(1, 31)]
    first, second = measured_steps(steps, Plan("pipeline_rl keep", (), 1, 2, (15, 15), 300), SIZES["cpu"])
    assert [step.number for step in first] == list(range(4, 14))
    assert [step.number for step in second] == list(range(20, 29))


def test_late_responses_of_the_first_kind_end_before_the_second_is_measured() -> None:
    size = SIZES["cpu"]
    kinds = [size.regimes[0].prompt_tokens] * 15 + [size.regimes[1].prompt_tokens] * 15
    kinds[22] = 28
    steps = [launching.Step(n + 1, 0.0, 1.0, {"prompt_length/mean": float(tokens)}) for n, tokens in enumerate(kinds)]
    _, second = measured_steps(steps, Plan(FULLY_ASYNC, (), 1, 2, (15, 15), 300), size)
    assert [step.number for step in second] == list(range(24, 29))
