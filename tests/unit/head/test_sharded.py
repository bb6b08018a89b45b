# SPDX-License-Identifier: Apache-2.0
"""The head over a vocabulary on two gloo ranks, unequal parts, against float64 of the whole head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scalerl_verl.head import linear_logprobs, vocab_parallel_logprobs
from tests.unit.head.sharded_head import CASES
from tests.unit.verl.ranks import run_ranks

CHILD = Path(__file__).with_name("sharded_head.py")
VALUES = {"float32": 1e-5, "float64": 1e-12, "large logits": 2e-3}
"""Absolute, of log-probs and entropies within 30 of 0; large logits reach 1,000, where FP32 numbers lie 6e-5 apart."""
GRADIENTS = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 4e-3, "large logits": 1e-3, "unlike dtypes": 4e-3}
"""Relative; a gradient in bf16 is rounded once, by 2^-9."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    run_ranks(CHILD, folder, 2)
    return [torch.load(folder / f"sharded-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_whole_head(ranks: list[dict[str, Any]], case: str) -> None:
    values, gradients = (allowed.get(case, allowed["float32"]) for allowed in (VALUES, GRADIENTS))
    for found in (rank[case] for rank in ranks):
        assert found["dtype"] == (torch.float64 if case == "float64" else torch.float32)
        kept, (logp, entropy, hidden, weight), truth = found["kept"], found["ours"], found["truth"]
        for ours, theirs in ((logp, truth[0]), (entropy, truth[1])):
            assert _largest(ours, theirs, kept) < values
        for ours, theirs in ((hidden, truth[2]), (weight, truth[3][found["rows"]])):
            assert ours.isfinite().all()
            assert float((ours.double() - theirs).norm()) <= gradients * float(theirs.norm())


def _largest(ours: torch.Tensor, theirs: torch.Tensor, kept: torch.Tensor) -> float:
    errors = (ours.double() - theirs)[kept].abs()
    return float(errors.max()) if len(errors) else 0.0


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_to_the_bit(ranks: list[dict[str, Any]], case: str) -> None:
    """Each makes the loss for itself: what differs would drive their weights apart."""
    for ours, theirs in zip(ranks[0][case]["ours"][:3], ranks[1][case]["ours"][:3], strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_label_on_no_rank_is_nan(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["label of no rank"].isnan().tolist() == [False, False, True]


def test_one_rank_has_the_whole_head(tmp_path: Path) -> None:
    hidden, weight, labels = torch.randn(7, 4), torch.randn(9, 4), torch.arange(7)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        found = vocab_parallel_logprobs(hidden, weight, labels, dist.group.WORLD, 0)
        with pytest.raises(ValueError, match="first_token is -1"):
            vocab_parallel_logprobs(hidden, weight, labels, dist.group.WORLD, -1)
        with pytest.raises(ValueError, match="with the same H"):
            vocab_parallel_logprobs(hidden, weight[:, :3], labels, dist.group.WORLD, 0)
    finally:
        dist.destroy_process_group()
    assert torch.equal(found.logp, linear_logprobs(hidden, weight, labels).logp)
