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
from tests.e2e.conftest import RunVerl
from tests.e2e.launching import GROUP_SIZE, VerlRun
from tests.e2e.prompts_ahead import (
    BATCH,
    EASY,
    HARD,
    ROWS,
    SAVED,
    STEPS,
    asynchronous_overrides,
    first_metrics,
    overrides,
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


@pytest.fixture(scope="module")
def first(run_verl: RunVerl, curriculum_data: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    folder = tmp_path_factory.mktemp("curriculum")
    return run_verl("curriculum", *overrides(curriculum_data, folder / "rollouts"), folder=folder)


@pytest.fixture(scope="module")
def resumed(first: VerlRun, run_verl: RunVerl, curriculum_data: Path) -> VerlRun:
    """The same folder, continued from the checkpoint in the middle of the second epoch."""
    folder = set_back(first)
    return run_verl("resumed", *overrides(curriculum_data, folder / "rollouts-resumed"), folder=folder)


def set_back(run: VerlRun) -> Path:
    """Make the run's folder that of one which died after its checkpoint; what it wrote is kept beside."""
    assert run.code == 0, run.tail()
    folder = run.folder
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    (folder / "metrics.jsonl").rename(folder / "metrics.first.jsonl")
    (folder / "first-events.jsonl").write_text((folder / "checkpoints" / "curriculum.jsonl").read_text())
    return folder


def first_events(first: VerlRun) -> list[dict]:
    path = first.folder / "first-events.jsonl"
    return read_lines(path) if path.exists() else events(first)


def test_later_epochs_draw_each_remaining_prompt_once_and_no_mastered_one(first: VerlRun) -> None:
    assert first.code == 0, first.tail()
    steps = drawn(first.folder / "rollouts")
    assert list(steps) == list(range(1, STEPS + 1))
    epochs = [sorted(index for step in part for index in steps[step]) for part in ((1, 2, 3, 4), (5, 6), (7, 8))]
    assert epochs[0] == sorted(list(range(ROWS)) * GROUP_SIZE)
    assert epochs[1] == epochs[2] == sorted([*HARD] * GROUP_SIZE)


def test_metrics_and_file_say_what_was_dropped(first: VerlRun) -> None:
    name = "scalerl/data/curriculum_"
    metrics = first_metrics(first)
    keys = ("epoch_max", "prompts_remaining_min", "dropped_this_epoch_max", "dropped_in_all_max", "visits_sum")
    seen = {step: [values[name + key] for key in keys] for step, values in metrics.items()}
    assert seen[4] == [1, 16, 0, 0, BATCH]
    assert seen[5] == seen[6] == [2, 8, 8, 8, BATCH]
    assert seen[7] == [3, 8, 0, 8, BATCH]
    assert sum(values[name + "mastered_visits_sum"] for values in metrics.values()) == len(EASY)
    dropped = [line for line in first_events(first) if line["event"] == "dropped"]
    assert {row for line in dropped for row in line["rows"]} == EASY
    assert all(line["epoch"] == 2 and line["responses"] == GROUP_SIZE for line in dropped)


def test_resumed_run_draws_what_the_uninterrupted_one_drew(first: VerlRun, resumed: VerlRun) -> None:
    assert resumed.code == 0, resumed.tail()
    expected, again = drawn(first.folder / "rollouts"), drawn(first.folder / "rollouts-resumed")
    assert again == {step: expected[step] for step in range(SAVED + 1, STEPS + 1)}
    keys = [key for key in first_metrics(first)[STEPS] if key.startswith("scalerl/data/curriculum_")]
    assert len(keys) == 6
    for step in range(SAVED + 1, STEPS + 1):
        assert [resumed.metrics[step][key] for key in keys] == [first_metrics(first)[step][key] for key in keys]


def test_file_of_the_resumed_run_lists_every_epoch_once(resumed: VerlRun) -> None:
    assert [line["epoch"] for line in events(resumed) if line["event"] == "epoch"] == [1, 2, 3]


def test_checkpoint_needs_no_class_of_ours(first: VerlRun) -> None:
    path = first.folder / "checkpoints" / f"global_step_{SAVED}" / "data.pt"
    assert b"scalerl_verl" not in path.read_bytes()
    assert torch.load(path, weights_only=False)


@pytest.fixture(scope="module")
def asynchronous(asynchronous_run: VerlRun) -> VerlRun:
    return asynchronous_run


@pytest.fixture(scope="module")
def asynchronous_resumed(asynchronous: VerlRun, run_verl: RunVerl, curriculum_data: Path) -> VerlRun:
    """The same folder, continued from its checkpoint: when it was written, a batch of prompts was unanswered."""
    folder = set_back(asynchronous)
    (folder / "weights-resumed").mkdir()
    lines = asynchronous_overrides(curriculum_data, folder / "rollouts-resumed")
    # verl says at INFO what it asks anew.
    probe = {"PROBE_PROMPTS": "1", "PROBE_DIR": str(folder / "weights-resumed"), "VERL_LOGGING_LEVEL": "INFO"}
    return run_verl("curriculum-async-resumed", *lines, folder=folder, env=probe)


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
    assert asynchronous_resumed.code == 0, asynchronous_resumed.tail()
    assert sorted(asynchronous_resumed.metrics) == list(range(SAVED + 1, STEPS + 1))
    folder = asynchronous.folder
    before = [line for line in read_lines(folder / "weights" / "prompts.jsonl") if line["step"] <= SAVED]
    after = read_lines(folder / "weights-resumed" / "prompts.jsonl")
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
    assert [line["epoch"] for line in listed if line["event"] == "epoch"] in ([1, 2, 3], [1, 2, 3, 4])


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
