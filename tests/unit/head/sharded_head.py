# SPDX-License-Identifier: Apache-2.0
"""Child program of test_sharded: a head whose rows are on two gloo ranks, and the same head whole.

python sharded_head.py FOLDER; RANK and WORLD_SIZE in the environment. Each rank writes FOLDER/sharded-<rank>.pt: case
-> log-probs, entropies, gradients of hidden states and rows, ours and the float64 truth's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scalerl_verl.head import linear_logprobs, vocab_parallel_logprobs

NUM_TOKENS, HIDDEN, VOCAB = 37, 16, 61
FIRST_ROWS = 40
"""Of the first rank; the second has the others."""
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "chunks": {"chunk_rows": 5},
    "one chunk": {"chunk_rows": NUM_TOKENS},
    "a temperature each": {"temperature": True},
    "masked": {"masked": True, "chunk_rows": 5},
    "all masked": {"masked": None},
    "large logits": {"std": 30.0},
    "unlike dtypes": {"weight_dtype": torch.bfloat16},
}


def run_case(
    rank: int,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    temperature: bool = False,
    masked: bool | None = False,
    std: float = 1.0,
) -> dict[str, Any]:
    """Ours and the truth's, by name."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = (std * torch.randn(VOCAB, HIDDEN, generator=generator)).to(weight_dtype or dtype)
    labels = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    slopes = torch.randn(2, NUM_TOKENS, generator=generator).double()  # of log-probs and entropies
    divisor = 0.5 + torch.rand(NUM_TOKENS, generator=generator) if temperature else torch.tensor(0.7)
    if masked is None:
        slopes.zero_()
    elif masked:
        slopes[:, ::3] = 0
        hidden[::6] = torch.nan
    rows = slice(0, FIRST_ROWS) if rank == 0 else slice(FIRST_ROWS, VOCAB)
    ours = [hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()]
    found = vocab_parallel_logprobs(
        *ours, labels, dist.group.WORLD, rows.start, temperature=divisor if temperature else 0.7, chunk_rows=chunk_rows
    )
    kept = slopes.any(dim=0)
    whole = [hidden.double().nan_to_num().requires_grad_(), weight.double().requires_grad_()]
    truth = linear_logprobs(*whole, labels, temperature=divisor if temperature else 0.7, impl="naive")
    result: dict[str, Any] = {"dtype": found.logp.dtype, "kept": kept, "rows": rows}
    for name, (logp, entropy), operands in (("ours", found, ours), ("truth", truth, whole)):
        loss = (logp[kept].double() * slopes[0, kept] + entropy[kept].double() * slopes[1, kept]).sum()
        gradients = torch.autograd.grad(loss, operands)
        result[name] = [logp.detach(), entropy.detach(), *gradients]
    return result


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store-sharded'}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    results: dict[str, Any] = {name: run_case(rank, **options) for name, options in CASES.items()}
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    labels = torch.tensor([2, 7, 10])  # the last is on no rank
    results["label of no rank"] = vocab_parallel_logprobs(hidden, weight, labels, dist.group.WORLD, 5 * rank).logp
    torch.save(results, folder / f"sharded-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
