# SPDX-License-Identifier: Apache-2.0
"""Child program of test_head_engines: tiny models with each kind of head through verl's FSDP2 engine.

python head_engines.py FOLDER; RANK and WORLD_SIZE in the environment. Reads FOLDER/<model>; rank 0 writes
FOLDER/results-<world>.pt: case -> log-probs, entropies, gradients by name, hidden states and weight at the head.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from scalerl_verl.advantage.step import advantage_step
from scalerl_verl.head import linear_logprobs
from scalerl_verl.head import model as head_model
from scalerl_verl.loss.term_weights import FIELD
from scalerl_verl.loss.verl_config import ScaleRLFSDPActorConfig, ScaleRLPolicyLossConfig
from scalerl_verl.upstream import status
from scalerl_verl.verl.algorithms import estimate_advantages

PROMPTS = [3, 2, 4, 3]
RESPONSES = [2, 7, 1, 5]
PROMPT_IDS, REWARDS = ["a", "b", "a", "b"], [1.0, -1.0, -1.0, 1.0]
"""Under prompt-mean, where the estimator's advantages and weights train; elsewhere any advantages do."""
TEMPERATURE = 0.7
EPS_MAX = 1.5


@dataclass(frozen=True)
class Case:
    """One engine and how it is run."""

    model: str = "qwen3"
    backend: str = "fp32"
    fused: bool = True
    param_dtype: str = "fp32"
    packed: bool = False
    checkpointing: bool = False
    truth: bool = False
    """the head in float64 instead of ours, everything else alike"""
    entropy_coeff: float = 0.0
    world: int = 1
    strategy: str = "fsdp2"
    sequence_parallel: int = 1
    pad_to_length: bool = False
    lora: bool = False
    forward_only: bool = False
    mode: str = "token-mean"
    """the aggregation; with prompt-mean rows have weights, and a KL loss trains, too"""
    forced_logp: float = -5.0
    """recorded of tokens that were forced into a response: whatever it is, they do not train"""
    options: dict[str, Any] = field(default_factory=dict)


def _cases() -> dict[str, Case]:
    cases = {}
    for model in ("qwen3", "qwen3-tied", "qwen3-moe", "llama"):
        for kind, changes in {"fused": {}, "logits": {"fused": False}, "truth": {"truth": True}}.items():
            for dtype in ("fp32", "bf16") if model.startswith("qwen3") else ("fp32",):
                cases[f"{model}|{dtype}|{kind}"] = Case(model=model, param_dtype=dtype, **changes)
    for kind, fused in {"fused": True, "logits": False}.items():
        cases[f"packed|{kind}"] = Case(fused=fused, packed=True)
        cases[f"packed, padded|{kind}"] = Case(fused=fused, packed=True, pad_to_length=True)
        cases[f"checkpointing|{kind}"] = Case(fused=fused, checkpointing=True, model="qwen3-tied")
        cases[f"entropy|{kind}"] = Case(fused=fused, entropy_coeff=0.1)
        cases[f"lora|{kind}"] = Case(fused=fused, lora=True)
        cases[f"two ranks|{kind}"] = Case(fused=fused, world=2)
        cases[f"sequence parallel|{kind}"] = Case(fused=fused, world=2, packed=True, sequence_parallel=2)
        cases[f"sequence parallel, prompts|{kind}"] = Case(
            fused=fused,
            world=2,
            packed=True,
            sequence_parallel=2,
            mode="prompt-mean",
            entropy_coeff=0.1,
            forced_logp=float("nan"),
        )
    for name, changes in {
        "padded": {},
        "packed": {"packed": True, "pad_to_length": True},
        "masked": {"options": {"token_mask_range": [0.5, 1.2]}},
        "bf16": {"param_dtype": "bf16", "model": "qwen3-moe"},
        "sequence parallel": {"world": 2, "packed": True, "sequence_parallel": 2},
        "two ranks": {"world": 2, "model": "qwen3-tied"},
    }.items():
        cases[f"shared pass, {name}|shared"] = Case(backend="fp32_shared_pass", **changes)
    cases["shared pass, masked|fused"] = Case(options={"token_mask_range": [0.5, 1.2]})
    cases["entropy|truth"] = Case(truth=True, entropy_coeff=0.1)
    cases["prompts|truth"] = Case(truth=True, entropy_coeff=0.1, mode="prompt-mean")
    return cases


