# SPDX-License-Identifier: Apache-2.0
"""One synchronous run, interrupted after its checkpoint and resumed; then its generator cannot load weights."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch

from scalerl_verl.json_lines import read_records
from scalerl_verl.scaling.logs.reading import read_run
from scalerl_verl.scaling.logs.selection import choose_curve
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun, check_failed_load, first_metrics
from tests.e2e.synchronous import SAVED, STEPS
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RESUMED = range(SAVED + 1, STEPS + 1)
"""Steps that both attempts took."""
VALIDATED = (2, 4, 6, STEPS)


@pytest.fixture(scope="module")
def first(sync_run: VerlRun) -> VerlRun:
    """Its second batch has equal rewards throughout."""
    return sync_run


@pytest.fixture(scope="module")
def resumed(sync_resumed: VerlRun) -> VerlRun:
    return sync_resumed


def test_run_ends_well_and_leaves_nothing(first: VerlRun) -> None:
    assert first.code == 0, first.tail()
    assert first.leftover_processes == 0


def test_plugin_is_seen_in_every_kind_of_process(first: VerlRun) -> None:
    """By the patches that only such a process imports: driver, trainer loop, trainer worker, vLLM server, engine."""
    telltale = {
        "driver": "verl.startup_check",
        "trainer loop": "verl.trainer.advantages",
        "trainer worker": "verl.engine.token_loss",
        "server": "verl.weight_sync.sender",
    }
    applied = [
        {name for name, patch in process["patches"].items() if patch["status"] == "applied"}
        for process in first.processes
    ]
    for role, patch in telltale.items():
        assert any(patch in names for names in applied), f"no process of kind {role} applied {patch}"
    engines = [process for process in first.processes if "vllm" in process["loaded_by"]]
    assert any(process["patches"]["vllm.cpu.keep_weights"]["status"] == "applied" for process in engines)
    late = {
        name
        for process in first.processes
        for name, patch in process["patches"].items()
        if patch["late"] and "verl.startup_check" not in name
    }
    assert not late, f"patches that came after their module was imported: {late}"


def test_engine_holds_the_trainers_weights_after_every_update(first: VerlRun) -> None:
    # One update when training starts and one after each step.
    assert compare_updates(first.folder / "weights") == STEPS + 1


def test_trainer_and_generator_agree_at_the_first_step(first: VerlRun) -> None:
    """Same FP32 weights on both sides: what is left is summation order, far below 1e-5 in a log-probability."""
    metrics = first_metrics(first)[1]
    assert 0 <= metrics["scalerl/mismatch/log_ratio_abs_max"] < 1e-5
    assert metrics["scalerl/loss/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["scalerl/loss/nonfinite_tokens_sum"] == 0


@pytest.mark.fault("flag of the head read outside of the engine's context, or ignored: no effect, no word")
def test_fp32_head_is_active_on_both_sides_and_compared_before_training(first: VerlRun) -> None:
    """Measured in the processes that compute: the trainer's worker and vLLM's, whose record the server fetched."""
    noted = [entry for process in first.processes for entry in process.get("fp32_head", [])]
    engine = [entry for entry in noted if entry.get("side") == "generator"]
    trainer = [entry for entry in noted if entry not in engine]
    assert len(engine) >= 2 and trainer
    assert {entry["dtype"] for entry in engine} == {"float32"}
    assert all(entry["relative_error"] < 2e-5 for entry in engine)
    assert "[scalerl_verl] FP32 head against float64: trainer off by" in first.log
    metrics = first_metrics(first)
    # Before any update, by one forward more; then in every step, by the loss.
    assert 0 <= metrics[1]["scalerl/mismatch/first_batch_log_ratio_abs_max"] < 1e-4
    assert "scalerl/mismatch/first_batch_log_ratio_abs_max" not in metrics[3]
    assert metrics[3]["scalerl/mismatch/ess_frac"] == pytest.approx(1, abs=1e-4)
    assert metrics[3]["scalerl/mismatch/above_cap_frac"] == 0


def test_step_with_equal_rewards_is_skipped_and_training_goes_on(first: VerlRun) -> None:
    metrics = first_metrics(first)
    assert metrics[2]["scalerl/data/prompts_all_wrong_sum"] == NUM_PROMPTS
    assert metrics[2]["scalerl/data/rows_kept_sum"] == 0
    assert metrics[2]["scalerl/data/skipped_updates_sum"] == 1
    assert "actor/grad_norm" not in metrics[2]
    assert metrics[3]["scalerl/data/skipped_updates_sum"] == 0 and metrics[3]["actor/grad_norm"] > 0
    weights = first.folder / "weights"
    before, after = torch.load(weights / "sent-1.pt"), torch.load(weights / "sent-2.pt")
    assert all(torch.equal(before[name], after[name]) for name in before), "a skipped step moved the weights"
    last = torch.load(weights / "sent-3.pt")
    assert any(not torch.equal(after[name], last[name]) for name in after), "the last step did not train"


def test_counts_of_a_step_add_up(first: VerlRun) -> None:
    for step, metrics in first_metrics(first).items():
        if step == 0:
            continue
        kinds = ("mixed", "all_right", "all_wrong", "single")
        assert sum(metrics[f"scalerl/data/prompts_{kind}_sum"] for kind in kinds) == NUM_PROMPTS
        assert metrics["scalerl/data/rows_kept_sum"] == GROUP_SIZE * metrics["scalerl/data/prompts_mixed_sum"]
        mean_tokens = metrics["response_length/mean"]
        assert metrics["scalerl/data/generated_tokens_sum"] == pytest.approx(mean_tokens * NUM_PROMPTS * GROUP_SIZE)


def test_trackers_receive_the_metrics(first: VerlRun) -> None:
    assert "step:1" in first.log
    assert all(math.isfinite(value) for value in first_metrics(first)[1].values() if isinstance(value, float))
    assert list((first.folder / "tensorboard").glob("events.out.tfevents.*"))
    assert list((first.folder / "wandb").glob("offline-run-*")), "W&B wrote no offline run"


def test_resumed_run_continues_from_the_checkpoint(first: VerlRun, resumed: VerlRun) -> None:
    """With the problems of its next step, too: `test_curriculum`."""
    assert sorted(resumed.metrics) == list(RESUMED), resumed.tail()
    assert all(resumed.metrics[step]["training/global_step"] == step for step in RESUMED)
    saved = torch.load(first.folder / "weights" / f"sent-{SAVED}.pt")
    restored = torch.load(first.folder / "weights-resumed" / "sent-0.pt")
    assert all(torch.equal(saved[name], restored[name]) for name in saved), "the checkpoint restored other weights"


def test_failed_weight_load_ends_a_synchronous_run_with_the_cause(resumed: VerlRun) -> None:
    check_failed_load(resumed, resumed.folder / "weights-resumed")


def _compute(metrics: dict[str, float], name: str) -> float:
    return metrics[f"scalerl/compute/{name}"]


def test_ledger_counts_every_step(first: VerlRun) -> None:
    metrics = first_metrics(first)
    tokens = 0
    for step in range(STEPS + 1):
        assert _compute(metrics[step], "steps") == step
        tokens += metrics[step].get("scalerl/data/generated_tokens_sum", 0)
        assert _compute(metrics[step], "generated_tokens") == tokens > (-1 if step == 0 else 0)
        assert _compute(metrics[step], "wasted_gpu_hours") == _compute(metrics[step], "wasted_tokens") == 0
    for name in ("gpu_hours", "model_flops"):
        values = [_compute(metrics[step], name) for step in range(STEPS + 1)]
        assert all(later > earlier for earlier, later in pairwise(values)), f"{name} does not rise: {values}"
    assert 3600 * _compute(metrics[STEPS], "gpu_hours") < first.seconds, "one device: no more than the wall time"
    trained = [_compute(metrics[step], "trained_tokens") for step in range(STEPS + 1)]
    # The second batch has equal rewards throughout: generated, not trained on.
    assert 0 == trained[0] < trained[1] == trained[2] < trained[3] <= _compute(metrics[3], "generated_tokens")
    assert trained[3] < trained[STEPS] <= tokens


def test_validation_is_a_point_with_its_standard_error(first: VerlRun) -> None:
    metrics = first_metrics(first)
    for step in (0, *VALIDATED):
        rate, stderr = (metrics[step][f"scalerl/validation/{name}"] for name in ("pass_rate", "stderr"))
        generations = metrics[step]["scalerl/validation/num_generations"]
        assert metrics[step]["scalerl/validation/num_prompts"] == 4 and generations % 4 == 0
        mean = next(value for name, value in metrics[step].items() if name.startswith("val-core/") and "/mean@" in name)
        assert rate == pytest.approx(mean) and 0 <= rate <= 1 and 0 <= stderr <= 0.5
        assert metrics[step]["scalerl/forecast/identified"] == 0
    assert "scalerl/validation/pass_rate" not in metrics[1]
    # The marks of the prompts came back with the responses, from real queues.
    assert "takes each row of the validation data for a prompt of its own" not in first.log


def test_resumed_ledger_counts_nothing_twice_and_loses_nothing(first: VerlRun, resumed: VerlRun) -> None:
    before, after = first_metrics(first), resumed.metrics[STEPS]
    own = sum(metrics["scalerl/data/generated_tokens_sum"] for metrics in resumed.metrics.values())
    assert _compute(after, "generated_tokens") == _compute(before[SAVED], "generated_tokens") + own
    assert _compute(after, "gpu_hours") > _compute(before[SAVED], "gpu_hours")
    assert _compute(after, "trained_tokens") > _compute(before[SAVED], "trained_tokens")
    # What the first attempt did after its checkpoint was spent on weights that are gone.
    lost = sum(before[step]["scalerl/data/generated_tokens_sum"] for step in RESUMED)
    assert _compute(after, "wasted_tokens") == lost
    assert 0 < 3600 * _compute(after, "wasted_gpu_hours") < first.seconds
    states = read_records(first.folder / "checkpoints" / "scalerl_compute.jsonl")
    assert [state["totals"]["steps"] for state in states] == [*range(1, STEPS + 1), *RESUMED]
    spent = [state["totals"]["gpu_seconds"] + state["wasted_gpu_seconds"] for state in states]
    assert all(later > earlier for earlier, later in pairwise(spent))
    # The resumed run ends in the step after its last validation.
    assert [point["totals"]["steps"] for point in states[STEPS - 1]["points"]] == [0, *VALIDATED]
    assert [point["totals"]["steps"] for point in states[-1]["points"]] == [0, *VALIDATED[:-1]]


def test_log_of_steps_has_each_step_of_both_attempts_once(first: VerlRun, resumed: VerlRun) -> None:
    """Fault of the field: verl logs a step after its checkpoint, and begins its log anew when it is resumed."""
    folder, before = first.folder / "checkpoints", first_metrics(first)
    rows = {row["step"]: row["data"] for row in read_records(folder / "scalerl_steps.jsonl")}
    assert list(rows) == list(range(STEPS + 1))
    logged = {**{step: before[step] for step in range(SAVED + 1)}, **resumed.metrics}
    assert all(
        rows[step][name] == pytest.approx(logged[step][name], nan_ok=True) for step in rows for name in rows[step]
    )
    assert all(set(logged[step]) <= set(rows[step]) for step in rows)
    kept = json.loads((folder / f"global_step_{SAVED}" / "scalerl_step.json").read_text())
    assert kept["step"] == SAVED and "scalerl/data/prompts_all_wrong_sum" in kept["data"]
    assert kept["data"]["scalerl/compute/generated_tokens"] == _compute(before[SAVED], "generated_tokens")
    assert [row["step"] for row in read_records(folder / "scalerl_steps.jsonl.superseded")] == list(RESUMED)


def test_window_of_the_truncation_alarm_survives_the_resumption(first: VerlRun, resumed: VerlRun) -> None:
    """The window of ten that the checkpoint holds (batches that a toggle replayed count, too), and one batch more."""
    folder = first.folder / "checkpoints" / f"global_step_{SAVED}"
    state = json.loads((folder / "scalerl_truncation.json").read_text())
    assert len(state["batches"]) >= 2
    size, last = NUM_PROMPTS * GROUP_SIZE, resumed.metrics[SAVED + 1]
    assert all(batch[1] == size for batch in state["batches"])
    cut = [*(batch[0] for batch in state["batches"]), last["scalerl/length/truncated_fraction"] * size][-10:]
    assert last["scalerl/length/truncated_window_fraction"] == pytest.approx(sum(cut) / (len(cut) * size))


def test_logs_of_every_tracker_hold_the_same_curve(first: VerlRun, resumed: VerlRun) -> None:
    """The JSONL, TensorBoard and W&B files of the first attempt, and both attempts joined."""
    folder = first.folder
    expected = first_metrics(first)
    for source in (
        folder / "metrics.first.jsonl",
        folder / "tensorboard",
        next((folder / "wandb").glob("offline-run-*")),
    ):
        run = read_run([source])
        curve = choose_curve(run, x="tokens")
        assert curve.steps == VALIDATED, source
        assert curve.start == pytest.approx(expected[0]["scalerl/validation/pass_rate"], abs=1e-6)
        for place, step in enumerate(curve.steps):
            assert curve.compute[place] == pytest.approx(_compute(expected[step], "generated_tokens"), rel=1e-6)
            assert curve.score[place] == pytest.approx(expected[step]["scalerl/validation/pass_rate"], abs=1e-6)
    joined = choose_curve(read_run([folder / "metrics.jsonl", folder / "metrics.first.jsonl"]), x="gpu_hours")
    # Of a step of both attempts the later one counts.
    assert joined.steps == VALIDATED[:-1]
    assert joined.compute[-1] == resumed.metrics[VALIDATED[-2]]["scalerl/compute/gpu_hours"]
