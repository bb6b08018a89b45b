# SPDX-License-Identifier: Apache-2.0
"""Reduction of a per-token loss to a scalar that does not depend on micro-batches, ranks or masked positions.

Shape legend: B rows (responses), T tokens of the padded response.
"""

from __future__ import annotations

import torch

from scalerl_verl.names import PROMPT_MEAN

AGG_MODES: tuple[str, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    PROMPT_MEAN,
)
"""verl's own five modes, and the prompt average of ScaleRL."""

MISSING_BATCH_SIZE = (
    f"loss_agg_mode={PROMPT_MEAN} got global_batch_size=None: by the rows of this call alone, the loss would depend on "
    "how the batch is split; pass the rows of the whole mini-batch over all ranks (verl's actor does; a training loop "
    "of your own sets config.global_batch_info['global_batch_size'])"
)


def aggregate_loss(
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | torch.Tensor | None = None,
    global_batch_size: int | torch.Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> torch.Tensor:
    """Return the scalar loss of a micro-batch: its sum over micro-batches, averaged over ranks, is the global loss.

        token-mean                sum_it l_it / batch_num_tokens * dp_size
        token-sum                 sum_it l_it * dp_size
        seq-mean-token-sum        sum_it l_it / global_batch_size * dp_size
        seq-mean-token-mean       sum_i (sum_t l_it / |y_i|) / global_batch_size * dp_size
        seq-mean-token-sum-norm   sum_it l_it / global_batch_size * dp_size / loss_scale_factor
        prompt-mean               sum_it l_it / global_batch_size * dp_size

    l_it is the loss of token t of row i, and |y_i| is the number of unmasked tokens of row i. The first five modes give
    the values of verl's `agg_loss`. Masked positions are replaced by 0, not multiplied by 0, so NaN and inf there reach
    neither the loss nor its gradient. A denominator of 0 counts as 1: a batch without an unmasked token has loss 0.
    `prompt-mean` is the average over prompts only if the advantages were multiplied by
    `scalerl_verl.advantage.row_weights("prompt-mean", ...)`: those weights know whole groups, a micro-batch does not.

    Args:
        loss_BT: loss per token, [B, T], floating-point.
        mask_BT: True (or non-zero) where a token trains, [B, T].
        mode: one of the six modes above.
        dp_size: number of data-parallel ranks over which gradients are averaged.
        batch_num_tokens: number of unmasked tokens of the mini-batch over all ranks. None: of this call.
        global_batch_size: number of rows of the mini-batch over all ranks, padding rows included. None: the rows of
            this call with an unmasked token, in the `seq` modes; `prompt-mean` needs a number, because its weights
            assume this denominator.
        loss_scale_factor: constant divisor of `seq-mean-token-sum-norm`. None: T, which depends on the padding.

    Returns:
        Scalar loss, dtype of `loss_BT`.

    Raises:
        ValueError: the mode is unknown, the shapes differ, `dp_size` < 1, or the global count that the mode needs is
            missing although `dp_size` > 1 or the mode is `prompt-mean`.

    Source: arXiv 2510.13786, section 2 (sample, prompt and token average).
    """
    _check_inputs(loss_BT, mask_BT, mode, dp_size, batch_num_tokens, global_batch_size)
    mask_BT = mask_BT.bool()
    loss_B = loss_BT.masked_fill(~mask_BT, 0.0).sum(dim=-1)
    if mode == "token-sum":
        return loss_B.sum() * dp_size
    num_tokens_B = mask_BT.sum(dim=-1)
    if mode == "token-mean":
        count = num_tokens_B.sum() if batch_num_tokens is None else batch_num_tokens
        return loss_B.sum() / _at_least_one(count) * dp_size
    if global_batch_size is None:
        global_batch_size = (num_tokens_B > 0).sum()
    if mode == "seq-mean-token-mean":
        loss_B = loss_B / num_tokens_B.clamp(min=1)
    loss = loss_B.sum() / _at_least_one(global_batch_size) * dp_size
    if mode == "seq-mean-token-sum-norm":
        loss = loss / (loss_BT.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return loss


def _at_least_one(count: int | torch.Tensor) -> int | torch.Tensor:
    """Return the count, or 1 if it is 0; a tensor stays on its device."""
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1)


def _check_inputs(
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: str,
    dp_size: int,
    batch_num_tokens: int | torch.Tensor | None,
    global_batch_size: int | torch.Tensor | None,
) -> None:
    """Raise ValueError for what `aggregate_loss` refuses."""
    if mode not in AGG_MODES:
        raise ValueError(f"loss_agg_mode is {mode!r}; allowed are {', '.join(AGG_MODES)}. Set one of these.")
    if loss_BT.dim() != 2 or loss_BT.shape != mask_BT.shape:
        raise ValueError(
            f"loss_BT is {tuple(loss_BT.shape)} and mask_BT {tuple(mask_BT.shape)}; both must be the same [B, T]. "
            f"Pad the inputs before the call."
        )
    if dp_size < 1:
        raise ValueError(f"dp_size is {dp_size}; it must be >= 1. Pass the number of data-parallel ranks.")
    if mode == PROMPT_MEAN and global_batch_size is None:
        raise ValueError(MISSING_BATCH_SIZE)
    needed = {"token-mean": ("batch_num_tokens", batch_num_tokens), "token-sum": ("dp_size", dp_size)}
    name, count = needed.get(mode, ("global_batch_size", global_batch_size))
    if dp_size > 1 and count is None:
        raise ValueError(
            f"{name} is None with dp_size {dp_size}; {mode} needs the count over all ranks. "
            f"Pass {name} of the whole mini-batch."
        )
