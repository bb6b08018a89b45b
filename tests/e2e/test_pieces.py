# SPDX-License-Identifier: Apache-2.0
"""Each piece of the recipe, toggled on one real batch, changes the metrics and the gradient it should, and no other.

The synchronous run trains its first batch and then, from the weights that left, once more under each of `TOGGLES`: the
same trainer, workers and queue, log-probs recorded one update ago. What the batch earns is known (`FIRST_KINDS`): six
groups with a signal, three of which have a variance of 3/4 and three of 1, one all right, one all wrong.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from scalerl_verl.loss.mismatch import NEUTRAL_MISMATCH
from scalerl_verl.loss.ratio_watch import ESS_ALARM
from tests.e2e.launching import GROUP_SIZE, NUM_PROMPTS, VerlRun, first_metrics
from tests.e2e.toggles import BASELINES, TOGGLES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

OBJECTIVE = {"actor/pg_loss", "actor/loss"}
STEP = OBJECTIVE | {"actor/grad_norm"}
CAPPED = {"scalerl/loss/capped_frac_pos", "scalerl/loss/capped_frac_neg"}
RANGE = {"scalerl/loss/out_of_range_frac", "scalerl/loss/out_of_range_tokens_sum"}
WEIGHTS = {"scalerl/loss/ess_frac"}
ESTIMATOR = {
    "scalerl/advantage/std",
    "scalerl/data/rows_kept_sum",
    *(f"scalerl/data/prompts_{kind}sum" for kind in ("", "mixed_", "all_right_", "all_wrong_", "single_")),
}
OUR_LOSS = "scalerl/loss/"
# With an FP32 head any loss reports the mismatch; these two of its metrics know the cap.
MISMATCH_AT_CAP = {"scalerl/mismatch/ess_frac", "scalerl/mismatch/above_cap_frac"}
CURRICULUM = "scalerl/data/curriculum_"
# The alarm looks back over the batches before, to which each replay adds one.
LOOK_BACK = {"scalerl/length/truncation_alarm_max", "scalerl/length/truncated_window_fraction"}
STD = math.sqrt((3 * 0.75 + 3 * 1.0) / 6)
# A gradient in FP32 whose sums run in another order.
FP32_TOLERANCE = 1e-5

# Toggle -> (metrics that change, metrics that may).
CHANGES: dict[str, tuple[set[str], set[str]]] = {
    "nothing": (set(), set()),
    "advantages only centred": (STEP, set()),
    "advantages by group": (STEP, set()),
    "zero variance kept": (STEP | {"scalerl/advantage/std", "scalerl/data/rows_kept_sum"}, set()),
    "verl's estimator": (STEP | ESTIMATOR, set()),
    "token average": (STEP, set()),
    "sample average": (STEP, set()),
    # Above 1 a batch may have no token of negative advantage: its update has just pushed those down.
    "cap of 1": (STEP | {"scalerl/loss/capped_frac_pos"} | WEIGHTS | MISMATCH_AT_CAP, CAPPED | {ESS_ALARM}),
    "no cap": (set(), STEP | CAPPED | WEIGHTS | MISMATCH_AT_CAP | {ESS_ALARM}),
    "range of ratios": (STEP | RANGE | WEIGHTS, CAPPED),
    "ratio of the response": (STEP | WEIGHTS, CAPPED),
}

Replays = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def replays(sync_run: VerlRun) -> Replays:
    """Toggle -> metrics; the last one is the run's own config."""
    assert sync_run.code == 0, sync_run.tail()
    found = json.loads((sync_run.folder / "weights" / "replay.json").read_text())
    assert list(found) == [*TOGGLES, *BASELINES, "the run's own"]
    return {
        name: {key: value for key, value in metrics.items() if "perf/" not in key and key not in LOOK_BACK}
        for name, metrics in found.items()
    }


def gradient(run: VerlRun, name: str) -> torch.Tensor:
    """Flat gradient of a replay before clipping, float64."""
    parts = torch.load(run.folder / "weights" / f"gradient of {name}.pt")
    return torch.cat([parts[key].flatten().double() for key in sorted(parts)])


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def changed(one: dict[str, float], other: dict[str, float]) -> set[str]:
    """Names that only one has, or whose values differ by more than rounding."""
    both = one.keys() & other.keys()
    unequal = {name for name in both if not math.isclose(one[name], other[name], rel_tol=1e-6, abs_tol=1e-9)}
    return (one.keys() ^ other.keys()) | unequal


def test_batch_is_what_was_promised(replays: Replays) -> None:
    own = replays["the run's own"]
    kinds = [own[f"scalerl/data/prompts_{kind}_sum"] for kind in ("mixed", "all_right", "all_wrong", "single")]
    assert kinds == [6, 1, 1, 0]
    assert own["scalerl/data/rows_kept_sum"] == 6 * GROUP_SIZE
    assert own["scalerl/advantage/std"] == pytest.approx(STD, rel=1e-12)
    # Off-policy by one update, far enough for a cap of 1 and a range of [1/2, 2] to act.
    assert own["scalerl/loss/ratio_min"] < 0.5 and own["scalerl/loss/ratio_max"] > 2


