# SPDX-License-Identifier: Apache-2.0
"""Means over tokens of a whole batch, from verl's workers, which average over micro-batches as if all were of one size.

With verl's average a micro-batch of padding rows counts as much as one of thousands of tokens. So a worker reports two
values: the mean times its number of tokens, and the number of tokens. verl sums both over micro-batches and averages
them over ranks and updates, and the driver divides the first by the second.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

WEIGHT = "/weight"
"""What the name of a mean's number of tokens ends in; no "max" or "min", by which verl would take it for one."""
_SIGN_OF = {"scalerl/loss/capped_frac_pos": 1, "scalerl/loss/capped_frac_neg": -1}
"""Means over the tokens of one sign of the advantage; all others are over all tokens."""
_NO_TOKEN = 1.0e-9
"""Weight of a micro-batch without such a token: its value, one that says nothing, stands only where all are like it."""

Measured = Mapping[str, tuple[float, str]]
"""Name -> value, and how micro-batches combine it: "mean", "sum", "max", "min"."""


def report(measured: Measured, mask_BT: torch.Tensor, advantages_BT: torch.Tensor | None = None) -> dict[str, float]:
    """Values of one micro-batch for verl's workers: means as a product and a weight, others as they are.

    Args:
        measured: of the micro-batch.
        mask_BT: True where a token trains, [B, T] bool.
        advantages_BT: where a mean is over tokens of one sign, [B, T].
    """
    counts = {0: mask_BT.sum()}
    if advantages_BT is not None:
        counts |= {sign: (mask_BT & (advantages_BT * sign > 0)).sum() for sign in (1, -1)}
    # One transfer to the host, not one per count.
    numbers = dict(zip(counts, torch.stack(list(counts.values())).tolist(), strict=True))
    found = {}
    for name, (value, how) in measured.items():
        found[name] = value
        if how == "mean":
            found[name + WEIGHT] = max(float(numbers[_SIGN_OF.get(name, 0)]), _NO_TOKEN)
            found[name] = value * found[name + WEIGHT]
    return found


def aggregations(measured: Measured) -> dict[str, str]:
    """Name of each value of `report` -> how micro-batches and ranks combine it."""
    found = {name: "sum" if how == "mean" else how for name, (_, how) in measured.items()}
    return found | {name + WEIGHT: "sum" for name, (_, how) in measured.items() if how == "mean"}


def divide(reported: Mapping[str, float]) -> dict[str, float]:
    """The means, and all other values as they are, of what verl made of `report`; no mean over no token."""
    weights = {name: reported.get(name + WEIGHT) for name in reported if not name.endswith(WEIGHT)}
    return {
        name: reported[name] if weight is None else reported[name] / weight
        for name, weight in weights.items()
        if weight != 0
    }
