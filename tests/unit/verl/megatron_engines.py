# SPDX-License-Identifier: Apache-2.0
"""Child program of test_megatron: tiny models through verl's Megatron engine, for several ways of parallelism.

python megatron_engines.py FOLDER; RANK and WORLD_SIZE in the environment, megatron-core on the path. Writes
FOLDER/megatron-<world>-<rank>.pt: case -> gradients by name, what went through the head, its record, metrics. One rank
alone writes the weights and the truth, two read the weights.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # verl compiles a sum, which takes longer than all of this

import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from verl.workers.utils.losses import ppo_loss

from scalerl_verl.loss.verl_config import ScaleRLMcoreActorConfig, ScaleRLPolicyLossConfig
from scalerl_verl.upstream import status
from tests.unit.verl.engine_gradients import LOSSES, ORDERS, SPLITS, UIDS, inputs_of, make_batch, make_data
from tests.unit.verl.megatron_cpu import VOCAB_SIZE, cuda_stubs, gather_gradients, make_engine, model_of, zero_gradients


@dataclass(frozen=True)
class Case:
    """One engine and how it is run."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    sp: bool = False
    tied: bool = False
    packed: bool = True
    fused: bool = True
    backend: str = "fp32"
    dtype: str = "float32"
    padded_rows: int = 0
    """rows of the output layer that are no tokens"""
    loss: str = "terms"
    split: str = "fours"


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, tied": {"tied": True},
    "one rank, rows padded, single rows": {"packed": False, "split": "single rows"},
    "one rank, dynamic": {"split": "dynamic, 31 tokens", "loss": "cap"},
    "TP 2": {"world": 2, "tp": 2},
    "TP 2, tied, single rows": {"world": 2, "tp": 2, "tied": True, "split": "single rows"},
    "TP 2, sequence parallel": {"world": 2, "tp": 2, "sp": True},
    "TP 2, sequence parallel, tied, rows padded": {"world": 2, "tp": 2, "sp": True, "tied": True, "packed": False},
    "DP 2": {"world": 2},
    "DP 2, dynamic": {"world": 2, "split": "dynamic, 16 tokens", "loss": "cap"},
    "PP 2": {"world": 2, "pp": 2},
    "PP 2, tied, single rows": {"world": 2, "pp": 2, "tied": True, "split": "single rows"},
}
CASES = {
    f"{name}|{kind}": Case(fused=fused, **settings)
    for name, settings in LAYOUTS.items()
    for kind, fused in {"fused": True, "logits": False}.items()
}
CASES["TP 2, vocabulary padded|fused"] = Case(world=2, tp=2, padded_rows=2)
BF16 = {
    f"{name}|{kind}": Case(dtype="bfloat16", loss="cap", **settings, **changes)
    for name, settings in {"bf16": {}, "bf16, TP 2": {"world": 2, "tp": 2, "sp": True, "tied": True}}.items()
    for kind, changes in {
        "fused": {},
        "logits": {"fused": False},
        "without": {"backend": "torch", "fused": False},
    }.items()
}


def model_config(case: Case) -> Any:
    """What verl's engine reads of its HFModelConfig."""
    hf_config = SimpleNamespace(architectures=["Tiny"], vocab_size=VOCAB_SIZE, model_type="tiny")
    hf_config.get_text_config = lambda: hf_config
    return SimpleNamespace(
        hf_config=hf_config,
        model_type="language_model",
        fused_kernel_options={"impl_backend": case.backend},
        use_fused_kernels=case.fused,
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )


def run_case(case: Case, weights: dict[bool, Any]) -> dict[str, Any]:
    """Gradients of one mini-batch by verl's forward_backward_batch, and what came out."""
    options = {"tied": case.tied, "packed": case.packed, "dtype": getattr(torch, case.dtype)}
    engine = make_engine(
        model_config(case),
        weights[case.tied],
        tp=case.tp,
        pp=case.pp,
        sp=case.sp,
        num_rows=VOCAB_SIZE + case.padded_rows,
        **options,
    )
    share = engine.get_data_parallel_size()
    rank = engine.get_data_parallel_rank()
    order = ORDERS["groups apart"]
    batch = make_batch(VOCAB_SIZE, len(order))
    rows = order[rank * len(order) // share : (rank + 1) * len(order) // share]
    config = ScaleRLMcoreActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="prompt-mean",
        **LOSSES[case.loss].terms,
        policy_loss=ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo", eps_max=2.0),
    )
    seen = watch_head(engine)
    zero_gradients(engine)
    output = engine.forward_backward_batch(
        make_data(batch, rows, SPLITS[case.split], LOSSES[case.loss].advantages),
        functools.partial(ppo_loss, config),
        forward_only=False,
    )
    facts = status.read_facts("fp32_head")[-1:] if case.backend == "fp32" else []
    metrics = {name: value for name, value in output["metrics"].items() if name.startswith("actor/")} if output else {}
    return {"gradients": gather_gradients(engine), "seen": seen, "facts": facts, "metrics": metrics}


def watch_head(engine: Any) -> list[dict[str, torch.Tensor]]:
    """What goes into the output layer and comes out as log-probs and entropies, one entry a micro-batch."""
    seen: list[dict[str, torch.Tensor]] = []
    layer, process = getattr(model_of(engine), "output_layer", None), engine._lm_head_logits_processor
    if layer is None:
        return seen

    def processor(logits: Any, label: Any, temperature: Any, **options: Any) -> Any:
        is_token = temperature > 0  # padding has none
        out = process(logits, label, temperature, **options)
        seen[-1] |= {"labels": label, "is_token": is_token, **{name: values.detach() for name, values in out.items()}}
        return out

    # [S, B, H], a part of S under sequence parallelism
    layer.register_forward_pre_hook(lambda _, args: seen.append({"hidden": args[0].detach().clone()}))
    engine._lm_head_logits_processor = processor
    return seen


def truth(tied: bool, weights: dict[bool, Any], loss: str) -> dict[str, Any]:
    """Gradients by the paper's objective in float64: the model alone, row by row."""
    from tests.unit.verl.test_engine_gradients import objective

    case = Case(backend="torch", fused=False, tied=tied, packed=False)
    engine = make_engine(model_config(case), weights[tied], tied=tied, packed=False, dtype=torch.float64)
    model = model_of(engine)

    def log_probs(tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(tokens))[None]
        return model(tokens[None], positions, None)[0].log_softmax(-1)

    total, _ = objective(inputs_of(make_batch(VOCAB_SIZE, len(UIDS))), loss, log_probs)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(parameters.values()))
    return {"gradients": dict(zip(parameters, gradients, strict=True))}


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder / f'store-megatron-{world}'}"
    dist.init_process_group("cpu:gloo", init_method=store, rank=rank, world_size=world)
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with cuda_stubs():
        file = folder / "megatron-weights.pt"
        if world == 1:
            weights = {}
            for tied in (False, True):
                case = Case(backend="torch", fused=False)
                engine = make_engine(model_config(case), None, tied=tied)
                weights[tied] = {name: p.detach().clone() for name, p in model_of(engine).named_parameters()}
            torch.save(weights, file)
            for tied in (False, True):
                for loss in ("cap", "terms"):
                    results[f"truth|{tied}|{loss}"] = truth(tied, weights, loss)
        else:
            weights = torch.load(file)
        for name, case in (CASES | BF16).items():
            if case.world == world:
                results[name] = run_case(case, weights)
    torch.save(results, folder / f"megatron-{world}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
