# SPDX-License-Identifier: Apache-2.0
"""Trainer memory against what autograd keeps, against recorded peaks of the head, and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from scalerl_verl.json_lines import read_records
from scalerl_verl.pipeline.transfer import Transfer
from scalerl_verl.planning.trainer import TrainerSetup, head_bytes, layer_activation_bytes, trainer_memory
from scalerl_verl.shapes import ModelShape, find_shape, from_config
from tests.unit.test_shapes import CONFIGS

GIB = 2**30
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "fp32_head.jsonl"
RECORDED = [
    (row["case"], row["impl"], row["peak_gib"])
    for row in read_records(RESULTS)
    if row["impl"] in ("scalerl_verl chunked", "plain bf16 logits", "all FP32 logits")
]


PLANNED = read_records(RESULTS.with_name("plan.jsonl"))


def kept_bytes(config: dict[str, Any], tokens: int, rank: int = 0) -> float:
    """Bytes for each token that autograd keeps of a real decoder layer in bf16, weights and positions left out.

    With a rank adapters train in the place of the layer.
    """
    built = CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    built._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(built).bfloat16()
    if rank:
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules="all-linear"))
        model = adapted.bfloat16().get_base_model()
    hidden = torch.randn(1, tokens, built.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.arange(tokens)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    others = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *rotary)}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](hidden, position_embeddings=rotary, position_ids=positions)
    return sum(size for size, _ in kept.values()) / tokens


@pytest.mark.parametrize("name", ["llama", "qwen3, wide heads", "qwen3_moe"])
def test_activations_of_a_layer_are_those_that_autograd_keeps(name: str) -> None:
    shape = from_config(CONFIGS[name], name)
    counted = layer_activation_bytes(shape, mixture=shape.num_mixture_layers > 0, compute_bytes=2)
    # A mixture also keeps an int32 an expert, whatever the number of tokens; newer transformers 2 bytes a token less.
    assert counted == pytest.approx(kept_bytes(CONFIGS[name], tokens=256), abs=2 if shape.num_mixture_layers else 1)


@pytest.mark.parametrize(("case", "impl", "peak_gib"), RECORDED)
def test_head_needs_what_was_recorded_on_a_gpu(case: dict[str, Any], impl: str, peak_gib: float) -> None:
    shape = replace(find_shape("Qwen/Qwen3-8B-Base"), hidden=case["hidden"], vocab=case["vocab"])
    estimate = head_bytes(shape, case["tokens"], compute_bytes=2, fused=impl == "scalerl_verl chunked")
    assert estimate / GIB == pytest.approx(peak_gib, rel=0.01)


def test_recorded_heads_are_there() -> None:
    assert len(RECORDED) >= 9


@pytest.fixture
def shape() -> ModelShape:
    """Small enough to count: one layer, width 8, queries 8, keys 4, feed-forward 16, vocabulary 10."""
    return from_config(
        {
            "model_type": "llama",
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 10,
            "tie_word_embeddings": True,
        },
        "tiny",
    )


def test_sharded_state_by_hand(shape: ModelShape) -> None:
    """Layer 8 (8 + 4 + 4 + 8) + 3 x 8 x 16 + 16 = 592, embedding 80, norm 8: 680 parameters over 4 shards, FP32."""
    memory = trainer_memory(shape, TrainerSetup(num_shards=4, tokens=3))
    assert shape.num_params == 680
    assert (memory.weights, memory.gradients, memory.optimizer) == (680, 680, 1360)
    assert memory.gathered == 2 * (88 + 2 * 592)
    assert memory.activations == 3 * 2 * 8
    # One layer: norms 2 (32 + 32 + 4), attention 2 (16 + 8) + 8, feed-forward 4 x 2 x 16 = 320 bytes a token.
    again = 3 * (136 + 56 + 128) + 3 * 3 * 2 * 16
    assert memory.moments["layer"] == 48 + memory.gathered + again + 2 * 88 + 6 * 592
    assert memory.moments["optimizer step"] == 680
    assert memory.peak == 4 * 680 + max(memory.moments.values())


def test_settings_move_their_own_part_only(shape: ModelShape) -> None:
    setup = TrainerSetup(num_shards=2, tokens=64)
    base = trainer_memory(shape, setup)
    assert trainer_memory(shape, replace(setup, checkpointing=False)).activations == 64 * 320
    assert trainer_memory(shape, replace(setup, reshard=False)).gathered == 2 * 680
    assert trainer_memory(shape, replace(setup, defer_sync=True)).peak == base.peak + 4 * 680
    assert trainer_memory(shape, replace(setup, transfer=Transfer(2, 100, trainer_buckets=2))).peak == base.peak + 200
    assert trainer_memory(shape, replace(setup, master_bytes=2)).weights == base.weights / 2
    assert trainer_memory(shape, replace(setup, cpu_offload=True)).resident == 0
    assert trainer_memory(shape, replace(setup, fused_head=False)).head == 12 * 64 * 10


@pytest.mark.parametrize("row", PLANNED, ids=lambda row: row["run_id"])
def test_plan_of_a_trainer_is_the_peak_that_a_real_run_allocated(row: dict[str, Any]) -> None:
    """At the longest batch that the run had within 2% (workspaces are not counted); at declared lengths above it."""
    case = row["case"]
    shape = from_config(case["model"], "recorded")

    def peak(longest: int) -> float:
        tokens = case["sequences"] * longest
        setup = TrainerSetup(1, tokens, checkpointing=case["checkpointing"], padded_length=longest)
        return trainer_memory(shape, setup).peak / GIB

    assert peak(case["longest"]) == pytest.approx(row["p50"], rel=0.02)
    assert peak(case["declared_longest"]) > row["p50"]


def test_padding_costs_a_mask_and_repeated_keys_and_values(shape: ModelShape) -> None:
    packed, padded = TrainerSetup(num_shards=1, tokens=64), TrainerSetup(num_shards=1, tokens=64, padded_length=16)
    extra = 2 * (2 * (shape.q_size - shape.kv_size) + 16)
    difference = trainer_memory(shape, padded).moments["layer"] - trainer_memory(shape, packed).moments["layer"]
    assert difference == 64 * extra > 0
