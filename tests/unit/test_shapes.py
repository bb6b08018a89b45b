# SPDX-License-Identifier: Apache-2.0
"""Parameter counts against models that transformers builds on the meta device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.shapes import find_shape, from_config
from scalerl_verl.shapes.public import FILE, read_public

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
    # one model of each shape
    **{
        model: read_public()[model] for model in (next(iter(entry["models"])) for entry in json.loads(FILE.read_text()))
    },
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


# Billions of parameters, and of those without the embeddings, by the models' cards (Meta's give the first only).
PUBLISHED = {
    "Qwen/Qwen3-0.6B": (0.6, 0.44),
    "Qwen/Qwen3-1.7B-Base": (1.7, 1.4),
    "Qwen/Qwen3-4B": (4.0, 3.6),
    "Qwen/Qwen3-8B-Base": (8.2, 6.95),
    "Qwen/Qwen3-14B": (14.8, 13.2),
    "Qwen/Qwen3-32B": (32.8, 31.2),
    "Qwen/Qwen3-30B-A3B-Base": (30.5, 29.9),
    "Qwen/Qwen2.5-0.5B": (0.49, 0.36),
    "Qwen/Qwen2.5-1.5B-Instruct": (1.54, 1.31),
    "Qwen/Qwen2.5-3B": (3.09, 2.77),
    "Qwen/Qwen2.5-7B": (7.61, 6.53),
    "Qwen/Qwen2.5-14B": (14.7, 13.1),
    "Qwen/Qwen2.5-32B-Instruct": (32.5, 31.0),
    "Qwen/Qwen2.5-72B": (72.7, 70.0),
    "meta-llama/Llama-3.2-1B": (1.23, None),
    "meta-llama/Llama-3.2-3B-Instruct": (3.21, None),
    "meta-llama/Llama-3.1-8B": (8.03, None),
    "meta-llama/Llama-3.3-70B-Instruct": (70.6, None),
    "HuggingFaceTB/SmolLM2-135M": (0.135, None),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (0.362, None),
    "HuggingFaceTB/SmolLM2-1.7B": (1.71, None),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_sizes(model: str) -> None:
    whole, without = PUBLISHED[model]
    shape = find_shape(model)
    assert shape.num_params / 1e9 == pytest.approx(whole, rel=0.015)
    if without is not None:
        assert (shape.num_params - shape.embedding_params) / 1e9 == pytest.approx(without, rel=0.015)


def test_active_parameters_of_the_published_mixture() -> None:
    """Qwen's model card: 3.3B act on a token, lookup included."""
    mixture = find_shape("Qwen/Qwen3-30B-A3B")
    assert 3.3 <= (mixture.active_params + mixture.vocab * mixture.hidden) / 1e9 < 3.4


def test_a_base_model_and_its_chat_model_differ_in_length_only() -> None:
    base, chat = find_shape("Qwen/Qwen3-8B-Base"), find_shape("Qwen/Qwen3-8B")
    assert (base.max_positions, chat.max_positions) == (32768, 40960)
    assert replace(base, max_positions=0) == replace(chat, max_positions=0)


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
    with pytest.raises(ScaleRLConfigError, match=r"--model-config FILE \(\d+ of Qwen3, Qwen2.5"):
        find_shape("nobody/nothing-at-all")
    with pytest.raises(ScaleRLConfigError, match=r"near it are .*Qwen/Qwen3-8B"):
        find_shape("Qwen/Qwen3-9B")
    with pytest.raises(ScaleRLConfigError, match="does not exist"):
        find_shape("nobody/nothing", str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ScaleRLConfigError, match="is not JSON"):
        find_shape("nobody/nothing", str(tmp_path / "bad.json"))