CASES = _cases()


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_rows(vocab_size: int) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [
        torch.randint(0, vocab_size, (p + r,), generator=generator) for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    return {
        "input_ids": tokens,
        "position_ids": [torch.arange(len(row)) for row in tokens],
        "prompts": [row[:p] for row, p in zip(tokens, PROMPTS, strict=True)],
        "responses": [row[p:] for row, p in zip(tokens, PROMPTS, strict=True)],
        "response_mask": [torch.arange(r) % 3 != 1 for r in RESPONSES],
        "loss_mask": [torch.arange(r) % 3 != 1 for r in RESPONSES],
        "old_log_probs": [-3 * torch.rand(r, generator=generator) - 3 for r in RESPONSES],
        "advantages": [torch.randn(1, generator=generator).expand(r) for r in RESPONSES],
    }


def make_data(case: Case, vocab_size: int, rank: int) -> TensorDict:
    """What a worker of verl's V1 trainer gets on this rank."""
    rows = make_rows(vocab_size)
    share = case.world // case.sequence_parallel
    mine = range(len(PROMPTS)) if share == 1 else range(rank * 2, rank * 2 + 2)
    if case.mode == "prompt-mean":
        for logp, mask in zip(rows["old_log_probs"], rows["response_mask"], strict=True):
            logp[~mask] = case.forced_logp
        rows["advantages"], rows[FIELD] = estimate(rows["response_mask"])
        rows["ref_log_prob"] = [logp - 0.5 for logp in rows["old_log_probs"]]
    data = TensorDict({name: nested([values[i] for i in mine]) for name, values in rows.items()}, batch_size=len(mine))
    tu.assign_non_tensor(
        data,
        global_batch_size=len(PROMPTS),
        temperature=TEMPERATURE,
        use_remove_padding=case.packed,
        use_fused_kernels=case.fused,
        calculate_entropy=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
    )
    return data


def estimate(masks: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Advantages and row weights as the driver makes them, which knows nothing of the ranks."""
    mask_BT = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    rewards_BT = torch.zeros(mask_BT.shape)
    rewards_BT[torch.arange(len(masks)), torch.tensor(RESPONSES) - 1] = torch.tensor(REWARDS)
    actor = SimpleNamespace(loss_agg_mode="prompt-mean")
    with advantage_step(SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor)), {}) as step:
        prompt_ids = np.array(PROMPT_IDS, dtype=object)
        advantages_BT, _ = estimate_advantages(rewards_BT, mask_BT, prompt_ids, OmegaConf.create({"scalerl": {}}))
    weights = [torch.full((n,), float(weight)) for n, weight in zip(RESPONSES, step.weights_B, strict=True)]
    return [row[:n] for row, n in zip(advantages_BT, RESPONSES, strict=True)], weights


def make_engine(folder: Path, case: Case, optimizer: str = "SGD", **model_options: Any) -> Any:
    """verl's engine of a case. SGD, since Adam's first step is a matter of signs; verl clips the norm of all ranks."""
    precision = {"param_dtype": case.param_dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    lora = {"lora_rank": 4, "lora_alpha": 8} if case.lora else {}
    engine = EngineRegistry.new(
        model_type="language_model",
        backend=case.strategy,
        model_config=HFModelConfig(
            path=str(folder / case.model),
            load_tokenizer=False,
            use_remove_padding=case.packed,
            enable_gradient_checkpointing=case.checkpointing,
            use_fused_kernels=case.fused,
            fused_kernel_options={"impl_backend": case.backend},
            override_config={"attn_implementation": "stub_of_varlen" if case.sequence_parallel > 1 else "sdpa"},
            **lora,
            **model_options,
        ),
        engine_config=FSDPEngineConfig(
            strategy=case.strategy,
            model_dtype="fp32",
            mixed_precision=precision,
            use_torch_compile=False,
            forward_only=case.forward_only,
            ulysses_sequence_parallel_size=case.sequence_parallel,
            pad_to_length=case.pad_to_length,
            pad_to_length_bucket=16,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=0.3, optimizer=optimizer, total_training_steps=1, override_optimizer_config={}
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def stub_of_varlen(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """In place of flash-attn, which no CPU has: verl's sequence-parallel wrapper, around the attention of PyTorch."""
    position_ids = kwargs.pop("position_ids")

    def attention(query: Any, key: Any, value: Any, *_: Any, position_ids: Any, **__: Any) -> torch.Tensor:
        starts = (position_ids[0] == 0).cumsum(0)
        place = torch.arange(len(starts))
        allowed = (starts[:, None] == starts[None, :]) & (place[:, None] >= place[None, :])
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        fake = torch.nn.Module()
        fake.num_key_value_groups = query.shape[1] // key.shape[1]
        return sdpa_attention_forward(fake, query, key, value, allowed[None, None], scaling=module.scaling)[0]

    with mock.patch.object(monkey_patch, "_flash_attention_forward", attention):
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out = monkey_patch._ulysses_flash_attention_forward(
            query, key, value, attention_mask, query.shape[1], position_ids=position_ids
        )
    return out, None


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in engine.module.named_parameters()
    }


@contextlib.contextmanager
def head_of(case: Case) -> Iterator[None]:
    """The head in float64 where the case asks for the truth."""
    if not case.truth:
        yield
        return
    truth = functools.partial(linear_logprobs, impl="naive")
    with mock.patch.object(head_model, "linear_logprobs", truth):
        yield


def run(folder: Path, case: Case, rank: int) -> dict[str, Any]:
    """Log-probs by verl's forward-only path, and gradients by its training step."""
    torch.manual_seed(0)  # LoRA draws its first weights
    engine = make_engine(folder, case)
    data = make_data(case, engine.model_config.hf_config.vocab_size, rank)
    seen: dict[str, torch.Tensor] = {}
    base = engine.module.get_base_model() if case.lora else engine.module
    layer = head_model.output_layer(base)

    def look(module: Any, args: Any) -> None:
        weight = module.weight.full_tensor() if hasattr(module.weight, "full_tensor") else module.weight
        seen.update(hidden=args[0].detach().clone(), weight=weight.detach().clone())

    config = ScaleRLFSDPActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=case.mode,
        use_kl_loss=case.mode == "prompt-mean",
        kl_loss_type="mse",
        kl_loss_coef=0.3,
        entropy_coeff=case.entropy_coeff,
        calculate_entropy=True,
        policy_loss=ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo", eps_max=EPS_MAX, **case.options),
    )
    loss = functools.partial(ppo_loss, config=config)
    with head_of(case):
        with engine.eval_mode(), torch.no_grad():
            micro = data.clone()
            tu.assign_non_tensor(micro, micro_batch_size_per_gpu=len(data))
            output = engine.forward_backward_batch(micro, None, forward_only=True)["model_output"]
        engine.optimizer_zero_grad()
        with engine.train_mode():
            handle = layer.register_forward_pre_hook(look)
            engine.forward_backward_batch(data, loss, forward_only=False)
            handle.remove()
            gradients = {
                name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
                for name, p in engine.module.named_parameters()
                if p.grad is not None
            }
            before, moved = (full_weights(engine), {}) if case.mode == "prompt-mean" else ({}, {})
            if before:
                engine.optimizer_step()
                moved = {name: weight - before[name] for name, weight in full_weights(engine).items()}
    embedding = base.get_input_embeddings()
    return {
        "logp": output["log_probs"].values(),
        "entropy": output["entropy"].values(),
        "logp_dtype": str(output["log_probs"].dtype),
        "gradients": gradients,
        "moved": moved,
        "storage_dtypes": sorted({str(p.dtype) for p in engine.module.parameters()}),
        "tied": embedding.weight is layer.weight,
        "seen": seen,
        "fact": status.process_status()["fp32_head"][-1],
    }


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder / f'store-{world}'}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    AttentionInterface.register("stub_of_varlen", stub_of_varlen)
    results = {name: run(folder, case, rank) for name, case in CASES.items() if case.world == world}
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {name: result["logp"] for name, result in results.items()})
    for name, result in results.items():
        # Ranks of a sequence-parallel group hold the same rows, others their own.
        parts = [part[name] for part in gathered] if CASES[name].sequence_parallel == 1 else [result["logp"]]
        result["logp"] = torch.cat(parts)
    if rank == 0:
        torch.save(results, folder / f"results-{world}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
