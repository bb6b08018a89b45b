# SPDX-License-Identifier: Apache-2.0
"""The head over a vocabulary that is spread over ranks: the chunked pass on each, and two reductions.

Tensor-parallel models keep a part of the output layer's rows on each rank. Here each rank passes over its own part as
`chunked` does, and the ranks exchange a few numbers a token, never logits: the largest of their log-sum-exps, and then
sums.

Shape legend: N tokens, H hidden size, P rows of the weight on this rank, V vocabulary over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from scalerl_verl.head import chunked
from scalerl_verl.head.functional import LogProbs, check_arguments


@dataclass(frozen=True)
class VocabShard:
    """The ranks among which the rows of a head's weight are divided.

    Args:
        group: their process group.
        sums_hidden: whether the gradient of hidden states is added up over the ranks here; else each gets its own
            part, for a caller that adds them up (as sequence parallelism does when it scatters them).
    """

    group: dist.ProcessGroup
    sums_hidden: bool = True

    def combine(
        self, logp_N: torch.Tensor, lse_N: torch.Tensor, entropy_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (logp, log-sum-exp, entropy) over all columns from those over the columns of each rank, [N] each.

            e_r = exp(lse_r - m), m = max_r lse_r          lse = m + log sum_r e_r
            logp = logp_r + (lse_r - m) - log sum_r e_r    of the rank r that holds the label
            entropy = log sum_r e_r - sum_r e_r (lse_r - m - entropy_r) / sum_r e_r

        Differences from m are sent, so that the sums lose no digits. A token whose label is on no rank or on several
        has a log-probability of NaN.

        Args:
            logp_N: of the label among the columns of this rank; NaN if it is not one of them.
            lse_N: over the columns of this rank.
            entropy_N: of the distribution over the columns of this rank.
        """
        most_N = lse_N.clone()
        dist.all_reduce(most_N, op=dist.ReduceOp.MAX, group=self.group)
        below_N = lse_N - most_N
        share_N = below_N.exp()
        is_here_N = ~logp_N.isnan()
        # Far below the largest, a share is 0 and what it multiplies is finite.
        surprise_N = share_N * (below_N - entropy_N)
        chosen_N = torch.where(is_here_N, logp_N + below_N, 0.0)
        sums = torch.stack([share_N, surprise_N, chosen_N, is_here_N.to(lse_N)])
        dist.all_reduce(sums, group=self.group)
        total_N, surprise_N, chosen_N, num_here_N = sums
        log_total_N = total_N.log()
        logp_N = torch.where(num_here_N == 1, chosen_N - log_total_N, torch.nan)
        return logp_N, most_N + log_total_N, log_total_N - surprise_N / total_N

    def partial_dtype(self, hidden_dtype: torch.dtype) -> torch.dtype:
        """dtype of a rank's part of the gradient of hidden states: not narrower than FP32 if it is to be added up."""
        return torch.promote_types(hidden_dtype, torch.float32) if self.sums_hidden else hidden_dtype

    def add_up(self, partial_NH: torch.Tensor, hidden_dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of hidden states from the part of each rank, rounded once, [N, H]."""
        if self.sums_hidden:
            dist.all_reduce(partial_NH, group=self.group)
        return partial_NH.to(hidden_dtype)


def vocab_parallel_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    group: dist.ProcessGroup,
    first_token: int,
    *,
    temperature: float | torch.Tensor = 1.0,
    sums_hidden: bool = True,
    chunk_rows: int | None = None,
) -> LogProbs:
    """Return what `linear_logprobs` returns, for an LM head whose weight is sharded over ranks by rows (vocabulary).

    Every rank of the group calls it with the same hidden states, labels and temperature, and gets the same result. Each
    rank computes FP32 logits of its own rows, one chunk of tokens at a time. In forward, two all-reduces exchange five
    numbers per token. In backward, the gradient of the weight needs no exchange; the gradient of the hidden states is
    summed over the ranks in FP32 and rounded once.

    Args:
        hidden: last hidden states, [..., H], dtypes as in `linear_logprobs`.
        weight: the rows of the LM head's weight on this rank, [P, H], same dtypes; P >= 1 may differ between ranks.
        labels: token ids whose log-probabilities are returned, [...] integer in [0, V).
        group: process group of the ranks that hold the weight; each token id is on exactly one of them.
        first_token: token id of the first row of `weight`.
        temperature: divisor of the logits, > 0: one number, or one per token, [...] floating-point.
        sums_hidden: True: the gradient of `hidden` is summed over the ranks. False: each rank gets its own part, for a
            caller that sums them (sequence parallelism does so when it scatters them).
        chunk_rows: number of tokens in a chunk. None: as many as have 1.75 GiB of FP32 logits.

    Returns:
        `LogProbs(logp, entropy)`, both of shape [...], in nats, float32 (float64 if an operand is float64). A label
        that is on no rank yields NaN.

    Raises:
        ValueError: shapes, dtypes or devices do not match, temperature <= 0, `chunk_rows` < 1, or `first_token` < 0.

    Source: ScaleRL (arXiv 2510.13786), section 3.2; reductions as in Megatron-LM (arXiv 1909.08053), section 3.
    """
    if first_token < 0:
        raise ValueError(f"first_token is {first_token}; the token of the weight's first row, >= 0, is allowed.")
    check_arguments(hidden, weight, labels, temperature, chunk_rows, in_vocabulary=False)
    shape = labels.shape
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.expand(shape).reshape(-1).float()
    logp_N, entropy_N = chunked.linear_logprobs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1).long() - first_token,
        temperature,
        chunk_rows,
        # Alone, a rank has the whole head.
        VocabShard(group, sums_hidden) if dist.get_world_size(group) > 1 else None,
    )
    return LogProbs(logp_N.view(shape), entropy_N.view(shape))
