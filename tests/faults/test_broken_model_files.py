# SPDX-License-Identifier: Apache-2.0
"""A model's files were cut off or edited: refused at start and by `plan` with the file, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from scalerl_verl.config.machine_checks import find_problems
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.interruption.settings import find_model_problems
from scalerl_verl.names import PLATFORM_ENV
from scalerl_verl.shapes import find_shape
from tests.unit.config.test_machine_checks import config, roomy_machine  # noqa: F401 - fixtures

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40960,
}  # fmt: skip
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NO_JSON = ["", "{", "\ufeff{}"]
NO_OBJECT = ["[1]", '"x"', "null", "5"]
WRONG: list[dict[str, Any]] = [
    {**QWEN3, "hidden_size": "abc"},
    {**QWEN3, "hidden_size": [1]},
    {**QWEN3, "vocab_size": "512"},
    {**QWEN3, "num_attention_heads": 0},
    {**QWEN3, "num_hidden_layers": -2},
    {**QWEN3, "num_hidden_layers": True},
    {**MOE, "num_experts": "x"},
    {**MOE, "mlp_only_layers": 5},
]
TEXT_PART = [{"model_type": "unheard_of", "text_config": part} for part in ([1], "abc")]


def write(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("platform", ["", "cpu"])
@pytest.mark.parametrize("text", [*NO_JSON, *NO_OBJECT])
def test_config_that_is_no_object_is_refused_at_start(
    config: DictConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    text: str,
) -> None:
    monkeypatch.setenv(PLATFORM_ENV, platform)
    OmegaConf.update(config, "actor_rollout_ref.model.path", write(tmp_path, text))
    (problem,) = find_problems(config)
    assert problem.startswith(f"actor_rollout_ref.model.path={tmp_path}: {tmp_path}/config.json ")
    assert problem.endswith("give the config.json of a model")


@pytest.mark.parametrize("platform", ["", "cpu"])
@pytest.mark.parametrize("content", [*WRONG, *TEXT_PART])
def test_checks_at_start_survive_any_content(
    config: DictConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    content: dict[str, Any],
) -> None:
    monkeypatch.setenv(PLATFORM_ENV, platform)
    OmegaConf.update(config, "actor_rollout_ref.model.path", write(tmp_path, json.dumps(content)))
    assert all(isinstance(problem, str) for problem in find_problems(config))


@pytest.mark.parametrize("text", [*NO_JSON, *NO_OBJECT, *map(json.dumps, WRONG)])
def test_plan_refuses_it_with_the_file_or_the_entry(tmp_path: Path, text: str) -> None:
    with pytest.raises(ScaleRLConfigError, match="config"):
        find_shape(write(tmp_path, text))


@pytest.mark.parametrize("tokenizer", ["{", "[]", '{"version": "1.0"}'])
def test_tokenizer_that_cannot_be_read_is_a_problem(tmp_path: Path, tokenizer: str) -> None:
    write(tmp_path, json.dumps({"model_type": "qwen2"}))
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    loop = {"agent": {"default_agent_loop": "forced_interruption"}, "response_length": 100}
    run = OmegaConf.create({"actor_rollout_ref": {"model": {"path": str(tmp_path)}, "rollout": loop}})
    (problem,) = find_model_problems(run)
    assert f"the tokenizer of {tmp_path}" in problem and "cannot be loaded: " in problem


def test_reward_function_that_is_no_path_is_a_problem(config: DictConfig) -> None:  # noqa: F811
    OmegaConf.update(config, "reward.custom_reward_function.path", 5, force_add=True)
    (problem,) = find_problems(config)
    assert problem == "reward.custom_reward_function.path=5 does not exist: correct the path"
