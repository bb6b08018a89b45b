# SPDX-License-Identifier: Apache-2.0
"""Every metric that a run of ours logs under ``scalerl/``, and what it says: the source of the reference page.

Where a name holds ``<something>``, that part is a number or a name of the user's. End-to-end tests fail on a metric
that is not listed here.
"""

from __future__ import annotations

from scalerl_verl.names import CISPO, INTERRUPTION_LOOP, LOW_ESS_FRAC, PASS_KEY, PIPELINE_RL, PPO_OFF_POLICY

_LENGTHS = {
    "truncated_fraction": "fraction of responses that ran out of tokens",
    "clamped_fraction": "fraction of responses that were cut at the end of the engine's context, before their budget",
    "prompts_truncated_fraction": "fraction of prompts with a truncated response",
    "truncated_fraction_prompt_max": "greatest fraction of truncated responses to one prompt",
    "interrupted_fraction": "fraction of responses whose thinking was ended by the phrase (logged, as the next ones, "
    f"by `{INTERRUPTION_LOOP}` only)",
    "natural_close_fraction": "fraction of responses that closed their thinking themselves",
    "unclosed_fraction": "fraction of responses that ended or were cut inside the thinking",
    "no_thinking_fraction": "fraction of responses that opened no thinking",
    "thinking_tokens_mean": "sampled thinking tokens, mean over responses",
    "answer_tokens_mean": "sampled answer tokens, mean over responses",
    "injected_tokens_sum": "tokens of the phrase, over all interrupted responses",
    "reward_interrupted_mean": "mean reward of interrupted responses",
    "reward_natural_mean": "mean reward of responses that closed their thinking themselves",
    "continuation_cached_fraction": "fraction of the prompt tokens of continued requests that the engine had in its "
    "cache",
}

