# SPDX-License-Identifier: Apache-2.0
"""Forced interruption through verl and vLLM on a model that thinks for too long: one run, its validation included."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from scalerl_verl.json_lines import read_records
from tests.e2e.interrupting import (
    BLOCK,
    HIGH,
    LOW,
    PHRASE,
    STEPS,
    TOTAL,
    VAL_BUDGET,
    VAL_PROMPTS,
    VAL_RESPONSES,
)
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(interrupting_run: VerlRun) -> VerlRun:
    return interrupting_run


def texts(run: VerlRun, kind: str, step: int) -> Iterator[tuple[int, str]]:
    """(number in the prompt, response) of a step."""
    for entry in read_records(run.folder / kind / f"{step}.jsonl"):
        yield int(re.findall(r"\d+", entry["input"])[0]), entry["output"]


def is_complete(text: str) -> bool:
    return re.fullmatch(r"<think>[ab]*(Stop\.)?</think>\d", text) is not None


def test_run_ends_well(run: VerlRun) -> None:
    assert run.code == 0, run.tail()
    assert run.leftover_processes == 0


def test_interrupted_responses_answer_and_fewer_are_cut(run: VerlRun) -> None:
    complete = {0: 0, 1: 0}
    for number, text in texts(run, "validation", 0):
        complete[number % 2] += is_complete(text)
        if number % 2 == 0 and PHRASE in text:
            # Validation draws from its own range.
            assert len(text.removeprefix("<think>").split("Stop.")[0]) == VAL_BUDGET - 1
    responses = VAL_PROMPTS // 2 * VAL_RESPONSES
    # verl's loop cuts about one in five, and so none of 64 in a run out of two million.
    assert complete[0] == responses, "an interrupted response was cut"
    assert complete[1] < responses


def test_validation_reports_its_own_lengths(run: VerlRun) -> None:
    """Every second prompt is of verl's loop, which leaves no record: it counts in the truncated fraction only."""
    outputs = list(texts(run, "validation", 0))
    val = {key.removeprefix("scalerl/length/val/"): value for key, value in run.metrics[0].items()}
    ours = [text for number, text in outputs if number % 2 == 0]
    assert val["interrupted_fraction"] == pytest.approx(sum(PHRASE in text for text in ours) / len(ours))
    assert val["interrupted_fraction"] + val["natural_close_fraction"] == pytest.approx(1)
    # One of verl's that ends with its last token looks like one that is cut: <think>, letters, </think>, digit, end.
    at_limit = [len(re.sub("</?think>", "", text)) + 3 >= TOTAL for number, text in outputs if number % 2]
    assert val["truncated_fraction"] == pytest.approx(sum(at_limit) / len(outputs))
    assert val["thinking_tokens_mean"] <= VAL_BUDGET < LOW, "its budget, not that of training"
    assert val["continuation_cached_fraction"] >= 0 and "truncation_alarm_max" not in val
    assert "scalerl/length/val/truncated_fraction" not in run.metrics[1]


def test_training_responses_draw_from_the_range_and_every_one_answers(run: VerlRun) -> None:
    drawn = set()
    for step in range(1, STEPS + 1):
        for _, text in texts(run, "rollouts", step):
            assert text.count("</think>") == 1, text
            if PHRASE in text:
                drawn.add(len(text.removeprefix("<think>").split("Stop.")[0]) + 1)
    assert drawn <= set(range(LOW, HIGH + 1)) and len(drawn) > 3


@pytest.mark.fault("tokens forced into the thinking enter the ratio")
def test_the_trainer_recomputes_the_log_probs_of_all_sampled_tokens(run: VerlRun) -> None:
    """The first batch is on-policy. A token of the phrase in the mask would be off by its log-prob, -5 or less."""
    first = run.metrics[1]
    assert first["scalerl/length/interrupted_fraction"] > 0
    assert first["scalerl/mismatch/log_ratio_abs_max"] < 1e-4


def test_metrics_tell_what_became_of_the_responses(run: VerlRun) -> None:
    for metrics in (run.metrics[step] for step in range(1, STEPS + 1)):
        length = {key.removeprefix("scalerl/length/"): value for key, value in metrics.items() if "/length/" in key}
        assert length["interrupted_fraction"] + length["natural_close_fraction"] == pytest.approx(1)
        assert length["truncated_fraction"] == length["truncated_fraction_prompt_max"] == 0
        assert {"reward_interrupted_mean", "reward_natural_mean", "truncation_alarm_max"} <= set(length)
        assert length["answer_tokens_mean"] == pytest.approx(2)
        num_responses = NUM_PROMPTS * GROUP_SIZE
        injected = length["interrupted_fraction"] * num_responses * 6
        assert length["injected_tokens_sum"] == pytest.approx(injected)
        sampled = (length["thinking_tokens_mean"] + length["answer_tokens_mean"]) * num_responses
        assert metrics["scalerl/data/generated_tokens_sum"] == pytest.approx(sampled)
        assert metrics["response_length/mean"] * num_responses == pytest.approx(sampled + injected)


def test_continuations_find_their_prefix_in_the_cache(run: VerlRun) -> None:
    """All but the phrase and the tokens of the last, unfinished block."""
    prompt, phrase = run.metrics[1]["prompt_length/max"], 6
    shortest = prompt + LOW + phrase
    assert run.metrics[1]["scalerl/length/continuation_cached_fraction"] >= 1 - (BLOCK + phrase) / shortest