@pytest.mark.parametrize("toggle", CHANGES)
def test_toggle_changes_its_metrics_and_no_other(replays: Replays, toggle: str) -> None:
    must, may = CHANGES[toggle]
    found = changed(replays["the run's own"], replays[toggle])
    assert must <= found <= must | may, (sorted(must - found), sorted(found - must - may))


@pytest.mark.parametrize("toggle", ["verl's cispo", "verl's PPO, no clip"])
def test_loss_of_verl_reports_in_place_of_ours_and_leaves_the_batch_alone(replays: Replays, toggle: str) -> None:
    own, other = replays["no cap" if toggle == "verl's PPO, no clip" else "the run's own"], replays[toggle]
    found = changed(own, other)
    gone = {name for name in own if name.startswith(OUR_LOSS)}
    assert len(gone) == 9 and gone <= found
    new = other.keys() - own.keys()
    assert new and all(name.startswith("actor/") for name in new)
    assert {name for name in other if name.startswith("scalerl/mismatch/")} == NEUTRAL_MISMATCH.keys() | {ESS_ALARM}
    # CISPO's loss has the same value, too; PPO's is -rho A in place of -rho A log pi, and knows of no cap but ours.
    may = OBJECTIVE | MISMATCH_AT_CAP | {ESS_ALARM} if toggle == "verl's PPO, no clip" else set()
    assert OBJECTIVE & may <= found - gone - new <= may


def test_curriculum_is_seen_in_its_own_metrics_only(sync_run: VerlRun, replays: Replays) -> None:
    found = changed(replays["the run's own"], replays["no curriculum"])
    assert len(found) == 6 and all(name.startswith(CURRICULUM) for name in found)
    assert torch.equal(gradient(sync_run, "no curriculum"), gradient(sync_run, "the run's own"))


def test_replay_repeats_itself_to_the_last_bit(sync_run: VerlRun) -> None:
    """Or no difference below would mean anything."""
    assert torch.equal(gradient(sync_run, "nothing"), gradient(sync_run, "the run's own"))


@pytest.mark.parametrize(
    ("toggle", "like", "factor"),
    [
        ("advantages only centred", "the run's own", STD),
        # Eight groups in place of six divide the sum; the batch's variance is that of 8 groups, two of them with none.
        ("zero variance kept", "the run's own", 6 / 8 / math.sqrt(6 / 8)),
        # verl keeps all eight groups and divides by the unbiased standard deviation of the group (plus 1e-6).
        ("verl's estimator", "advantages by group", 6 / 8 * math.sqrt((GROUP_SIZE - 1) / GROUP_SIZE)),
        ("verl's cispo", "the run's own", 1.0),
        # The derivative of a ratio is the ratio: without a clip PPO is importance sampling without a cap.
        ("verl's PPO, no clip", "no cap", 1.0),
    ],
)
def test_gradient_is_scaled_by_what_the_batch_says(sync_run: VerlRun, toggle: str, like: str, factor: float) -> None:
    assert distance(gradient(sync_run, toggle), gradient(sync_run, like) * factor) < FP32_TOLERANCE


@pytest.mark.parametrize(
    "toggle",
    [
        "advantages by group",
        "token average",
        "sample average",
        "cap of 1",
        "range of ratios",
        "ratio of the response",
    ],
)
def test_gradient_takes_another_direction(sync_run: VerlRun, toggle: str) -> None:
    own, other = gradient(sync_run, "the run's own"), gradient(sync_run, toggle)
    assert distance(other / other.norm(), own / own.norm()) > 100 * FP32_TOLERANCE


@pytest.mark.parametrize("preset", BASELINES)
def test_baseline_trains_on_the_same_batch_by_its_own_objective(
    sync_run: VerlRun, replays: Replays, preset: str
) -> None:
    metrics = replays[preset]
    assert metrics["actor/grad_norm"] > 0 and all(math.isfinite(value) for value in metrics.values())
    assert not [name for name in metrics if name.startswith((OUR_LOSS, CURRICULUM)) or name in ESTIMATOR]
    own, mine = gradient(sync_run, "the run's own"), gradient(sync_run, preset)
    assert distance(mine / mine.norm(), own / own.norm()) > 100 * FP32_TOLERANCE


def test_no_two_baselines_train_alike(sync_run: VerlRun) -> None:
    """No preset may turn out to be another one under a new name."""
    gradients = {preset: gradient(sync_run, preset) for preset in BASELINES}
    for number, one in enumerate(BASELINES):
        for other in BASELINES[number + 1 :]:
            assert distance(gradients[one], gradients[other]) > 100 * FP32_TOLERANCE, (one, other)


def test_run_itself_goes_on_as_if_nothing_had_been_replayed(sync_run: VerlRun) -> None:
    """The curriculum counted each visit once, and the weights handed out next are those of the real update."""
    weights = sync_run.folder / "weights"
    saved = torch.load(weights / "replay" / "model_world_size_1_rank_0.pt", weights_only=False)
    sent = torch.load(weights / "sent-1.pt")
    assert all(
        torch.equal(sent[name], value.full_tensor() if hasattr(value, "full_tensor") else value)
        for name, value in saved.items()
        if name in sent
    )
    steps = [metrics for step, metrics in first_metrics(sync_run).items() if step > 0]
    assert {metrics[f"{CURRICULUM}visits_sum"] for metrics in steps} == {NUM_PROMPTS}
