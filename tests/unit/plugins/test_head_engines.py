# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
SIZE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)
def save_models(folder: Path) -> None:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZE, tie_word_embeddings=False)),
        "qwen3-tied": Qwen3ForCausalLM(Qwen3Config(**SIZE, tie_word_embeddings=True)),
        "qwen3-moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, **experts, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=False)),
    }
    for name, model in models.items():
        torch.manual_seed(0)
        for p in model.parameters():
            if p.dim() > 1: p.data.normal_(std=0.3)
        model.save_pretrained(folder / name)
