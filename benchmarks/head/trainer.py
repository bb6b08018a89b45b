# SPDX-License-Identifier: Apache-2.0
"""Log-probs of labels from hidden states, forward and backward of a CISPO loss: our FP32 head against its rivals.

python -m benchmarks.head.trainer                    on a CUDA device, as recorded; verl's heads if verl is installed
python -m benchmarks.head.trainer --dry-run --cases 8192x4096x151936 --repetitions 5

Every implementation is checked against float64 first; one that fails its bounds is recorded as failed and not timed.
"""

from __future__ import annotations

import argparse
import math
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.rows import append_rows, describe_gpu, run_facts
from scalerl_verl.head import fp32_logits, linear_logprobs, shared_pass_logprobs
from scalerl_verl.head.matmul import exact_fp32
from scalerl_verl.loss.cispo import cispo_token_loss

CASES = ("8192x4096x151936", "16384x1024x151936", "8192x4096x32000")
EPS_MAX = 5.0
LOGIT_SD = 2.0
"""Standard deviation of the logits. Tensor cores cut off the low bits of partial sums, so errors grow with it: at 3,
log-probs of every product with bf16 operands and FP32 sums are 1e-4 off."""
MAX_LOGP_ERROR, MAX_GRADIENT_ERROR = 7e-5, 3e-3
"""What ours must keep. Log-probs: FP32 sums over H products, log-sum-exp. Gradients: two roundings to bf16."""
RIVAL_LOGP_ERROR, RIVAL_GRADIENT_ERROR = 0.2, 0.1
"""A rival with 16-bit logits is that far off; more would be a broken call, not a rival."""
CHECKED_TOKENS = 256
TRUTH_ROWS = 512


@dataclass
class Batch:
    """Operands of the head and of the loss."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    labels_N: torch.Tensor
    rollout_N: torch.Tensor
    advantages_N: torch.Tensor

    def token_loss(self, logp_C: torch.Tensor, at: slice = slice(None)) -> torch.Tensor:
        """CISPO of some tokens, all of them training."""
        rollout_C, advantages_C = self.rollout_N[at], self.advantages_N[at]
        mask_C = torch.ones_like(rollout_C, dtype=torch.bool)
        return cispo_token_loss(logp_C[None], rollout_C[None], advantages_C[None], mask_C[None], EPS_MAX)[0]

    def loss(self, logp_N: torch.Tensor) -> torch.Tensor:
        return self.token_loss(logp_N).sum() / len(logp_N)


def make_batch(num_tokens: int, num_hidden: int, num_vocab: int) -> Batch:
    """bf16 operands whose logits have a standard deviation of `LOGIT_SD`; rollouts off by about 0.5 from the policy."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    hidden_NH = normal(num_tokens, num_hidden).bfloat16().requires_grad_()
    weight_VH = (normal(num_vocab, num_hidden) * LOGIT_SD / math.sqrt(num_hidden)).bfloat16().requires_grad_()
    labels_N = torch.randint(num_vocab, (num_tokens,), device="cuda", generator=generator)
    with torch.no_grad():
        logp_N = linear_logprobs(hidden_NH, weight_VH, labels_N).logp
    return Batch(hidden_NH, weight_VH, labels_N, logp_N + 0.5 * normal(num_tokens), normal(num_tokens))


def plain_bf16(batch: Batch) -> torch.Tensor:
    """All logits in bf16, log-softmax in FP32: a model's own head."""
    logits_NV = torch.nn.functional.linear(batch.hidden_NH, batch.weight_VH)
    return torch.log_softmax(logits_NV.float(), dim=-1).gather(1, batch.labels_N[:, None])[:, 0]


def all_fp32_logits(batch: Batch) -> torch.Tensor:
    """All logits in FP32 from our unfused head, log-softmax of PyTorch."""
    logits_NV = fp32_logits(batch.hidden_NH, batch.weight_VH)
    return torch.log_softmax(logits_NV, dim=-1).gather(1, batch.labels_N[:, None])[:, 0]


