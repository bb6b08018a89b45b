# SPDX-License-Identifier: Apache-2.0
"""Parameter counts against models that transformers builds on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.shapes import STORED, find_shape, from_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama with biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "mistral, tied": {"model_type": "mistral", **SMALL, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3, wide heads": {"model_type": "qwen3", **SMALL, "head_dim": 24},
    "qwen3, tied, biases": {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **EXPERTS},
    "qwen3_moe, some layers dense": {
        "model_type": "qwen3_moe",
        **SMALL,
        **EXPERTS,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
    },
    "qwen3_moe, dense": {"model_type": "qwen3_moe", **SMALL, **EXPERTS, "mlp_only_layers": [0, 1, 2, 3]},
    **{path.stem: json.loads(path.read_text()) for path in STORED.glob("*.json")},
}


def build_on_meta(config: dict[str, Any]) -> torch.nn.Module:
    built = CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(built)


@pytest.mark.parametrize("name", CONFIGS)
def test_count_is_that_of_the_model_transformers_builds(name: str) -> None:
    model, shape = build_on_meta(CONFIGS[name]), from_config(CONFIGS[name], name)
    assert shape.num_params == sum(weight.numel() for weight in model.parameters())
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in model.model.layers]
    assert shape.largest_layer_params == max(layers)


@pytest.mark.parametrize("name", CONFIGS)
def test_active_parameters_are_the_matrices_less_idle_experts_and_the_lookup(name: str) -> None:
    model, shape = build_on_meta(CONFIGS[name]), from_config(CONFIGS[name], name)
    matrices = shape.vocab * shape.hidden + sum(
        weight.numel()
        for key, weight in model.named_parameters()
        if weight.ndim >= 2 and "embed_tokens" not in key and "lm_head" not in key
    )
    idle = 3 * shape.hidden * shape.expert_intermediate * (shape.num_experts - shape.experts_per_token)
    assert shape.active_params == matrices - shape.num_mixture_layers * idle


def test_counts_of_a_layer_by_hand() -> None:
    shape = from_config(CONFIGS["qwen3, wide heads"], "by hand")
    # q 4 x 24 = 96, kv 2 x 24 = 48: 64 (96 + 48 + 48) + 96 x 64; gate, up, down 3 x 64 x 96; norms 2 x 64 + 2 x 24.
    assert shape.layer_params(mixture=False) == 12288 + 6144 + 18432 + 176
    assert shape.num_params == 4 * 37040 + 2 * 128 * 64 + 64


def test_published_sizes() -> None:
    """Qwen's model cards: 8.2B and 6.95B without embeddings; 30.5B of which 3.3B act on a token (lookup included)."""
    dense, mixture = find_shape("Qwen/Qwen3-8B-Base"), find_shape("Qwen/Qwen3-30B-A3B-Base")
    assert round(dense.num_params / 1e9, 1) == 8.2
    assert round((dense.num_params - dense.embedding_params) / 1e9, 2) == 6.95
    assert round(mixture.num_params / 1e9, 1) == 30.5
    assert 3.3 <= (mixture.active_params + mixture.vocab * mixture.hidden) / 1e9 < 3.4


def test_shape_comes_from_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    shape = from_config(CONFIGS["llama"], "llama")
    assert find_shape(str(tmp_path)) == shape
    assert find_shape("somebody/else", str(tmp_path / "config.json")) == shape


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({**CONFIGS["llama"], "model_type": "mamba"}, "is a mamba: plan counts the parameters of llama"),
        ({"model_type": "llama"}, "lacks hidden_size, num_hidden_layers"),
    ],
)
def test_unknown_architecture_and_missing_entries_are_refused(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ScaleRLConfigError, match=said):
        from_config(content, "it")


def test_model_without_a_config_on_this_machine_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ScaleRLConfigError, match=r"--model-config FILE \(stored are .*Qwen/Qwen3-30B-A3B-Base"):
        find_shape("nobody/nothing-at-all")
    with pytest.raises(ScaleRLConfigError, match="does not exist"):
        find_shape("nobody/nothing", str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ScaleRLConfigError, match="is not JSON"):
        find_shape("nobody/nothing", str(tmp_path / "bad.json"))
