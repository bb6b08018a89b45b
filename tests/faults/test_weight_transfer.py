# SPDX-License-Identifier: Apache-2.0
"""FP32 master weights were sent and staged while `scalerl plan` counted bf16 over the ranks of an engine.

verl's FSDP2 engine on two ranks, its gloo checkpoint engine of ours and the staging buffers are the real ones; a plan
is made from verl's composed config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scalerl_verl.pipeline import pieces
from scalerl_verl.planning.generator import generator_memory
from scalerl_verl.planning.layout import GIB, read_layout
from scalerl_verl.shapes import ModelShape, find_shape
from tests.faults import weight_updates
from tests.faults.weight_updates import ADAPTED, DTYPES, ENGINES, MODELS
from tests.unit.composed import compose_config
from tests.unit.head.test_head_engines import save_models
from tests.unit.verl.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    save_models(path)
    return path


@pytest.fixture(scope="module")
def updates(folder: Path) -> dict[str, Any]:
    run_ranks(Path(weight_updates.__file__), folder, 2)
    return json.loads((folder / "updates.json").read_text())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", weight_updates.PIECE_BYTES)


def planned(folder: Path, model: str, dtype: str, engine: str) -> tuple[ModelShape, Any]:
    """The shape and the generator's memory as `scalerl plan` counts them."""
    num_ranks, staging = ENGINES[engine]
    config = compose_config(
        "+scalerl=[recipe,pipeline]",
        f"actor_rollout_ref.model.path={folder / model}",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={num_ranks}",
        "actor_rollout_ref.rollout.n_gpus_per_node=4",
        f"trainer.v1.pipeline_rl.staging={staging}",
    )
    shape = find_shape(str(folder / model))
    layout = read_layout(config, shape, 80.0, 4.0)
    assert layout.generator.gpu_bytes == 80 * GIB
    return shape, generator_memory(shape, layout.generator)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
def test_plan_counts_the_bytes_that_are_staged(
    updates: dict[str, Any], folder: Path, small_pieces: None, model: str, dtype: str, engine: str
) -> None:
    found = updates[f"{model}|{dtype}|{engine}"]
    shape, memory = planned(folder, model, dtype, engine)
    num_ranks, staging = ENGINES[engine]
    assert found["weights"] == [shape.num_params * (2 if dtype == "bfloat16" else 4)] * found["copies"]
    if staging == "device":
        assert found["allocated"] == [memory.staged] * num_ranks and memory.host == 0
    else:
        assert found["allocated"] == [memory.host] and memory.staged == 0 and found["copies"] == 1


@pytest.mark.works_with("mixture of experts", "PipelineRL-k")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_cast_before_they_are_gathered(
    updates: dict[str, Any], model: str, engine: str, dtype: str
) -> None:
    found = updates[f"{model}|{dtype}|{engine}"]
    assert found["gathered"] == found["dtypes"] == [dtype]


def test_tied_embedding_is_sent_once(updates: dict[str, Any]) -> None:
    assert weight_updates.HEAD in updates["qwen3-tied|verl"]["names"], "verl sends it under both names"
    names = updates["qwen3-tied|bfloat16|TP 1"]["names"]
    assert weight_updates.EMBEDDING in names and weight_updates.HEAD not in names
    assert weight_updates.HEAD in updates["qwen3|bfloat16|TP 1"]["names"]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_else_is_left_out(updates: dict[str, Any], model: str) -> None:
    sent, by_verl = updates[f"{model}|bfloat16|TP 1"]["names"], updates[f"{model}|verl"]["names"]
    left_out = {weight_updates.HEAD} if model == "qwen3-tied" else set()
    assert sent == [name for name in by_verl if name not in left_out]


@pytest.mark.parametrize("model", ADAPTED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_are_sent_merged_and_stay_apart_in_the_trainer(
    updates: dict[str, Any], model: str, dtype: str
) -> None:
    """As a fresh load of the merged model in the generator's dtype: verl's own stream is in bf16, whatever that is."""
    found = updates[f"adapters|{model}|{dtype}"]
    assert found["changed in the trainer"] == []
    assert len(found["updates"]) == 2
    for update in found["updates"]:
        assert update["names"] == updates[f"{model}|{dtype}|TP 1"]["names"], "as of the model without adapters"
        assert update["gathered"] == update["dtypes"] == [dtype]
        # Every projection of two layers. bf16 rounds by 2^-8 at most, FP32 by 2^-24 a sum.
        assert len(update["merged"]) == 2 * 7
        assert update["worst"] < (2**-8 if dtype == "bfloat16" else 1e-6)


def test_adapter_that_verl_does_not_merge_is_named(updates: dict[str, Any]) -> None:
    assert "model.embed_tokens, which would leave the generators without them" in updates["adapter left out"]


def test_buffers_keep_their_dtype_and_every_digit(updates: dict[str, Any]) -> None:
    assert updates["buffers"] == {
        "balance": ["torch.float32", [1.0 + 2.0**-20] * 4],
        "num_seen": ["torch.int64", [2**40 + 1, 3]],
        "used": ["torch.bool", [True, False]],
    }


def test_checkpoints_are_written_in_full_afterwards(updates: dict[str, Any]) -> None:
    assert "torch.bfloat16" not in updates["state dict afterwards"]
