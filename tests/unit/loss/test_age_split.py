# SPDX-License-Identifier: Apache-2.0
"""Log-ratios by the age of their tokens: by hand, for every split, and where one cause alone is at work."""

from __future__ import annotations

import math

import pytest
import torch
from verl.utils.metric import Metric

from scalerl_verl.loss import age_split, token_means

VERSION, K = 7, 2
P = "scalerl/mismatch"


def measure(
    log_ratio_BT: torch.Tensor,
    runs_B: list,
    mask_BT: torch.Tensor | None = None,
    ranks: list[list[list[int]]] | None = None,
) -> dict[str, float]:
    """What verl's workers and the driver make of a batch; by default one micro-batch.

    Args:
        log_ratio_BT: the trainer's log-probs beside recorded ones of -1.
        runs_B: of each row.
        mask_BT: by default all tokens train.
        ranks: rows of each micro-batch of each rank.
    """
    mask_BT = torch.ones_like(log_ratio_BT).bool() if mask_BT is None else mask_BT
    of_ranks = []
    for micro_batches in ranks or [[list(range(len(runs_B)))]]:
        total: dict[str, Metric] = {}
        for rows in micro_batches:
            recorded = torch.full_like(log_ratio_BT[rows], -1.0)
            runs = [runs_B[row] for row in rows]
            sums = age_split.sum_by_age(log_ratio_BT[rows] - 1.0, recorded, mask_BT[rows], runs, VERSION, K)
            for name, value in age_split.report(sums.tolist()).items():
                total.setdefault(name, Metric("sum")).append(value)
        of_ranks.append(total)
    return token_means.divide({name: Metric.aggregate_dp([rank[name] for rank in of_ranks]) for name in of_ranks[0]})


def test_hand_computed_means_by_age() -> None:
    """Row 0 is fresh; row 1 goes from age 2 to 0 over a masked token; row 2 was sampled one version ago."""
    log_ratio_BT = torch.tensor([[1.0, -3.0, 0.0, 0.0], [-4.0, 9.0, 6.0, 8.0], [5.0, 0.0, 0.0, 0.0]]).double()
    mask_BT = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]])
    runs_B = [[[7, 2]], [[5, 1], [7, 2]], [[6, 1]]]
    assert measure(log_ratio_BT, runs_B, mask_BT) == pytest.approx(
        {
            f"{P}/engines/log_ratio_abs_mean": 2.0,
            f"{P}/engines/log_ratio_square_mean": 5.0,
            f"{P}/age_0/log_ratio_abs_mean": (1 + 3 + 6 + 8) / 4,
            f"{P}/age_0/log_ratio_square_mean": (1 + 9 + 36 + 64) / 4,
            f"{P}/age_1/log_ratio_abs_mean": 5.0,
            f"{P}/age_1/log_ratio_square_mean": 25.0,
            f"{P}/age_2/log_ratio_abs_mean": 4.0,
            f"{P}/age_2/log_ratio_square_mean": 16.0,
            f"{P}/log_ratio_square_mean": (1 + 9 + 16 + 36 + 64 + 25) / 6,
        }
    )


def test_runs_are_followed_token_by_token() -> None:
    runs_B = [[[5, 2], [6, 0], [6, 3], [7, 1]]]
    found = measure(torch.tensor([[1.0, 1.0, 2.0, 2.0, 2.0, 4.0]]).double(), runs_B)
    means = [found[f"{P}/age_{age}/log_ratio_abs_mean"] for age in range(K + 1)]
    assert means == [4.0, 2.0, 1.0] and f"{P}/engines/log_ratio_abs_mean" not in found


