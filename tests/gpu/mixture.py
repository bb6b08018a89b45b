# SPDX-License-Identifier: Apache-2.0
"""A tiny mixture of experts: its runs, and its log-probs with the routing of the engine replayed (R3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipes.quickstart.model import MAX_POSITIONS, build_tokenizer
from tests.gpu.test_gpu_runs import GPU

STEPS, K = 3, 2
LENGTH = 64
"""Tokens of a response: 32 of them are 2,048 tokens, of which each passes four layers of experts."""


def make_mixture(folder: Path) -> Path:
    """A random Qwen3-MoE of 16 experts in each of 4 layers, of which 4 act on a token, with the quickstart's tokenizer.

    Sizes are those that kernels of GPUs take: heads of 64, widths that are multiples of 128.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.087,  # as the quickstart's model: the usual .02 is flat at this width
        dtype="float32",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def common_lines(assets: Path, model: Path) -> list[str]:
    """What the runs share; asynchronous steps need data of which every group trains."""
    return [
        *GPU,
        f"data.train_files={assets}/mixed.parquet",
        f"actor_rollout_ref.model.path={model}",
        f"data.max_response_length={LENGTH}",
        "actor_rollout_ref.rollout.max_model_len=96",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        # The model marks no thinking that it was taught.
        "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
        f"trainer.total_training_steps={STEPS}",
    ]


def recipe_lines(assets: Path, model: Path, recorded: bool) -> list[str]:
    """The recipe in verl's synchronous trainer; ``recorded``: the engine returns the experts of every token."""
    lines = ["+scalerl=recipe", *common_lines(assets, model)]
    if recorded:
        lines += [
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "actor_rollout_ref.rollout.moe_load_balance_metrics_interval=1",
        ]
    return lines


def pipeline_lines(assets: Path, model: Path) -> list[str]:
    """The recipe in PipelineRL-k, on one GPU that trains and one that generates."""
    return [
        "+scalerl=[recipe,pipeline]",
        *common_lines(assets, model),
        f"trainer.v1.pipeline_rl.max_staleness={K}",
        "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
    ]


@dataclass(frozen=True)
class Mismatch:
    """Of the sampled tokens of a batch: mean and largest |log-ratio| between a model and the engine, and its routing.

    Args:
        mean: of |log-ratio|, nats.
        largest: of |log-ratio|, nats.
        rerouted: share of (token, layer) pairs of which the model itself would take another set of experts.
    """

    mean: float
    largest: float
    rerouted: float


@contextlib.contextmanager
def routed(model: Any, experts_TLK: torch.Tensor, replay: bool) -> Iterator[list[torch.Tensor]]:
    """Forwards of one sequence, whose experts are given for its first T positions; yields what was rerouted, by layer.

    With ``replay`` these experts are taken, weighted by the model's own router as it weights its own choice.
    """
    rerouted: list[torch.Tensor] = []
    handles = []

    def replace(router: Any, _: Any, output: tuple[torch.Tensor, ...], layer: int) -> Any:
        logits_SE, scores_SK, chosen_SK = output
        given_TK = experts_TLK[:, layer].to(chosen_SK)
        num_given = len(given_TK)
        own = chosen_SK[:num_given].sort(-1).values
        rerouted.append((own != given_TK.sort(-1).values).any(-1))
        if not replay:
            return output
        probs_TK = logits_SE[:num_given].float().softmax(-1).gather(-1, given_TK)
        if router.norm_topk_prob:
            probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
        scores_SK, chosen_SK = scores_SK.clone(), chosen_SK.clone()
        scores_SK[:num_given], chosen_SK[:num_given] = probs_TK.to(scores_SK), given_TK
        return logits_SE, scores_SK, chosen_SK

    for number, layer in enumerate(model.model.layers):
        hook = lambda *args, layer=number: replace(*args, layer=layer)  # noqa: E731
        handles.append(layer.mlp.gate.register_forward_hook(hook))
    try:
        yield rerouted
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def compare(model: Any, rows: Mapping[str, list[torch.Tensor]], replay: bool) -> Mismatch:
    """A model's log-probs (FP32 head) of rows of the probe beside those recorded at sampling.

    The last token of a response was never an input of the engine: it has no experts, and none are needed.
    """
    ratios, rerouted = [], []
    device = next(model.parameters()).device
    columns = (rows[name] for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "routed_experts"))
    for prompt, response, mask, logp_rollout_T, experts in zip(*columns, strict=True):
        tokens_S = torch.cat([prompt, response]).to(device)
        with routed(model, experts[: len(tokens_S) - 1].to(device), replay) as found:
            hidden_SH = model.model(input_ids=tokens_S[None]).last_hidden_state[0]
        rerouted += found
        hidden_TH = hidden_SH[len(prompt) - 1 : -1].float()
        logp_TV = torch.log_softmax(hidden_TH @ model.lm_head.weight.float().T, -1)
        logp_T = logp_TV.gather(-1, response.to(device)[:, None])[:, 0]
        ratios.append((logp_T.cpu() - logp_rollout_T)[mask.bool()].abs())
    ratios_N = torch.cat(ratios)
    return Mismatch(float(ratios_N.mean()), float(ratios_N.max()), float(torch.cat(rerouted).float().mean()))
