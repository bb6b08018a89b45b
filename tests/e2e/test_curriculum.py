# SPDX-License-Identifier: Apache-2.0
"""No-positive-resampling through verl: three epochs, interrupted in the second one and resumed; asynchronous, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from scalerl_verl.json_lines import read_records
from scalerl_verl.scaling.logs.reading import read_run
from scalerl_verl.scaling.logs.selection import choose_curve
from tests.e2e import synchronous
from tests.e2e.conftest import RunVerl
from tests.e2e.launching import (
    GROUP_SIZE,
    NUM_PROMPTS,
    PATIENT,
    VerlRun,
    check_failed_load,
    first_metrics,
    set_back,
)
from tests.e2e.prompts_ahead import (
    BATCH,
    EASY,
    ROWS,
    SAVED,
    STEPS,
    asynchronous_overrides,
    read_lines,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def drawn(rollouts: Path) -> dict[int, list[int]]:
    """Step -> problem of each response that trained."""
    found = {}
    for path in rollouts.glob("*.jsonl"):
        inputs = [record["input"] for record in read_records(path)]
        found[int(path.stem)] = sorted(int(re.findall(r"\d+", text.replace(" ", ""))[0]) for text in inputs)
    return dict(sorted(found.items()))


def events(run: VerlRun) -> list[dict]:
    return read_lines(run.folder / "checkpoints" / "curriculum.jsonl")


def first_events(first: VerlRun) -> list[dict]:
    path = first.folder / "first-events.jsonl"
    return read_lines(path) if path.exists() else events(first)


def test_later_epochs_draw_each_remaining_prompt_once_and_no_mastered_one(sync_run: VerlRun) -> None:
    assert sync_run.code == 0, sync_run.tail()
    steps = drawn(sync_run.folder / "rollouts")
    assert list(steps) == list(range(1, synchronous.STEPS + 1))
    epochs = [sorted(index for step in part for index in steps[step]) for part in ((1, 2, 3), (4, 5), (6, 7))]
    assert epochs[0] == sorted(list(range(synchronous.ROWS)) * GROUP_SIZE)
    assert epochs[1] == epochs[2] == sorted([*synchronous.HARD] * GROUP_SIZE)


def test_metrics_and_file_say_what_was_dropped(sync_run: VerlRun) -> None:
    name = "scalerl/data/curriculum_"
    metrics = {step: values for step, values in first_metrics(sync_run).items() if step > 0}
    keys = ("epoch_max", "prompts_remaining_min", "dropped_this_epoch_max", "dropped_in_all_max", "visits_sum")
    seen = {step: [values[name + key] for key in keys] for step, values in metrics.items()}
    assert seen[3] == [1, 24, 0, 0, NUM_PROMPTS]
    assert seen[4] == seen[5] == [2, 16, 8, 8, NUM_PROMPTS]
    assert seen[6] == [3, 16, 0, 8, NUM_PROMPTS]
    assert "on few problems: a pass over 24 problems takes 3 optimizer steps" in sync_run.log
    assert sum(values[name + "mastered_visits_sum"] for values in metrics.values()) == len(synchronous.EASY)
    dropped = [line for line in first_events(sync_run) if line["event"] == "dropped"]
    assert {row for line in dropped for row in line["rows"]} == synchronous.EASY
    assert all(line["epoch"] == 2 and line["responses"] == GROUP_SIZE for line in dropped)


def test_resumed_run_draws_what_the_uninterrupted_one_drew(sync_run: VerlRun, sync_resumed: VerlRun) -> None:
    steps = range(synchronous.SAVED + 1, synchronous.STEPS + 1)
    assert sorted(sync_resumed.metrics) == list(steps), sync_resumed.tail()
    before, again = drawn(sync_run.folder / "rollouts"), drawn(sync_run.folder / "rollouts-resumed")
    assert again == {step: before[step] for step in steps}
    first = first_metrics(sync_run)
    keys = [key for key in first[synchronous.STEPS] if key.startswith("scalerl/data/curriculum_")]
    assert len(keys) == 6
    for step in steps:
        assert [sync_resumed.metrics[step][key] for key in keys] == [first[step][key] for key in keys]


def test_file_of_the_resumed_run_lists_every_epoch_once(sync_resumed: VerlRun) -> None:
    """The fourth began with the step whose weights could not be loaded."""
    assert [line["epoch"] for line in events(sync_resumed) if line["event"] == "epoch"] == [1, 2, 3, 4]


def test_checkpoint_needs_no_class_of_ours(sync_run: VerlRun) -> None:
    path = sync_run.folder / "checkpoints" / f"global_step_{synchronous.SAVED}" / "data.pt"
    assert b"scalerl_verl" not in path.read_bytes()
    assert torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def asynchronous(asynchronous_run: VerlRun) -> VerlRun:
    return asynchronous_run


@pytest.fixture(scope="module")
def asynchronous_resumed(asynchronous: VerlRun, run_verl: RunVerl, curriculum_data: Path) -> VerlRun:
    """The same folder, continued from its checkpoint: when it was written, a batch of prompts was unanswered.

    The generator cannot load the weights of one step more.
    """
    assert asynchronous.code == 0, asynchronous.tail()
    folder = set_back(asynchronous, SAVED)
    (folder / "weights-resumed").mkdir()
    lines = asynchronous_overrides(curriculum_data, folder / "rollouts-resumed", steps=STEPS + 1)
    # verl says at INFO what it asks anew.
    probe = {"PROBE_PROMPTS": "1", "PROBE_DIR": str(folder / "weights-resumed"), "VERL_LOGGING_LEVEL": "INFO"}
    fault = {"PROBE_FAIL_LOAD": str(1 + STEPS - SAVED), **PATIENT}
    return run_verl("curriculum-async-resumed", *lines, folder=folder, env=probe | fault)


def test_prompts_fetched_ahead_of_their_results_are_dropped_an_epoch_later_at_most(asynchronous: VerlRun) -> None:
    assert asynchronous.code == 0, asynchronous.tail()
    steps = drawn(asynchronous.folder / "rollouts")
    visits = {index: sum(rows.count(index) for rows in steps.values()) / GROUP_SIZE for index in range(ROWS)}
    assert all(visits[index] >= 1 for index in range(ROWS))
    # What was on its way when the second epoch began was drawn once more.
    assert all(visits[index] <= 2 for index in EASY)
    last = first_metrics(asynchronous)[STEPS]
    dropped = last["scalerl/data/curriculum_dropped_in_all_max"]
    assert 4 <= dropped <= len(EASY)
    assert last["scalerl/data/curriculum_prompts_remaining_min"] <= ROWS - 4
    assert last["scalerl/data/curriculum_visits_sum"] == BATCH
    listed = {row for line in first_events(asynchronous) if line["event"] == "dropped" for row in line["rows"]}
    assert listed <= EASY and len(listed) == dropped


def test_asynchronous_run_loses_and_doubles_no_prompt_when_it_is_resumed(
    asynchronous: VerlRun, asynchronous_resumed: VerlRun
) -> None:
    """Fault of the field: after a checkpoint, prompts were skipped or repeated, those still being answered above all.

    The truth is what led to the last weights: the first run up to the checkpoint, then the resumed one.
    """
    assert sorted(asynchronous_resumed.metrics) == list(range(SAVED + 1, STEPS + 1)), asynchronous_resumed.tail()
    folder = asynchronous.folder
    before = [line for line in read_lines(folder / "weights" / "prompts.jsonl") if line["step"] <= SAVED]
    after = [line for line in read_lines(folder / "weights-resumed" / "prompts.jsonl") if line["step"] <= STEPS]
    handed, trained = (
        [line["uid"] for line in before + after if line["event"] == event] for event in ("handed out", "trained")
    )
    assert len(set(handed)) == len(handed) and len(set(trained)) == len(trained), "a prompt came twice"
    assert len(trained) == STEPS * BATCH and set(trained) <= set(handed)
    # One batch ahead, as at the start: the resumed run does not fetch another one on top of it.
    assert len(handed) - len(trained) == BATCH
    in_flight = {line["uid"] for line in before if line["event"] == "handed out"} - set(trained[: SAVED * BATCH])
    assert len(in_flight) == BATCH
    assert in_flight <= {line["uid"] for line in after if line["event"] == "trained"}
    assert f"Re-issued {BATCH} in-flight prompts" in asynchronous_resumed.log


def test_every_epoch_of_a_resumed_asynchronous_run_is_complete(
    asynchronous: VerlRun, asynchronous_resumed: VerlRun
) -> None:
    folder = asynchronous.folder
    lines = read_lines(folder / "weights" / "prompts.jsonl")
    lines = [line for line in lines if line["step"] <= SAVED] + read_lines(folder / "weights-resumed" / "prompts.jsonl")
    rows = [line["row"] for line in lines if line["event"] == "handed out"]
    listed = events(asynchronous_resumed)
    gone: set[int] = set()
    for epoch in [line for line in listed if line["event"] == "epoch"]:
        dropped = [line for line in listed if line["event"] == "dropped" and line["epoch"] == epoch["epoch"]]
        gone |= {row for line in dropped for row in line["rows"]}
        mine, rows = rows[: epoch["num_remaining"]], rows[epoch["num_remaining"] :]
        assert len(set(mine)) == len(mine) and not gone & set(mine)
        # The last epoch was not finished.
        assert set(mine) == set(range(ROWS)) - gone if rows else set(mine) <= set(range(ROWS)) - gone
    assert not rows, "prompts beyond the last epoch of the file"
    epochs = [line["epoch"] for line in listed if line["event"] == "epoch"]
    assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) >= 3


def test_ledger_of_a_resumed_asynchronous_run_joins_its_attempts(
    asynchronous: VerlRun, asynchronous_resumed: VerlRun
) -> None:
    """Nothing is counted twice or lost: what the first attempt spent after the checkpoint is wasted, the rest stays."""
    before, after = first_metrics(asynchronous), asynchronous_resumed.metrics
    name = "scalerl/compute/"
    tokens = before[SAVED][f"{name}generated_tokens"]
    for step in range(SAVED + 1, STEPS + 1):
        tokens += after[step]["scalerl/data/generated_tokens_sum"]
        assert after[step][f"{name}generated_tokens"] == tokens and after[step][f"{name}steps"] == step
    lost = before[STEPS][f"{name}generated_tokens"] - before[SAVED][f"{name}generated_tokens"]
    assert after[STEPS][f"{name}wasted_tokens"] == lost > 0
    hours = [metrics[f"{name}gpu_hours"] for metrics in (before[SAVED], *after.values())]
    assert hours == sorted(hours)
    assert 0 < 3600 * after[STEPS][f"{name}wasted_gpu_hours"] < asynchronous.seconds
    states = read_lines(asynchronous.folder / "checkpoints" / "scalerl_compute.jsonl")
    spent = [state["totals"]["gpu_seconds"] + state["wasted_gpu_seconds"] for state in states]
    assert len(states) == STEPS + (STEPS - SAVED) and spent == sorted(spent)
    # The logs of both attempts, in one folder, are one run.
    joined = read_run([asynchronous.folder])
    curve = choose_curve(joined, x="tokens", y="critic/score/mean")
    assert list(curve.steps) == list(range(1, STEPS + 1))
    merged = [before[step] if step <= SAVED else after[step] for step in curve.steps]
    assert list(curve.compute) == [metrics[f"{name}generated_tokens"] for metrics in merged]


def test_failed_weight_load_ends_a_disaggregated_run_with_the_cause(asynchronous_resumed: VerlRun) -> None:
    check_failed_load(asynchronous_resumed, asynchronous_resumed.folder / "weights-resumed")
