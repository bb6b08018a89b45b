# SPDX-License-Identifier: Apache-2.0
"""Our policy losses and advantage estimator, as verl calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from scalerl_verl.advantage import Sessions, rounding_error, session_advantages
from scalerl_verl.advantage.rows import count_tokens, spread_rows, sum_magnitudes, sum_rows
from scalerl_verl.advantage.step import current_step
from scalerl_verl.columns import MAX_AGE, VERSION, VERSIONS, objects_of
from scalerl_verl.config.settings import AlgorithmSettings
from scalerl_verl.errors import PatchError
from scalerl_verl.head.vllm_probe import HEAD_FACT
from scalerl_verl.loss import age_split, aggregate_loss, mismatch_metrics, token_means
from scalerl_verl.loss.policy_loss import find_loss
from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.names import ALGORITHM_KEY, CORRECTION, ESTIMATOR, KEEP, LOSSES, PROMPT_MEAN
from scalerl_verl.upstream import status
from scalerl_verl.upstream.registry import require_active, require_checked_run


def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of ours that the config names, on one micro-batch.

    Args:
        old_log_prob: log-probs recorded when each token was sampled (the start-up check makes sure that verl copies
            them here: ``rollout_correction.bypass_mode=True``), [B, T].
        log_prob: log-probs under the policy being trained, [B, T], with gradient.
        advantages: [B, T]; for ``prompt-mean`` they carry the row weights.
        response_mask: [B, T] bool.
        loss_agg_mode: aggregation mode, one of verl's: the actor's loss of our engines puts one in the place of
            ``prompt-mean``.
        config: verl's ActorConfig.
        rollout_is_weights: refused: they would correct the same mismatch a second time.

    Returns:
        Scalar loss and metrics (``scalerl/loss/...``, ``scalerl/mismatch/...``) as of `token_means.report`.

    Raises:
        ValueError: ``rollout_is_weights`` is given.
        PatchError: the start-up check has not passed in this run (another entry point than main_ppo), or the mode is
            ``prompt-mean``: the engine of this process is not ours.
    """
    name = config.policy_loss["loss_mode"]
    require_checked_run(f"loss_mode={name}")
    if rollout_is_weights is not None:
        raise ValueError(
            f"loss_mode={name} already corrects the ratio to the sampling-time log-probs: set "
            f"{CORRECTION}.rollout_is=null"
        )
    if loss_agg_mode == PROMPT_MEAN:
        raise PatchError(
            f"loss_agg_mode={PROMPT_MEAN} reached a policy loss by itself: an engine of scalerl_verl (see 'scalerl "
            "doctor') takes it for one of verl's modes over weighted rows. Launch through python -m "
            "verl.trainer.main_ppo."
        )
    ours, settings = find_loss(name), PolicyLossSettings.from_config(config.policy_loss)
    options = {option: getattr(settings, option) for option in ours.options}
    loss_BT = ours.token_loss(log_prob, old_log_prob, advantages, response_mask, **options)
    loss = aggregate_loss(loss_BT, response_mask, loss_agg_mode, **config.global_batch_info)
    measured = ours.metrics(log_prob, old_log_prob, advantages, response_mask, **options)
    # verl averages sums over data-parallel ranks.
    dp_size = config.global_batch_info.get("dp_size", 1)
    measured = {name: (value * dp_size if how == "sum" else value, how) for name, (value, how) in measured.items()}
    return loss, token_means.report(measured, response_mask.bool(), advantages)