def test_tokens_without_a_ratio_or_a_version_do_not_count() -> None:
    """A row of padding has the runs of the row that it was made of; a token the sampler deemed impossible counts."""
    nan, inf = math.nan, math.inf
    train_BT = torch.tensor([[nan, -1.0, -2.0], [-1.0, -1.0, -1.0], [-9.0, -9.0, -9.0]])
    rollout_BT = torch.tensor([[-1.0, -inf, nan], [-4.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    runs_B = [[[6, 3]], [[7, 1]], [[7, 3]]]
    sums = age_split.sum_by_age(train_BT, rollout_BT, mask_BT, runs_B, VERSION, K)
    assert sums.tolist() == [[1, 3, 9], [0, 0, 0], [1, 80, 6400], [0, 0, 0]]
    assert not age_split.sum_by_age(train_BT[1:], rollout_BT[1:], mask_BT[1:], [(), ()], VERSION, K).any()
    assert not age_split.sum_by_age(train_BT[1:], rollout_BT[1:], mask_BT[1:], [[[3, 1]], ()], VERSION, K).any()


SPLITS = {
    "rows by themselves, with padding": [[[row] for row in range(10)]],
    "two ranks of unlike work": [[[0, 5], [9]], [[1, 2, 3, 4], [6, 7, 8]]],
    "four ranks": [[[0, 1, 2, 3, 4, 5, 6]], [[7]], [[8]], [[9]]],
}


@pytest.mark.parametrize("split", SPLITS)
def test_no_split_changes_anything(split: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 9, 2, 1, 5, 1, 3, 8, 0, 0]
    mask_BT = torch.arange(9)[None, :] < torch.tensor(lengths)[:, None]
    log_ratio_BT = torch.randn(10, 9, generator=generator).double()
    # Ages 0, 1 and 2 in turns, some in one response; the last two rows are padding.
    runs_B = [[[7 - row % 3, length // 2], [7, length - length // 2]] for row, length in enumerate(lengths)]
    runs_B[8:] = [[[7, 1]], [[7, 1]]]
    whole = measure(log_ratio_BT, runs_B, mask_BT)
    assert len(whole) == 2 * (K + 2) + 1
    assert measure(log_ratio_BT, runs_B, mask_BT, SPLITS[split]) == pytest.approx(whole, rel=1e-12)


def test_where_age_alone_is_at_work_it_explains_all() -> None:
    """The engines agree exactly: fresh responses have a ratio of 1, older tokens have not."""
    found = measure(torch.tensor([[0.0, 0.0], [0.5, 0.0], [1.0, 1.0]]).double(), [[[7, 2]], [[6, 1], [7, 1]], [[5, 2]]])
    means = [found[f"{P}/age_{age}/log_ratio_abs_mean"] for age in range(K + 1)]
    assert means == [0.0, 0.5, 1.0]
    assert age_split.explained_by_age(found, found[age_split.SQUARE_OF_ENGINES]) == 1.0


def test_where_the_engines_alone_are_at_work_age_explains_nothing() -> None:
    """Weights that do not change: every age has the same spread."""
    generator = torch.Generator().manual_seed(1)
    log_ratio_BT = 0.02 * torch.randn(90, 500, generator=generator).double()
    found = measure(log_ratio_BT, [[[7 - row % 3, 500]] for row in range(90)])
    part = age_split.explained_by_age(found, found[age_split.SQUARE_OF_ENGINES])
    # The mean square of 15,000 tokens is known to 1.2% (one standard deviation).
    assert part == pytest.approx(0.0, abs=0.05)
    means = [found[f"{P}/age_{age}/log_ratio_abs_mean"] for age in range(K + 1)]
    assert means == pytest.approx([0.02 * math.sqrt(2 / math.pi)] * 3, rel=0.05)


def test_both_causes_add_up() -> None:
    """Independent parts: .02 of the engines everywhere, .04 more at age 1, in half of the tokens."""
    generator = torch.Generator().manual_seed(2)
    engines_BT, drift_BT = torch.randn(2, 80, 500, generator=generator).double().unbind()
    ages_B = torch.arange(80) % 2
    log_ratio_BT = 0.02 * engines_BT + 0.04 * drift_BT * ages_B[:, None]
    found = measure(log_ratio_BT, [[[7 - int(age), 500]] for age in ages_B])
    part = age_split.explained_by_age(found, found[age_split.SQUARE_OF_ENGINES])
    assert part == pytest.approx((0.04**2 / 2) / (0.02**2 + 0.04**2 / 2), abs=0.03)


@pytest.mark.parametrize(
    ("metrics", "engines"), [({}, 1.0), ({age_split.SQUARE_OF_ALL: 1.0}, None), ({age_split.SQUARE_OF_ALL: 0.0}, 0.0)]
)
def test_an_unknown_part_is_none(metrics: dict[str, float], engines: float | None) -> None:
    assert age_split.explained_by_age(metrics, engines) is None
