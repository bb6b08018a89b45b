# SPDX-License-Identifier: Apache-2.0
"""Faults of the field in losses, weighting, filtering, the head, pipelines and thinking budgets, each with its tests.

The table is the index from a fault, as public trackers report it, to its tests; what it names must exist.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHECKS = "unit/plugins/test_config_checks.py"
RATIO = "unit/plugins/test_ratio_checks.py"
ADVANTAGE = "unit/plugins/test_advantage_checks.py"
PIPELINE_CHECKS = "unit/plugins/test_pipeline_checks.py"
UPDATES = "e2e/test_engine_updates.py"
PROBE = "unit/plugins/test_generator_probe.py"
ENGINE = "e2e/test_generator_head.py::test_log_probs_are_those_of_float64_and_follow_the_weights"

# Fault -> tests, as file::function or file::key of the table of refused configurations.
FAULTS: dict[str, tuple[str, ...]] = {
    "old log-probs recomputed before the update: the ratio is 1 and truncation never acts": (
        f"{RATIO}::recomputed log-probs",
    ),
    "a positive lower clip off-policy lets drift run away": (
        "unit/losses/test_cispo.py::test_cap_is_absolute_and_there_is_no_lower_clip_off_policy",
    ),
    "another temperature in scoring than in sampling": (
        f"{RATIO}::raw log-probs at another temperature",
        f"{RATIO}::raw log-probs through the engine's own arguments",
    ),
    "top-p or top-k: the renormaliser leaks into the ratio": (
        f"{RATIO}::nucleus sampling",
        f"{RATIO}::top-k sampling",
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
        f"{PIPELINE_CHECKS}::two updates a version",
        f"{PIPELINE_CHECKS}::two epochs a batch",
    ),
    "one request stuck running: sampling waits for ever": (
        "unit/pipeline/test_client.py::test_one_request_stuck_running_is_timed_out_aborted_and_reissued",
        "unit/pipeline/test_buffer.py::test_lost_group_stuck_in_running_is_started_again",
        "unit/pipeline/test_weights.py::test_generator_that_dies_in_a_hanging_transfer_is_left_out",
    ),
    "a staleness bound of 0 or 1 that is off by one": (
        "unit/pipeline/test_admission.py::test_no_trained_token_is_older_than_k_and_nothing_deadlocks",
        "unit/pipeline/test_admission.py::test_the_bound_is_reached_and_not_one_less",
        "unit/pipeline/test_buffer.py::test_k_0_starts_one_batch_at_a_time",
        "unit/pipeline/test_batch.py::test_k_0_takes_tokens_of_this_very_version_only",
        "faults/test_pipeline_faults.py::test_k_0_is_exactly_on_policy_even_then",
    ),
    "the prefix cache serves a new request KV of old weights": (
        "unit/pipeline/test_engine_versions.py::test_waiting_request_gets_the_prefix_of_the_new_weights",
        "unit/pipeline/test_engine_versions.py::test_running_request_keeps_its_prefix_and_is_counted",
        f"{UPDATES}::prefix of older weights is not reused",
    ),
    "a request that spans versions carries one version": (
        "unit/pipeline/test_versions.py::test_log_gives_every_token_the_version_it_was_sampled_under",
        "e2e/test_pipeline.py::test_responses_straddle_versions_and_every_token_has_one",
        "e2e/test_pipeline.py::test_log_probs_are_those_of_the_weights_that_sampled_each_token",
    ),
    "groups of mixed versions are trained although that was ruled out": (
        "unit/pipeline/test_batch.py::test_batch_that_breaks_the_bound_is_refused",
        "unit/pipeline/test_batch.py::test_group_of_mixed_versions_trains_within_the_bound_only",
    ),
    "the engine's ids are not ours: an abort does nothing and says nothing": (
        "unit/pipeline/test_client.py::test_abort_that_did_nothing_is_said",
        f"{UPDATES}::abort by our id ends the request in the engine",
        f"{UPDATES}::abort of an unknown id says so",
    ),
    "resuming from a checkpoint skips or repeats prompts": (
        "unit/pipeline/test_trainer.py::test_rows_without_a_prompt_are_dropped_from_a_restored_queue",
        "unit/pipeline/test_admission.py::test_every_reachable_state_fulfils_the_inequality",
        "faults/test_pipeline_faults.py::test_no_prompt_is_lost_or_doubled_by_resuming",
    ),
    "every group fails: they are given up for ever, and nobody says why": (
        "unit/pipeline/test_buffer.py::test_run_of_which_every_group_fails_stops_with_the_cause",
    ),
    "denominators that count masked, truncated or filtered sequences": (
        "unit/advantages/test_weights.py::test_denominators_do_not_count_masked_truncated_or_filtered_sequences",
        "unit/plugins/test_reward_shaping.py::test_response_left_out_enters_neither_mean_nor_denominator",
    ),
    "group of one, std of 0, float noise of equal rewards: huge or NaN advantages": (
        "unit/advantages/test_estimator.py::test_float_noise_group_of_one_and_zero_std_give_exact_zeros",
        "unit/advantages/test_zero_variance.py::test_float_noise_of_equal_rewards_counts_as_zero_variance",
        f"{ADVANTAGE}::group of one",
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
    "padded vocabulary, top-p and processed log-probs: NaN": (ENGINE,),
    "weights synced into the generator, a cached FP32 copy serves the old head": (
        ENGINE,
        f"{PROBE}::test_replacement_is_fp32_and_keeps_no_copy_of_the_weight",
    ),
    "tied embedding updated alone: a cloned head is stale": (ENGINE,),
    "LoRA in the generator bypasses the FP32 head": (
        f"{PROBE}::test_what_the_older_layer_does_not_cover_is_refused",
        f"{PROBE}::test_a_lora_layer_is_measured_by_what_it_wraps",
    ),
    "FP32 in the trainer or the generator only": (
        "unit/plugins/test_head_agreement.py::test_one_sided_head_is_found_with_its_numbers",
        "faults/test_fp32_head.py::test_fault_fp32_on_one_side_only",
    ),
    "flag of the head read outside of the engine's context, or ignored: no effect, no word": (
        f"{PROBE}::test_bf16_head_is_refused_with_its_numbers",
        "e2e/test_sync.py::test_fp32_head_is_active_on_both_sides_and_compared_before_training",
    ),
    "TF32 allowed in the engine: FP32 logits of 10 bits": (
        f"{PROBE}::test_tf32_operands_are_refused_though_the_logits_are_fp32",
    ),
    "sleep and wake-up of the engine: a stale head": (
        "gpu/test_vllm_head.py::test_head_follows_after_sleep_and_wake_up",
    ),
    "abort and resume yield more tokens than the response length": (
        "unit/plugins/test_agent_loop.py::test_aborts_never_add_up_to_more_than_the_response_length",
        "unit/pipeline/test_client.py::test_second_attempt_has_the_whole_budget_and_no_more",
    ),
    "tokens forced into the thinking enter the ratio": (
        "unit/plugins/test_agent_loop.py::test_interrupted_response_in_verl_s_output",
        "e2e/test_interruption.py::test_the_trainer_recomputes_the_log_probs_of_all_sampled_tokens",
    ),
    "the model closes its thinking just before: the phrase lands inside the answer": (
        "unit/rollout/test_interruption.py::test_no_phrase_lands_behind_a_close_of_several_tokens",
        "unit/rollout/test_interruption.py::test_markers_across_token_boundaries_are_found",
        "unit/rollout/test_interruption.py::test_a_close_in_the_last_tokens_of_the_budget_is_not_interrupted",
    ),
    "a thinking budget that is counted from zero after a weight update": (
        "unit/plugins/test_agent_loop.py::test_one_budget_for_a_response_that_weight_updates_interrupt",
    ),
}


def names_in(path: Path) -> set[str]:
    """Test functions of a file, the text keys of its tables and the texts of its lists of cases."""
    tree = ast.parse(path.read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}
    lists = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)]
    values = {item.value for node in lists for item in node.value.elts if isinstance(item, ast.Constant)}
    return functions | keys | values


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_has_its_tests(fault: str) -> None:
    for test in FAULTS[fault]:
        file, name = test.split("::")
        assert name in names_in(TESTS / file), f"{test} is gone: name here what guards against this fault now"
