# SPDX-License-Identifier: Apache-2.0
"""Every metric that a run of ours logs under ``scalerl/``, and what it says: the source of the reference page.

Where a name holds ``<something>``, that part is a number or a name of the user's. End-to-end tests fail on a metric
that is not listed here.
"""

from __future__ import annotations

from scalerl_verl.names import CISPO, INTERRUPTION_LOOP, LOW_ESS_FRAC, PASS_KEY, PIPELINE_RL, PPO_OFF_POLICY

_LENGTHS = {
    "truncated_fraction": "responses that ran out of tokens",
    "clamped_fraction": "of all responses those that ended where the engine's context did, before their budget",
    "prompts_truncated_fraction": "prompts with at least one such response",
    "truncated_fraction_prompt_max": "the fraction of the prompt where it is greatest",
    "interrupted_fraction": "responses whose thinking was ended by the phrase (this and the next ones: "
    f"`{INTERRUPTION_LOOP}` only)",
    "natural_close_fraction": "responses that closed their thinking themselves",
    "unclosed_fraction": "responses that ended or were cut inside the thinking",
    "no_thinking_fraction": "responses that opened no thinking",
    "thinking_tokens_mean": "sampled tokens of thinking a response",
    "answer_tokens_mean": "sampled tokens of answer a response",
    "injected_tokens_sum": "tokens of phrases",
    "reward_interrupted_mean": "reward of interrupted responses",
    "reward_natural_mean": "reward of responses that closed their thinking themselves",
    "continuation_cached_fraction": "prompt tokens of continued requests that the engine had in its cache",
}

