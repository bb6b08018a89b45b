# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine with our loss and FP32 head on 1 and 2 gloo ranks: tensor, sequence, pipeline, data parallel.

megatron_cpu.py says what is real there and what a stub. The truth is the paper's objective in float64 (arXiv
2510.13786, section 2) on megatron-core's model alone, row by row, without verl and without the package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.verl.ranks import run_ranks

CHILD = Path(__file__).with_name("megatron_engines.py")
ASIDE = Path(sys.prefix) / "opt" / "megatron"
"""Where tests/run.sh installs it: in the environment itself, every process that imports verl would import it, too."""
GRADIENT_TOLERANCE = 1e-5
"""relative, of all gradients together, in FP32 (6e-8 a rounding) against float64"""
LOGP_TOLERANCE = 1e-5
"""log-probs lie within 30 of 0; FP32 is off by a few times 30 x 2^-24 = 2e-6, bf16 logits by 3e-2"""
KINDS = ("fused", "logits")
ONE_RANK = ("one rank", "one rank, tied", "one rank, rows padded, single rows", "one rank, dynamic")
TWO_RANKS = (
    "TP 2",
    "TP 2, tied, single rows",
    "TP 2, sequence parallel",
    "TP 2, sequence parallel, tied, rows padded",
    "DP 2",
    "DP 2, dynamic",
    "PP 2",
    "PP 2, tied, single rows",
)

pytestmark = pytest.mark.skipif(
    not (ASIDE / "megatron" / "core").is_dir(),
    reason=f"megatron-core is not in {ASIDE}: bash tests/run.sh --setup-only installs it where it can be had",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> what each rank found; truth|TIED|LOSS -> gradients."""
    folder = tmp_path_factory.mktemp("megatron")
    found: dict[str, list[dict[str, Any]]] = {}
    for world in (1, 2):
        run_ranks(CHILD, folder, world, ASIDE)
        ranks = [torch.load(folder / f"megatron-{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    found["weights"] = [torch.load(folder / "megatron-weights.pt")]
    return found


def truth_of(results: dict[str, list[dict[str, Any]]], name: str) -> dict[str, torch.Tensor]:
    loss = "cap" if "dynamic" in name else "terms"
    gradients: dict[str, torch.Tensor] = results[f"truth|{'tied' in name}|{loss}"][0]["gradients"]
    return gradients


def relative_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    assert sorted(found) == sorted(truth)
    flat = [torch.cat([gradients[name].flatten().double() for name in sorted(truth)]) for gradients in (found, truth)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.fault("Megatron divides by its micro-batches and averages over ranks: another loss for another split")
@pytest.mark.works_with("Megatron", "CISPO", "prompt average", "advantages", "FP32 head")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [*ONE_RANK, *TWO_RANKS])
def test_gradient_is_that_of_the_paper_s_objective(
    results: dict[str, list[dict[str, Any]]], layout: str, kind: str
) -> None:
    for rank in results[f"{layout}|{kind}"]:
        assert relative_error(rank["gradients"], truth_of(results, layout)) < GRADIENT_TOLERANCE


def test_losses_and_models_of_this_test_differ(results: dict[str, list[dict[str, Any]]]) -> None:
    truths = [results[f"truth|{tied}|{loss}"][0]["gradients"] for tied in (False, True) for loss in ("cap", "terms")]
    untied_cap, untied, tied_cap, tied = truths
    assert relative_error(untied_cap, untied) > 0.01 and relative_error(tied_cap, tied) > 0.01
    shared = "embedding.word_embeddings.weight"
    assert relative_error({shared: untied[shared]}, {shared: tied[shared]}) > 0.01


def test_rows_that_megatron_pads_the_vocabulary_with_have_no_part(results: dict[str, list[dict[str, Any]]]) -> None:
    truth = truth_of(results, "TP 2, vocabulary padded")
    for rank in results["TP 2, vocabulary padded|fused"]:
        found = rank["gradients"]
        assert not found["output_layer.weight"][len(truth["output_layer.weight"]) :].any()
        cut = {name: gradient[: len(truth[name])] for name, gradient in found.items()}
        assert relative_error(cut, truth) < GRADIENT_TOLERANCE


def logp_error(results: dict[str, list[dict[str, Any]]], name: str, tied: bool) -> float:
    """Largest error of log-probs against float64 on what the output layer got, in bf16."""
    ranks = results[name]
    whole = results["weights"][0][tied]["embedding.word_embeddings.weight" if tied else "output_layer.weight"]
    worst = 0.0
    for batches in zip(*(rank["seen"] for rank in ranks), strict=True):
        parts = [batch["hidden"] for batch in batches]
        assert {part.dtype for part in parts} == {torch.bfloat16}
        hidden = torch.cat(parts).transpose(0, 1).double()
        truth = (hidden @ whole.bfloat16().double().t()).log_softmax(-1)
        for batch in batches:  # each rank's answer is about all positions
            assert batch["log_probs"].dtype == torch.float32
            chosen, entropy = truth.gather(-1, batch["labels"][..., None])[..., 0], -(truth.exp() * truth).sum(-1)
            for found, expected in ((batch["log_probs"], chosen), (batch["entropy"], entropy)):
                worst = max(worst, float((found.double() - expected)[batch["is_token"]].abs().max()))
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "tied"), [("bf16", False), ("bf16, TP 2", True)])
def test_log_probs_of_bf16_weights_are_fp32(
    results: dict[str, list[dict[str, Any]]], layout: str, tied: bool, kind: str
) -> None:
    assert logp_error(results, f"{layout}|{kind}", tied) < LOGP_TOLERANCE
    assert logp_error(results, f"{layout}|without", tied) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["one rank", "TP 2", "PP 2", "bf16, TP 2"])
def test_every_rank_notes_what_it_measured(results: dict[str, list[dict[str, Any]]], layout: str, kind: str) -> None:
    """The trainer asks every process for it, also those whose pipeline stage has no output layer."""
    for rank in results[f"{layout}|{kind}"]:
        (record,) = rank["facts"]
        assert (record["side"], record["backend"], record["fused"]) == ("trainer", "fp32", kind == "fused")
        assert record["weight_dtype"] == ("bfloat16" if "bf16" in layout else "float32")
        assert 0 < record["max_error"] < record["tolerance"]


@pytest.mark.parametrize("layout", ["TP 2", "DP 2", "PP 2"])
def test_metrics_are_those_of_one_rank(results: dict[str, list[dict[str, Any]]], layout: str) -> None:
    """Of every rank that has the loss; verl averages data-parallel ranks afterwards."""
    (alone,) = (rank["metrics"] for rank in results["one rank|fused"])
    ranks = [rank["metrics"] for rank in results[f"{layout}|fused"] if rank["metrics"]]
    assert len(ranks) == (1 if layout == "PP 2" else 2) and "actor/pg_loss" in alone

    def total(metrics: list[dict[str, Any]]) -> float:
        return sum(sum(map(float, one["actor/pg_loss"].values)) for one in metrics) / len(metrics)

    assert total(ranks) == pytest.approx(total([alone]), rel=1e-5)
