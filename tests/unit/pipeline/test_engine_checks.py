# SPDX-License-Identifier: Apache-2.0
"""Engines that a pipeline run refuses, by the config that vLLM itself makes of its arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()
pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402

from scalerl_verl.errors import ScaleRLConfigError  # noqa: E402
from scalerl_verl.pipeline.engine_checks import require_updatable  # noqa: E402


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 32,
        "max_position_embeddings": 64, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def vllm_config(model: Path, **arguments: Any) -> Any:
    settings: dict[str, Any] = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 64, **arguments}
    return AsyncEngineArgs(**settings).create_engine_config()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_engine_as_the_run_asked_for_is_taken(model: Path, num_ranks: int) -> None:
    require_updatable(vllm_config(model, tensor_parallel_size=num_ranks), num_ranks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 2}, "spans 2 devices (tensor 2, pipeline 1, data 1)"),
        ({"data_parallel_size": 2}, "spans 2 devices (tensor 1, pipeline 1, data 2)"),
        ({"enable_lora": True}, "has adapters"),
        ({"kv_offloading_size": 1.0}, "a store of KV outside the engine"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "has a draft model"),
    ],
)
def test_engine_that_cannot_keep_requests_is_refused(model: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScaleRLConfigError) as refusal:
        require_updatable(vllm_config(model, **arguments), 1)
    (problem,) = refusal.value.problems
    assert message in problem and "actor_rollout_ref.rollout.engine_kwargs.vllm" in problem


def test_model_that_is_quantised_by_its_own_files_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = vllm_config(model)
    monkeypatch.setattr(made, "quant_config", object())  # vLLM's CPU platform has no such kernels
    with pytest.raises(ScaleRLConfigError, match="has quantised weights"):
        require_updatable(made, 1)