def measure_mismatch(config: Any, model_output: Any, data: Any, metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics of the trainer-generator mismatch on one micro-batch for a loss that has none, if the FP32 head is on.

    Args:
        config: verl's ActorConfig.
        model_output: ``log_probs`` of the tokens, nested.
        data: the micro-batch, with the log-probs recorded at sampling.
        metrics: what the loss measured; `policy_loss` has these names already.

    Returns:
        ``scalerl/mismatch/...`` as of `token_means.report`, or nothing.
    """
    if not status.read_facts(HEAD_FACT) or "rollout_log_probs" not in data:
        return {}
    if any(name.startswith("scalerl/mismatch/") for name in metrics):
        return {}
    logp_train_BT, logp_rollout_BT, mask_BT = _padded(model_output, data)
    eps_max = PolicyLossSettings.from_config(config.policy_loss).eps_max
    return token_means.report(mismatch_metrics(logp_train_BT, logp_rollout_BT, mask_BT, eps_max), mask_BT)


def sum_log_ratios(model_output: Any, data: Any) -> torch.Tensor | None:
    """Log-ratios of one micro-batch by the age of their tokens, under way to the host; None outside of pipeline_rl.

    It is done here, in the trainer's workers: with the log-probs recorded at sampling as the old ones, no other process
    ever has the trainer's. The versions are here as well, since verl's workers get every field of a row; the driver
    adds two numbers a batch. To do it there would take another forward pass, or the log-probs of all tokens.

    Args:
        model_output: ``log_probs`` of the tokens, nested.
        data: the micro-batch, with the log-probs recorded at sampling and their versions.

    Returns:
        As of `age_split.sum_by_age`, to be read only after something has waited for the device.
    """
    from verl.utils import tensordict_utils as tu

    version = tu.get_non_tensor_data(data, VERSION, None)
    if version is None or "rollout_log_probs" not in data:
        return None
    runs_B = [extra.get(VERSIONS) or () for extra in objects_of(data["extra_fields"])]
    max_age = tu.get_non_tensor_data(data, MAX_AGE, 0)
    return age_split.sum_by_age(*_padded(model_output, data), runs_B, version, max_age).to("cpu", non_blocking=True)


def _padded(model_output: Any, data: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of a micro-batch under the trainer and at sampling, and the mask of what trains, each [B, T]."""
    from verl.workers.utils.padding import no_padding_2_padding

    logp_train_BT = no_padding_2_padding(model_output["log_probs"], data).detach()
    padded = data.select("rollout_log_probs", "response_mask").to_padded_tensor()
    return logp_train_BT, padded["rollout_log_probs"], padded["response_mask"].bool()


def metric_aggregations() -> dict[str, str]:
    """Name of each metric of `policy_loss` -> how micro-batches and ranks combine it."""
    nothing = torch.zeros(1, 1)
    measured: dict[str, tuple[float, str]] = {}
    for name in LOSSES:
        measured |= find_loss(name).metrics(nothing, nothing, nothing, nothing.bool())
    return token_means.aggregations(measured)


def estimate_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-centred advantages with batch, prompt or no normalisation and zero-variance dropping.

    The outputs of one session of an agent loop are one response, whose reward is that of the last of them.

    Args:
        token_level_rewards: [B, T]; the reward of a row is the sum over its tokens.
        response_mask: [B, T]; a row without a single token (padding) takes no part.
        index: prompt id of each row, [B].
        config: verl's ``algorithm`` section; ours is ``config.scalerl``.

    Returns:
        (advantages, returns), the same tensor [B, T] in the dtype of the rewards; 0 where the mask is False. It carries
        the row weights of the aggregation mode already: one pass over [B, T] instead of two.

    Raises:
        PatchError: called outside a training step of ours, which alone can fix the denominators.
    """
    require_checked_run(f"adv_estimator={ESTIMATOR}")
    step = current_step()
    if step is None:
        require_active("verl.training_step.weights")
        raise PatchError(
            f"adv_estimator={ESTIMATOR} was called outside of a training step of scalerl_verl's trainers, which alone "
            "know the whole batch. Launch through python -m verl.trainer.main_ppo (V1 trainers)"
        )
    settings = AlgorithmSettings.from_config((config or {}).get(ALGORITHM_KEY))
    mask_BT = response_mask.bool()
    num_tokens_B = count_tokens(mask_BT)
    trains_B = num_tokens_B > 0 if step.left_out_B is None else (num_tokens_B > 0) & ~step.left_out_B
    result = session_advantages(
        # All positions, as verl does: it puts the reward on the last token, which may be masked (a tool's output, an
        # injected phrase). Sessions that do not train may hold anything and take no part.
        sum_rows(token_level_rewards, mask_BT),
        index,
        trains_B,
        step.sessions or Sessions.one_per_row(len(index)),
        # Each token's part is rounded by itself: 0.1 + 0.2 on two tokens and 0.3 on one are the same reward.
        tolerance_B=rounding_error(
            sum_magnitudes(token_level_rewards, mask_BT), unit=torch.finfo(token_level_rewards.dtype).eps
        ),
        adv_norm=settings.adv_norm,
        zero_variance=settings.zero_variance,
    )
    step.note_result(result, keeps=settings.zero_variance == KEEP)
    weights_B = step.weigh_rows(num_tokens_B, index, result.kept_B)
    advantages_BT = spread_rows(result.advantages_B * weights_B, mask_BT, like=token_level_rewards)
    return advantages_BT, advantages_BT
