# SPDX-License-Identifier: Apache-2.0
"""Weights per row that turn the fixed denominators of a loss into counts of what trains.

Shape legend: B rows (outputs), P groups (prompts). A response is one row, or the rows of one session of an agent loop
that left several outputs.

Only the driver sees whole groups: a mini-batch, a rank and a micro-batch each may cut them. So the weights of groups
are computed over the whole batch and folded into the advantages, in which the loss is positively homogeneous; the
trainer then only divides by constants. Write l_it for the loss of a token, D for the trainer's denominator averaged
over the mini-batches of the batch, K for the kept rows with at least one unmasked token. With weight w_i the trainer
computes (1/D) sum_it w_i l_it (token-mean, token-sum, prompt-mean, seq-mean-token-sum) and we solve for w_i:

* prompt-mean: wanted (1/P_kept) sum_g (1/T_g) sum_{i in g} sum_t l_it with T_g = tokens of the rows of g in K, and
  D = num_rows, because each of M equal mini-batches divides by num_rows / M and the M results are averaged:
      w_i = num_rows / (P_kept * T_g)
* seq modes: wanted the mean over the N_kept responses with a row in K of the sum or mean over a response's tokens, and
  D = num_rows. The trainer sums rows; where it takes the mean over the T_i tokens of a row, the share of the row in the
  T_s tokens of its response makes that the mean over the response:
      w_i = num_rows / N_kept              (seq-mean-token-sum, -norm)
      w_i = num_rows / N_kept * T_i / T_s  (seq-mean-token-mean; T_i = T_s for a response of one row)
* token-mean: wanted the mean over the tokens of K, and D = T_all, all unmasked tokens of the batch:
      w_i = T_all / T_kept
  A mini-batch divides by its own tokens. The factor is that of the whole batch: exact for one mini-batch per batch,
  and for several up to how T_all / T_kept differs between them.
* token-sum: there is no denominator:
      w_i = 1
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalerl_verl.advantage.sessions import Sessions
from scalerl_verl.advantage.zero_variance import index_groups
from scalerl_verl.loss.aggregation import AGG_MODES
from scalerl_verl.names import PROMPT_MEAN


def row_weights(
    mode: str,
    num_tokens_B: ArrayLike,
    group_ids_B: Sequence[Hashable] | NDArray[Any],
    kept_B: ArrayLike,
    *,
    num_rows: int,
    trains_B: ArrayLike,
    sessions: Sessions | None = None,
) -> NDArray[np.float64]:
    """Return the weight of every row; multiply it into the row's advantage before the loss is aggregated with `mode`.

        prompt-mean              num_rows / (P_kept * T_g)
        seq-mean-token-sum       num_rows / N_kept
        seq-mean-token-sum-norm  num_rows / N_kept
        seq-mean-token-mean      num_rows / N_kept * T_i / T_s
        token-mean               T_all / T_kept
        token-sum                1

    The weights turn the fixed denominator of the trainer into the count of what is kept. P_kept and N_kept are the
    numbers of prompts and of responses with a kept row, T_kept the number of kept tokens, T_all that of all unmasked
    tokens. T_g, T_s and T_i are the kept tokens of the row's group, of its response and of the row; T_i = T_s where a
    response is one row. The module's docstring derives the formulas. Rows that are not kept, and kept rows without an
    unmasked token, get weight 0. If nothing is kept, all weights are 0.

    Args:
        mode: one of the six modes above, as in `aggregate_loss`.
        num_tokens_B: number of unmasked tokens per row, as the trainer counts them, [B] integer.
        group_ids_B: hashable id of the prompt per row, [B].
        kept_B: rows that count in the loss, such as `AdvantageResult.kept_B`, [B] bool.
        num_rows: number of rows that the trainer divides by, padding rows included.
        trains_B: rows that train, [B] bool; every kept row must train.
        sessions: which rows make up one response (an agent loop may leave several). None: every row is a response.

    Returns:
        Weight per row, [B] float64.

    Raises:
        ValueError: the mode is unknown, lengths differ, a token count is negative or not finite, a kept row does not
            train, or `num_rows` is below the number of rows that train.

    Source: arXiv 2510.13786, section 2 (prompt average).
    """
    if mode not in AGG_MODES:
        raise ValueError(f"loss_agg_mode is {mode!r}; allowed are {', '.join(AGG_MODES)}. Set one of these.")
    num_tokens_B = np.asarray(num_tokens_B, dtype=np.float64)
    kept_B, trains_B = np.asarray(kept_B), np.asarray(trains_B)
    _check_rows(num_tokens_B, kept_B, trains_B, num_rows)
    counted_B = kept_B & (num_tokens_B > 0)
    group_index_B, num_prompts = index_groups(group_ids_B, counted_B)

    weights_B = np.zeros(kept_B.shape, dtype=np.float64)
    if not counted_B.any():
        return weights_B
    tokens = num_tokens_B[counted_B]
    if mode == PROMPT_MEAN:
        index = group_index_B[counted_B]
        tokens_P = np.bincount(index, weights=tokens, minlength=num_prompts)
        weights_B[counted_B] = num_rows / (num_prompts * tokens_P[index])
    elif mode == "token-mean":
        weights_B[counted_B] = num_tokens_B.sum() / tokens.sum()
    elif mode == "token-sum":
        weights_B[counted_B] = 1.0
    else:
        sessions = sessions or Sessions.one_per_row(counted_B.size)
        weights_B[counted_B] = num_rows / np.count_nonzero(sessions.has_any(counted_B))
        if mode == "seq-mean-token-mean":
            tokens_S = sessions.sum_rows(np.where(counted_B, num_tokens_B, 0.0))
            weights_B[counted_B] *= tokens / tokens_S[sessions.index_B[counted_B]]
    return weights_B


def _check_rows(num_tokens_B: NDArray[np.float64], kept_B: NDArray[Any], trains_B: NDArray[Any], num_rows: int) -> None:
    """Raise ValueError for arrays that do not describe one batch."""
    arrays = {"num_tokens_B": num_tokens_B, "kept_B": kept_B, "trains_B": trains_B}
    shapes = {name: array.shape for name, array in arrays.items()}
    if num_tokens_B.ndim != 1 or len(set(shapes.values())) != 1:
        raise ValueError(f"Shapes are {shapes}; all must be the same [B]. Pass one value per row.")
    if kept_B.dtype != np.bool_ or trains_B.dtype != np.bool_:
        raise ValueError(
            f"kept_B and trains_B have dtypes {kept_B.dtype} and {trains_B.dtype}; bool is allowed. "
            f"Convert them with .astype(bool)."
        )
    if not np.isfinite(num_tokens_B).all() or (num_tokens_B < 0).any():
        raise ValueError("num_tokens_B holds negative or non-finite counts; pass the sum of each row's response mask.")
    if (kept_B & ~trains_B).any():
        raise ValueError(
            f"{int((kept_B & ~trains_B).sum())} rows are kept but do not train; kept_B must be a subset of trains_B. "
            f"Pass the kept_B that was computed with this trains_B."
        )
    if num_rows < int(trains_B.sum()):
        raise ValueError(
            f"num_rows is {num_rows} but {int(trains_B.sum())} rows train; it must count all rows of the batch, "
            f"padding rows included. Pass the number of rows that the trainer receives."
        )
