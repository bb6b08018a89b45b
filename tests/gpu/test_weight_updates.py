# SPDX-License-Identifier: Apache-2.0
"""Weights of FSDP1 and FSDP2 on a GPU: rounded before they are gathered, staged for another process, no bit wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gpu.weight_updates import MODELS, STAGING, STRATEGIES
from tests.paths import REPO

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SIZE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
CASES = [(strategy, model, staging) for strategy in STRATEGIES for model in MODELS for staging in STAGING]


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("weights")
    for model in MODELS:
        shape = Qwen3Config(**SIZE, tie_word_embeddings=model == "qwen3-tied")
        with torch.device("cuda"):
            Qwen3ForCausalLM(shape).save_pretrained(folder / model)
    environment = {
        **os.environ,
        "SCALERL_VERL_ACTIVE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, "-m", "tests.gpu.weight_updates", str(folder)]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads((folder / "updates.json").read_text())
    print(json.dumps(results, indent=1))
    return results


@pytest.mark.parametrize(("strategy", "model", "staging"), CASES)
def test_the_other_process_sees_each_weight_rounded_once(
    updates: dict[str, Any], strategy: str, model: str, staging: str
) -> None:
    found = updates[f"{strategy}|{model}"][staging]
    assert found["wrong"] == found["wrong_after_update"] == []
    assert found["missing"] == (["lm_head.weight"] if model == "qwen3-tied" else [])


@pytest.mark.parametrize(("strategy", "model", "staging"), CASES)
def test_the_trainer_holds_one_weight_more_at_a_time(
    updates: dict[str, Any], strategy: str, model: str, staging: str
) -> None:
    """A rounded shard and a gathered weight are two of its size; FSDP1 hands out a copy of all that it stores."""
    found = updates[f"{strategy}|{model}"][staging]
    if strategy == "fsdp2":
        assert found["extra_bytes"] <= 3 * found["largest_bytes"]