METRICS: dict[str, str] = {
    "compute/gpu_hours": "GPUs of every pool x wall time from taking them on, idle time included",
    "compute/generated_tokens": "tokens the policy sampled into batches that reached the trainer",
    "compute/trained_tokens": "of these, with a learning signal, once for every pass of an update",
    "compute/model_flops": "operations of the actor; absent for an architecture that verl's counter does not know",
    "compute/steps": "training steps",
    "compute/wasted_gpu_hours": "spent after a checkpoint that was then resumed: on weights that are gone",
    "compute/wasted_tokens": "the same in tokens",
    "validation/pass_rate": "generations that passed, a mean over prompts: by default those whose `acc` is above 0.5, "
    f"without `acc` their score, without both their reward (`{PASS_KEY}`, `.pass_threshold`); with "
    "several data sources also `validation/<source>/pass_rate`",
    "validation/stderr": "its standard error over prompts",
    "validation/num_prompts": "prompts of the validation; rows of equal content are one",
    "validation/num_generations": "generations of the validation",
    "validation/num_failed": "of these, generations that failed (an error of the engine, an agent loop or a reward); "
    "they count as not passed, as in verl's `acc`",
    "validation/<source>/pass_rate": "the same of one data source, as are the next three",
    "validation/<source>/stderr": "",
    "validation/<source>/num_prompts": "",
    "validation/<source>/num_generations": "",
    "forecast/num_points": "validations after training began, which the forecast may use",
    "forecast/identified": "1 if the ceiling is identified",
    "forecast/A": "ceiling of the fitted curve over GPU-hours; from the fifth validation on, as the rest",
    "forecast/A_low": "lower end of its 95% interval",
    "forecast/A_high": "upper end",
    "forecast/end_score": "score expected at the last step of the run",
    "forecast/end_low": "lower end of its interval",
    "forecast/end_high": "upper end",
    "forecast/end_gpu_hours": "GPU-hours expected by then",
    "loss/ratio_mean": "importance ratio to the log-probs recorded at sampling, mean over tokens; all of `loss/` is "
    f"that of `{CISPO}`",
    "loss/ratio_max": "its maximum",
    "loss/ratio_min": "its minimum",
    "loss/capped_frac_pos": "tokens of positive advantage whose ratio was capped, as a fraction of such tokens",
    "loss/capped_frac_neg": "the same of negative advantage",
    "loss/ess_frac": "effective sample size of the capped ratios, as a fraction of the tokens (of each micro-batch, "
    "averaged by tokens)",
    "loss/out_of_range_frac": "tokens masked by `token_mask_range`",
    "loss/out_of_range_tokens_sum": "their number, over all optimizer steps on the batch",
    "loss/nonfinite_tokens_sum": "tokens without a usable log-prob, over all optimizer steps on the batch: they "
    "contribute nothing",
    "mismatch/log_ratio_abs_mean": f"|log-ratio| of trainer and generator, mean over tokens; with `{CISPO}` or "
    "the FP32 head",
    "mismatch/log_ratio_abs_max": "its maximum over tokens",
    "mismatch/sequence_log_ratio_abs_max": "the greatest |log-ratio| of a whole response",
    "mismatch/k3_kl": "k3 estimate of the KL divergence between generator and trainer",
    "mismatch/ess_frac": "effective sample size of the ratios, capped at `eps_max` and nothing else, as a fraction of "
    "the tokens",
    "mismatch/ess_alarm_max": f"1 where it is below {LOW_ESS_FRAC:g}",
    "mismatch/above_cap_frac": "tokens whose ratio is above `eps_max`",
    "mismatch/log_ratio_square_mean": f"mean square log-ratio over all tokens (`{PIPELINE_RL}`, as the next ones)",
    "mismatch/engines/log_ratio_abs_mean": "mean |log-ratio| of responses that were sampled as a whole under the "
    "weights that train: what the two engines differ by; absent without such a response, as is the next",
    "mismatch/engines/log_ratio_square_mean": "their mean square",
    "mismatch/age_<age>/log_ratio_abs_mean": "mean |log-ratio| of tokens that are so many versions old; absent without "
    "such a token, as is the next",
    "mismatch/age_<age>/log_ratio_square_mean": "their mean square",
    "mismatch/explained_by_age_frac": "part of the mean square log-ratio that the engines' (of this batch, or of the "
    "last one that has it) does not explain",
    "mismatch/first_batch_log_ratio_abs_mean": "the same mean on the first batch, before anything is trained "
    "(FP32 head); above its limit the run ends",
    "mismatch/first_batch_log_ratio_abs_max": "its maximum",
    "advantage/std": "standard deviation of the centred rewards that train (estimator `scalerl`)",
    "data/generated_tokens_sum": "tokens sampled for the batches of this step, injected ones left out",
    "data/prompts_sum": "prompts of the batch",
    "data/prompts_mixed_sum": "prompts with differing rewards",
    "data/prompts_all_right_sum": "prompts of equal rewards all of whose responses passed (`validation/pass_rate`)",
    "data/prompts_all_wrong_sum": "prompts of equal rewards none of whose responses did",
    "data/prompts_single_sum": "prompts with one response, which carries no signal",
    "data/rows_kept_sum": "rows that train",
    "data/rows_left_out_sum": "rows that a reward shaping left out",
    "data/skipped_updates_sum": "optimizer steps skipped because no row had a signal and the loss has no other term",
    "data/curriculum_epoch_max": "epoch of no-positive-resampling: a pass over what is left, or where rows are copies "
    "as many rows as there are prompts left",
    "data/curriculum_prompts_remaining_min": "prompts still drawn",
    "data/curriculum_dropped_this_epoch_max": "prompts dropped when this epoch began",
    "data/curriculum_dropped_in_all_max": "prompts dropped so far and not readmitted",
    "data/curriculum_visits_sum": "prompts whose results were counted in this step",
    "data/curriculum_mastered_visits_sum": "of these, at or above the threshold",
    **{f"length/{name}": text for name, text in _LENGTHS.items()},
    "length/truncated_window_fraction": "truncated responses over the alarm's window of batches",
    "length/truncation_alarm_max": "1 while the alarm is raised",
    **{f"length/val/{name}": f"of the validation: {text}" for name, text in _LENGTHS.items()},
    "pipeline/staleness_mean": f"age of the trained tokens in versions, mean (`{PIPELINE_RL}`, as what follows)",
    "pipeline/staleness_max": "the greatest; never above k",
    "pipeline/staleness_tokens/<age>_sum": "tokens of that age",
    "pipeline/staleness_sequences/<age>_sum": "responses whose first token has that age",
    "pipeline/versions_per_sequence_mean": "versions a response was sampled under",
    "pipeline/versions_per_sequence_max": "the greatest",
    "pipeline/pause_s": "seconds of a weight update during which the slowest generator sampled nothing",
    "pipeline/sent_gib": "weights of an update as they are sent, once, in GiB",
    "pipeline/transfer_s": "seconds of sending the weights, while generation goes on",
    "pipeline/swap_s": "seconds of loading them, of the slowest generator",
    "pipeline/kept_requests": "requests that went on over the update",
    "pipeline/lead": "batches that may be under way or wait beside the one that trains (`lead=adaptive`)",
    "pipeline/recomputed_tokens": "tokens prefilled again (`kv_on_update=recompute`)",
    "pipeline/continued_tokens": "tokens of a response that were computed before a further request of it",
    "pipeline/continued_recomputed_tokens": "those of them that were computed again: the cache no longer had them",
    "pipeline/tokens_lost": "tokens that a kept request lost: 0, or something is wrong",
    "pipeline/generated_tokens": "tokens sampled since the last update",
    "pipeline/generator_idle_fraction": "time of the generators without a request, or paused",
    "pipeline/trainer_idle_fraction": "time of the trainer waiting for data",
    "pipeline/replicas": "generators that took part in the update",
    "pipeline/queue_depth": "finished groups that wait",
    "pipeline/groups_in_flight": "groups being generated",
    "pipeline/requests_reissued_sum": "requests that were sent again",
    "pipeline/groups_reissued_sum": "groups that were started again",
    "pipeline/groups_given_up_sum": "groups given up after `max_attempts`",
    "pipeline/groups_rejected_sum": "finished groups that dynamic sampling gave up for this batch (`filter_groups`)",
    "pipeline/tokens_rejected_sum": "tokens sampled for them: they train nothing",
    "pipeline/synced_bytes_sum": "bytes of weights that were sent (backend `gloo`, any trainer mode)",
    "pipeline/updates_per_batch": f"optimizer steps on each generated batch (`{PPO_OFF_POLICY}`)",
}
"""Name without ``scalerl/`` -> meaning."""
