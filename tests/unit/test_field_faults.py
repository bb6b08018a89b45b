# SPDX-License-Identifier: Apache-2.0
"""Faults of the field in policy losses, weighting and filtering: each has a test that fails if the fault returns.

The table is the index from a fault, as public trackers report it, to its tests; what it names must exist.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHECKS = "unit/plugins/test_config_checks.py"

# Fault -> tests, as file::function or file::key of the table of refused configurations.
FAULTS: dict[str, tuple[str, ...]] = {
    "old log-probs recomputed before the update: the ratio is 1 and truncation never acts": (
        f"{CHECKS}::recomputed log-probs",
    ),
    "a positive lower clip off-policy lets drift run away": (
        "unit/losses/test_cispo.py::test_cap_is_absolute_and_there_is_no_lower_clip_off_policy",
    ),
    "another temperature in scoring than in sampling": (
        f"{CHECKS}::raw log-probs at another temperature",
        f"{CHECKS}::raw log-probs through the engine's own arguments",
    ),
    "top-p or top-k: the renormaliser leaks into the ratio": (
        f"{CHECKS}::nucleus sampling",
        f"{CHECKS}::top-k sampling",
    ),
    "log-probs of -inf, overflowing ratios, anything at masked positions: a NaN loss": (
        "unit/losses/test_cispo.py::test_nonfinite_logprobs_never_reach_the_loss",
        "unit/losses/test_cispo.py::test_impossible_token_or_overflowing_ratio_is_capped",
        "unit/losses/test_cispo.py::test_masked_positions_never_contribute_whatever_they_hold",
        "unit/losses/test_cispo.py::test_loss_and_gradient_are_finite_for_any_logprobs",
    ),
    "bypass mode replaces the configured loss": (
        "upstream/test_bypass_mode.py::test_bypass_mode_that_would_replace_our_loss_is_refused",
        f"{CHECKS}::another entry point of verl",
        f"{CHECKS}::old trainer",
    ),
    "other micro-batches, ranks or token budgets: another loss, or a gradient scaled by the ranks": (
        "unit/plugins/test_engine_gradients.py::"
        "test_micro_batches_ranks_token_budgets_row_order_and_padding_leave_the_gradient_alone",
        "unit/plugins/test_training_step.py::test_gradient_of_any_split_is_that_of_the_paper_s_objective",
        "unit/losses/test_aggregation.py::test_loss_and_gradient_are_equal_for_every_split_order_and_padding",
    ),
    "denominators that count masked, truncated or filtered sequences": (
        "unit/advantages/test_weights.py::test_denominators_do_not_count_masked_truncated_or_filtered_sequences",
        "unit/plugins/test_reward_shaping.py::test_response_left_out_enters_neither_mean_nor_denominator",
    ),
    "group of one, std of 0, float noise of equal rewards: huge or NaN advantages": (
        "unit/advantages/test_estimator.py::test_float_noise_group_of_one_and_zero_std_give_exact_zeros",
        "unit/advantages/test_zero_variance.py::test_float_noise_of_equal_rewards_counts_as_zero_variance",
        f"{CHECKS}::group of one",
    ),
    "batch not divisible by the group, partial groups: tail advantages far too large": (
        "unit/advantages/test_estimator.py::test_incomplete_tail_groups_get_advantages_of_the_usual_size",
    ),
    "padding rows enter mean and std": (
        "unit/advantages/test_estimator.py::test_padding_rows_enter_neither_mean_nor_std",
    ),
    "every group filtered: the run aborts or divides by 0": (
        "unit/advantages/test_estimator.py::test_every_group_filtered_neither_aborts_nor_divides_by_zero",
        "unit/advantages/test_weights.py::test_every_group_filtered_gives_zeros_not_infinities",
        "unit/losses/test_aggregation.py::test_every_group_filtered_leaves_a_zero_loss",
        "unit/plugins/test_training_step.py::test_update_is_skipped_when_nothing_trains",
    ),
    "a response mask of False only: metrics crash": (
        "unit/losses/test_cispo.py::test_all_false_mask_gives_neutral_metrics_and_zero_loss",
        "unit/losses/test_aggregation.py::test_all_false_mask_gives_zero_not_nan",
    ),
}


def names_in(path: Path) -> set[str]:
    """Test functions of a file, and the text keys of its tables."""
    tree = ast.parse(path.read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}
    return functions | keys


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_has_its_tests(fault: str) -> None:
    for test in FAULTS[fault]:
        file, name = test.split("::")
        assert name in names_in(TESTS / file), f"{test} is gone: name here what guards against this fault now"