METRICS: dict[str, str] = {
    "compute/gpu_hours": "GPUs of every pool x wall time from taking them on, idle time included",
    "compute/generated_tokens": "tokens the policy sampled into batches that reached the trainer",
    "compute/trained_tokens": "generated tokens with a learning signal, counted once for every pass of an update",
    "compute/model_flops": "operations of the actor; absent for an architecture that verl's counter does not know",
    "compute/steps": "training steps",
    "compute/wasted_gpu_hours": "GPU-hours between a checkpoint and the end of an attempt, whose weights were lost "
    "when a later attempt resumed "
    "the checkpoint",
    "compute/wasted_tokens": "generated tokens of that time",
    "validation/pass_rate": "fraction of generations that passed, mean over prompts. By default a generation passes if "
    "its `acc` is above 0.5, "
    f"without `acc` its score, without both its reward (`{PASS_KEY}`, `.pass_threshold`)",
    "validation/stderr": "standard error of the pass rate over prompts",
    "validation/num_prompts": "prompts of the validation; rows of equal content are one",
    "validation/num_generations": "generations of the validation",
    "validation/num_failed": "generations of the validation that failed, by an error of the engine, an agent loop or a "
    "reward; they count as not passed, as in verl's `acc`",
    "validation/<source>/pass_rate": "pass rate of one data source, where there are several",
    "validation/<source>/stderr": "standard error of that pass rate",
    "validation/<source>/num_prompts": "prompts of that data source",
    "validation/<source>/num_generations": "generations of that data source",
    "forecast/num_points": "validations after training began: the points of the forecast",
    "forecast/identified": "1 if the ceiling A is identified",
    "forecast/A": "ceiling of the curve fitted over GPU-hours. All of `forecast/` begins with the fifth validation",
    "forecast/A_low": "lower end of the 95% interval of A",
    "forecast/A_high": "upper end of the 95% interval of A",
    "forecast/end_score": "score expected at the last step of the run",
    "forecast/end_low": "lower end of the 95% interval of that score",
    "forecast/end_high": "upper end of the 95% interval of that score",
    "forecast/end_gpu_hours": "GPU-hours expected at the last step",
    "loss/ratio_mean": "importance ratio to the log-probs recorded at sampling, mean over tokens. All of `loss/` is "
    f"logged by `{CISPO}`",
    "loss/ratio_max": "greatest importance ratio of a token",
    "loss/ratio_min": "smallest importance ratio of a token",
    "loss/capped_frac_pos": "fraction of the tokens with positive advantage whose ratio was capped",
    "loss/capped_frac_neg": "fraction of the tokens with negative advantage whose ratio was capped",
    "loss/ess_frac": "effective sample size of the capped ratios, as a fraction of the tokens (of each micro-batch, "
    "averaged by tokens)",
    "loss/out_of_range_frac": "fraction of tokens masked by `token_mask_range`",
    "loss/out_of_range_tokens_sum": "number of tokens masked by `token_mask_range`, over all optimizer steps on the "
    "batch",
    "loss/nonfinite_tokens_sum": "tokens without a usable log-prob, over all optimizer steps on the batch: they "
    "contribute nothing",
    "mismatch/log_ratio_abs_mean": f"|log-ratio| of trainer and generator, mean over tokens; with `{CISPO}` or "
    "the FP32 head",
    "mismatch/log_ratio_abs_max": "greatest |log-ratio| of a token",
    "mismatch/sequence_log_ratio_abs_max": "greatest |log-ratio| of a whole response",
    "mismatch/k3_kl": "k3 estimate of the KL divergence between generator and trainer",
    "mismatch/ess_frac": "effective sample size of the ratios as a fraction of the tokens; the ratios are capped at "
    "`eps_max` and not "
    "masked",
    "mismatch/ess_alarm_max": f"1 in a step whose `mismatch/ess_frac` is below {LOW_ESS_FRAC:g}",
    "mismatch/above_cap_frac": "fraction of tokens whose ratio is above `eps_max`",
    "mismatch/log_ratio_square_mean": f"mean square log-ratio over all tokens (logged, as the next ones, by "
    f"`{PIPELINE_RL}`)",
    "mismatch/engines/log_ratio_abs_mean": "mean |log-ratio| of the tokens of responses that were sampled wholly "
    "under the weights that train: the difference of the two engines. Absent in a batch without such a response",
    "mismatch/engines/log_ratio_square_mean": "mean square log-ratio of these tokens",
    "mismatch/age_<age>/log_ratio_abs_mean": "mean |log-ratio| of tokens that are `<age>` versions old. Absent in a "
    "batch "
    "without such a token",
    "mismatch/age_<age>/log_ratio_square_mean": "mean square log-ratio of these tokens",
    "mismatch/explained_by_age_frac": "part of the mean square log-ratio that the age of tokens explains: the rest is "
    "that "
    "of the engines, measured on this batch or the last one that has it",
    "mismatch/first_batch_log_ratio_abs_mean": "mean |log-ratio| of the first batch, before anything is trained (FP32 "
    "head). Above its limit the run ends",
    "mismatch/first_batch_log_ratio_abs_max": "greatest |log-ratio| of a token of the first batch",
    "advantage/std": "standard deviation of the centred rewards that train (estimator `scalerl`)",
    "data/generated_tokens_sum": "tokens sampled for the batches of this step, injected ones left out",
    "data/prompts_sum": "prompts of the batch",
    "data/prompts_mixed_sum": "prompts with differing rewards",
    "data/prompts_all_right_sum": "prompts with equal rewards whose responses all passed, by the rule of "
    "`validation/pass_rate`",
    "data/prompts_all_wrong_sum": "prompts with equal rewards and no response that passed, by that rule",
    "data/prompts_single_sum": "prompts with one response, which carries no signal",
    "data/rows_kept_sum": "rows that train",
    "data/rows_left_out_sum": "rows that a reward shaping left out",
    "data/skipped_updates_sum": "optimizer steps skipped because no row had a signal and the loss has no other term",
    "data/curriculum_epoch_max": "epoch of no-positive-resampling: a pass over the prompts that are left. Where rows "
    "are "
    "copies, it is as many rows as there are prompts left",
    "data/curriculum_prompts_remaining_min": "prompts still drawn",
    "data/curriculum_dropped_this_epoch_max": "prompts dropped when this epoch began",
    "data/curriculum_dropped_in_all_max": "prompts dropped so far and not readmitted",
    "data/curriculum_visits_sum": "prompts whose results were counted in this step",
    "data/curriculum_mastered_visits_sum": "prompts counted in this step whose pass rate was at or above the threshold",
    **{f"length/{name}": text for name, text in _LENGTHS.items()},
    "length/truncated_window_fraction": "fraction of truncated responses over the alarm's window of batches",
    "length/truncation_alarm_max": "1 while the alarm is raised",
    **{f"length/val/{name}": f"of the validation: {text}" for name, text in _LENGTHS.items()},
    "pipeline/staleness_mean": f"age of the trained tokens in versions, mean (logged, as the next ones, by "
    f"`{PIPELINE_RL}`)",
    "pipeline/staleness_max": "greatest age of a trained token, never above k",
    "pipeline/staleness_tokens/<age>_sum": "trained tokens that are `<age>` versions old",
    "pipeline/staleness_sequences/<age>_sum": "responses whose first token is `<age>` versions old",
    "pipeline/versions_per_sequence_mean": "versions that a response was sampled under, mean over responses",
    "pipeline/versions_per_sequence_max": "most versions that a response was sampled under",
    "pipeline/pause_s": "seconds of a weight update during which the slowest generator sampled nothing",
    "pipeline/sent_gib": "GiB of the weights of an update in the format that is sent, one copy",
    "pipeline/transfer_s": "seconds of sending the weights, while generation goes on",
    "pipeline/swap_s": "seconds that the slowest generator took to load the weights",
    "pipeline/kept_requests": "requests that went on over the update",
    "pipeline/lead": "batches that may be under way or wait beside the one that trains (`lead=adaptive`)",
    "pipeline/recomputed_tokens": "tokens prefilled again (`kv_on_update=recompute`)",
    "pipeline/continued_tokens": "tokens that a response already had when a further request of it began",
    "pipeline/continued_recomputed_tokens": "of `continued_tokens`, those that were computed again because the cache "
    "no longer had them",
    "pipeline/tokens_lost": "tokens that a kept request lost: 0, or something is wrong",
    "pipeline/generated_tokens": "tokens sampled since the last update",
    "pipeline/generator_idle_fraction": "fraction of the generators' time without a request, or paused",
    "pipeline/trainer_idle_fraction": "fraction of the trainer's time that it waited for data",
    "pipeline/replicas": "generators that took part in the update",
    "pipeline/queue_depth": "finished groups that wait to be trained",
    "pipeline/groups_in_flight": "groups being generated",
    "pipeline/requests_reissued_sum": "requests that were sent again",
    "pipeline/groups_reissued_sum": "groups that were started again",
    "pipeline/groups_given_up_sum": "groups given up after `max_attempts`",
    "pipeline/groups_rejected_sum": "finished groups that dynamic sampling gave up for this batch (`filter_groups`)",
    "pipeline/tokens_rejected_sum": "tokens sampled for rejected groups, which train nothing",
    "pipeline/synced_bytes_sum": "bytes of weights that were sent (backend `gloo`, any trainer mode)",
    "pipeline/updates_per_batch": f"optimizer steps on each generated batch (`{PPO_OFF_POLICY}`)",
}
"""Name without ``scalerl/`` -> meaning."""