def cast_checkpointed(batch: Batch) -> torch.Tensor:
    """Operands cast to FP32 and multiplied so, chunk by chunk, recomputed in backward."""

    def chunk(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        logits_CV = hidden_CH.float() @ weight_VH.float().t()
        return torch.log_softmax(logits_CV, dim=-1).gather(1, labels_C[:, None])[:, 0]

    parts = zip(batch.hidden_NH.split(1024), batch.labels_N.split(1024), strict=True)
    with exact_fp32():
        return torch.cat(
            [
                torch.utils.checkpoint.checkpoint(chunk, hidden, batch.weight_VH, labels, use_reentrant=False)
                for hidden, labels in parts
            ]
        )


Implementation = Callable[[Batch], torch.Tensor]
OURS: dict[str, Implementation] = {
    "scalerl_verl chunked": lambda b: linear_logprobs(b.hidden_NH, b.weight_VH, b.labels_N).logp,
    "scalerl_verl shared pass": lambda b: shared_pass_logprobs(b.hidden_NH, b.weight_VH, b.labels_N, b.token_loss).logp,
}
RIVALS: dict[str, Implementation] = {
    "plain bf16 logits": plain_bf16,
    "all FP32 logits": all_fp32_logits,
    "cast to FP32, checkpointed": cast_checkpointed,
}
SLOW = frozenset({"cast to FP32, checkpointed"})


def verl_rivals() -> dict[str, Implementation]:
    """verl's two fused heads; empty where verl is not installed."""
    try:
        from verl.utils.experimental.torch_functional import FusedLinearForPPO
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
    except ImportError as error:
        print(f"without verl's heads: {error}")
        return {}
    return {
        "verl triton": lambda b: linear_cross_entropy(b.hidden_NH, b.weight_VH, b.labels_N, 1.0, "none")[0],
        "verl torch": lambda b: FusedLinearForPPO()(b.hidden_NH, b.weight_VH, b.labels_N)[0],
    }


def step(batch: Batch, run: Implementation) -> torch.Tensor:
    """Forward and backward; the gradients are on the operands after."""
    batch.hidden_NH.grad = batch.weight_VH.grad = None
    logp_N = run(batch)
    batch.loss(logp_N).backward()
    return logp_N.detach()


@torch.no_grad()
def truth(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs of all tokens, gradient of `CHECKED_TOKENS` hidden states, gradient of the weight) in float64."""
    weight_VH = batch.weight_VH.double()
    logp_N = torch.empty(len(batch.labels_N), dtype=torch.float64, device="cuda")
    grad_weight_VH = torch.zeros_like(weight_VH)
    grad_hidden = []
    for start in range(0, len(logp_N), TRUTH_ROWS):
        at = slice(start, start + TRUTH_ROWS)
        hidden_CH, labels_C = batch.hidden_NH[at].double(), batch.labels_N[at, None]
        log_probs_CV = torch.log_softmax(hidden_CH @ weight_VH.t(), dim=-1)
        logp_N[at] = log_probs_CV.gather(1, labels_C)[:, 0]
        with torch.enable_grad():
            leaf_C = logp_N[at].clone().requires_grad_()
            (slope_C,) = torch.autograd.grad(batch.token_loss(leaf_C, at).sum() / len(logp_N), leaf_C)
        grad_CV = log_probs_CV.exp_().mul_(-slope_C[:, None]).scatter_add_(1, labels_C, slope_C[:, None])
        grad_weight_VH.addmm_(grad_CV.t(), hidden_CH)
        if start < CHECKED_TOKENS:
            grad_hidden.append(grad_CV @ weight_VH)
    return logp_N, torch.cat(grad_hidden)[:CHECKED_TOKENS], grad_weight_VH


def errors(batch: Batch, run: Implementation, expected: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Largest error of a log-prob; relative errors (norms) of both gradients."""
    logp_N = step(batch, run).double()

    def relative(value: torch.Tensor, true: torch.Tensor) -> float:
        parts = zip(value.split(8192), true.split(8192), strict=True)  # the weight's would double its memory
        difference = sum(float((got.double() - want).square().sum()) for got, want in parts)
        return math.sqrt(difference) / float(true.norm())

    return {
        "logp_max_abs": float((logp_N - expected[0]).abs().max()),
        "grad_hidden_rel": relative(batch.hidden_NH.grad[:CHECKED_TOKENS], expected[1]),
        "grad_weight_rel": relative(batch.weight_VH.grad, expected[2]),
    }


def passes(name: str, error: dict[str, float]) -> bool:
    ours = name in OURS
    gradient = max(error["grad_hidden_rel"], error["grad_weight_rel"])
    return error["logp_max_abs"] <= (MAX_LOGP_ERROR if ours else RIVAL_LOGP_ERROR) and gradient <= (
        MAX_GRADIENT_ERROR if ours else RIVAL_GRADIENT_ERROR
    )


def peak_gib(batch: Batch, run: Implementation) -> float:
    """Memory on top of the batch at the peak of one step, the operands' gradients included."""
    batch.hidden_NH.grad = batch.weight_VH.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(batch, run)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(batch: Batch, impls: dict[str, Implementation], repetitions: int) -> dict[str, list[float]]:
    """Milliseconds per step, the implementations taking turns; slow ones take every fifth."""
    times: dict[str, list[float]] = {name: [] for name in impls}
    for repetition in range(repetitions + 2):
        for name, run in impls.items():
            if name in SLOW and repetition % 5 != 2:
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step(batch, run)
            end.record()
            torch.cuda.synchronize()
            if repetition >= 2:  # two rounds to warm up
                times[name].append(begin.elapsed_time(end))
    return times


def bench_case(case: str, repetitions: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Check, measure and print one case; one row an implementation."""
    num_tokens, num_hidden, num_vocab = map(int, case.split("x"))
    batch = make_batch(num_tokens, num_hidden, num_vocab)
    impls = {**OURS, **RIVALS, **verl_rivals()}
    expected = truth(batch)
    checked = {name: errors(batch, run, expected) for name, run in impls.items()}
    del expected
    times = measure(batch, {name: run for name, run in impls.items() if passes(name, checked[name])}, repetitions)
    rows = []
    for name, run in impls.items():
        row: dict[str, Any] = {
            "case": {
                "tokens": num_tokens,
                "hidden": num_hidden,
                "vocab": num_vocab,
                "dtype": "bfloat16",
                "logit_sd": LOGIT_SD,
            },
            "impl": name,
            "metric": "forward_backward",
            "unit": "ms",
            "error": checked[name],
            "failed": name not in times,
            **facts,
        }
        if name in times:
            percentiles = np.percentile(times[name], [20, 50, 80])
            row |= {key: round(float(value), 3) for key, value in zip(("p20", "p50", "p80"), percentiles, strict=True)}
            row |= {"repetitions": len(times[name]), "peak_gib": round(peak_gib(batch, run), 3)}
        rows.append(row)
        shown = "FAILED its check" if row["failed"] else f"{row['p50']:8.2f} ms {row['peak_gib']:6.2f} GiB"
        print(f"{case:>20} {name:>28}: {shown}  " + "  ".join(f"{k} {v:.2g}" for k, v in checked[name].items()))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="TxHxV", help="tokens x hidden x vocabulary")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--dry-run", action="store_true", help="print, record nothing")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: these numbers mean something on one only", file=sys.stderr)
        return 2
    facts = {**run_facts(uuid.uuid4().hex[:12]), **describe_gpu()}
    failed = False
    for case in arguments.cases:
        rows = bench_case(case, arguments.repetitions, facts)
        failed |= any(row["failed"] for row in rows if row["impl"] in OURS)
        if not arguments.dry_run:
            append_rows("fp32_head", rows)
        torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
