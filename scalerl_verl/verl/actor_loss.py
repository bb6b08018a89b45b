# SPDX-License-Identifier: Apache-2.0
"""verl's loss of the actor, around which an engine of ours puts what verl leaves out.

Only tokens that train reach it; KL and entropy get the weights of rows; metrics keep the aggregation that a policy loss
declares, and the mismatch is measured whatever the loss, in pipeline_rl by the age of the tokens, too.

Shape legend: B rows, T tokens of the padded response.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from verl.trainer.distillation import losses as distillation
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding

from scalerl_verl.loss import age_split
from scalerl_verl.loss.aggregation import MISSING_BATCH_SIZE
from scalerl_verl.loss.term_weights import read_weights
from scalerl_verl.loss.unmasked import select_unmasked
from scalerl_verl.loss.verl_config import PLAIN_MODE, STATISTICS_MODE
from scalerl_verl.names import PROMPT_MEAN
from scalerl_verl.verl.algorithms import measure_mismatch, metric_aggregations, sum_log_ratios


def training_loss(loss_function: Any) -> Any:
    """The loss function of an engine's call with verl's loss of an actor replaced by ours; any other as it is.

    Args:
        loss_function: verl's `ppo_loss` or `distillation_ppo_loss` with its config bound, another one, or None.
    """
    function = getattr(loss_function, "func", None)
    ours = _OURS.get(function) if isinstance(loss_function, functools.partial) else None
    return functools.partial(ours, *loss_function.args, **loss_function.keywords) if ours else loss_function


def ppo_loss(
    config: Any, model_output: dict[str, Any], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """What verl's `ppo_loss` returns, under its arguments: the loss of a micro-batch and its metrics.

    Raises:
        ValueError: the mode is ``prompt-mean`` and the number of rows of the mini-batch is unknown.
    """
    if config.loss_agg_mode == PROMPT_MEAN and data["global_batch_size"] is None:
        raise ValueError(MISSING_BATCH_SIZE)
    model_output, data = select_unmasked(model_output, data)
    weights_B = read_weights(data)
    sums = sum_log_ratios(model_output, data)
    if weights_B is None and config.loss_agg_mode != PROMPT_MEAN:
        loss, metrics = losses.ppo_loss(config, model_output, data, dp_group)
    else:
        loss, metrics = _with_weighted_terms(config, model_output, data, weights_B)
    measured = measure_mismatch(config, model_output, data, metrics)
    metrics.update(Metric.from_dict(measured, aggregation=AggregationType.MEAN))
    for name, how in _metric_aggregations().items():
        if name in metrics:
            values = metrics[name].values
            metrics[name] = Metric(aggregation=how)
            metrics[name].extend(values)
    if sums is not None:
        # No wait of its own: verl's loss has read a number from the device since the copy of these was queued.
        metrics.update(Metric.from_dict(age_split.report(sums.tolist()), aggregation=AggregationType.SUM))
    return loss, metrics


def _with_weighted_terms(
    config: Any, model_output: dict[str, Any], data: Any, weights_B: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's `ppo_loss` with the terms beside the policy loss aggregated here: they have no advantage for a weight."""
    mode = PLAIN_MODE if config.loss_agg_mode == PROMPT_MEAN else config.loss_agg_mode
    alone = _changed(config, loss_agg_mode=mode, use_kl_loss=False)
    loss, metrics = losses.ppo_loss(alone, model_output | {"entropy": None}, data)
    how = metrics["actor/pg_loss"].aggregation
    mask_BT = data.select("response_mask").to_padded_tensor()["response_mask"].bool()

    def aggregate(term_BT: torch.Tensor) -> torch.Tensor:
        if weights_B is None:
            # Without a weight in the loss it is a metric.
            weighted_BT, its_mode = term_BT, STATISTICS_MODE
        else:
            weighted_BT, its_mode = term_BT * weights_B[:, None].to(term_BT), mode
        return agg_loss(weighted_BT, mask_BT, its_mode, **config.global_batch_info)

    if (entropy := model_output.get("entropy")) is not None:
        term = aggregate(no_padding_2_padding(entropy, data))
        loss = loss - config.entropy_coeff * term
        metrics["actor/entropy_loss"] = Metric(value=term, aggregation=how)
    if config.use_kl_loss:
        logp_BT = no_padding_2_padding(model_output["log_probs"], data)
        ref_logp_BT = data.select("ref_log_prob").to_padded_tensor()["ref_log_prob"]
        term = aggregate(kl_penalty(logprob=logp_BT, ref_logprob=ref_logp_BT, kl_penalty=config.kl_loss_type))
        loss = loss + term * config.kl_loss_coef
        metrics["kl_loss"] = Metric(value=term, aggregation=how)
        metrics["kl_coef"] = config.kl_loss_coef
    return loss, metrics


def _changed(config: Any, **changes: Any) -> Any:
    """A copy of verl's ActorConfig, whose fields are frozen; it shares the numbers of the batch."""
    changed = copy.copy(config)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


@functools.cache
def _metric_aggregations() -> dict[str, str]:
    return metric_aggregations()


def _calling_ours(function: types.FunctionType) -> Callable[..., Any]:
    """This function of verl's with our `ppo_loss` where it calls verl's: it takes none as an argument."""
    names = {**function.__globals__, "ppo_loss": ppo_loss}
    return types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


_OURS: dict[Any, Callable[..., Any]] = {
    losses.ppo_loss: ppo_loss,
    distillation.distillation_ppo_loss: _calling_ours(distillation.distillation_ppo_loss),
}
