# SPDX-License-Identifier: Apache-2.0
"""What is sent, tensor by tensor, against transformers' models and verl's splitting of experts; what a config asks for.

What verl's engine and the staging buffer really do with it is in tests/faults/test_weight_transfer.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from scalerl_verl.names import PLATFORM_ENV
from scalerl_verl.pipeline.pieces import ALIGNMENT, PIECE_BYTES, Pieces, pieces_bytes
from scalerl_verl.pipeline.transfer import (
    MIB,
    Transfer,
    bucket_problem,
    largest_gathered,
    largest_sent,
    read_transfer,
    sent_weights,
    staged_bytes,
)
from scalerl_verl.shapes import find_shape, from_config
from tests.unit.composed import compose_config
from tests.unit.test_shapes import CONFIGS, build_on_meta

ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
MASTER = "actor_rollout_ref.actor.fsdp_config.model_dtype"
PIPELINE = "+scalerl=pipeline"
SEPARATE = "trainer.v1.trainer_mode=separate_async"


@pytest.fixture(autouse=True)
def gpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "")


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_the_model_in_their_order(name: str) -> None:
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    model, shape = build_on_meta(CONFIGS[name]), from_config(CONFIGS[name], name)
    kept = ((key, weight) for key, weight in model.state_dict().items() if key not in model.all_tied_weights_keys)
    sent = [weight.numel() for _, weight in unfuse_moe_params(kept, shape.model_type)]
    counted = list(sent_weights(shape))
    if name == "qwen3_moe, some layers dense":  # which ones, a shape does not keep
        sent, counted = sorted(sent), sorted(counted)
    assert counted == sent
    assert largest_sent(shape) == max(sent) and sum(counted) == shape.num_params
    gathered = max(weight.numel() for weight in model.parameters())
    assert gathered <= largest_gathered(shape) <= 2 * gathered


def test_config_that_transformers_5_saves_of_a_mixture_is_read(tmp_path: Any) -> None:
    config = CONFIGS["qwen3_moe"]
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    assert find_shape(str(tmp_path)).num_params == from_config(config, "as given").num_params


def test_staged_copy_of_the_recipes_models_is_hardly_larger_than_the_model() -> None:
    for name in ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-30B-A3B-Base"):
        shape = find_shape(name)
        assert 1 <= staged_bytes(shape, Transfer(staging="device")) / (2 * shape.num_params) < 1.02
        assert staged_bytes(shape, Transfer(staging="none")) == 0


def test_weights_fill_the_room_that_larger_ones_leave() -> None:
    """A weight of its own piece, and three that share one whatever comes between them."""
    pieces = Pieces()
    small = PIECE_BYTES // 4
    places = [pieces.place(size) for size in (small, 2 * PIECE_BYTES, small, PIECE_BYTES, small, 0)]
    assert places == [(0, 0), (1, 0), (0, small), (2, 0), (0, 2 * small), (0, 3 * small)]
    assert pieces.sizes == [PIECE_BYTES, 2 * PIECE_BYTES, PIECE_BYTES]
    pieces.keep([(0, small + 1), (1, 2 * PIECE_BYTES)])
    assert pieces.place(small) == (0, small + ALIGNMENT)
    assert pieces_bytes([]) == 0 and pieces_bytes([1, 1]) == PIECE_BYTES


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([PIPELINE], Transfer(2, 2048 * MIB, 2, 2, "device", True)),
        ([PIPELINE, f"{ROLLOUT}.dtype=float32"], Transfer(4, 2048 * MIB, 2, 2, "device", True)),
        ([PIPELINE, f"+{ROLLOUT}.engine_kwargs.vllm.dtype=float32"], Transfer(4, 2048 * MIB, 2, 2, "device", True)),
        ([PIPELINE, f"{ROLLOUT}.dtype=auto"], Transfer(4, 2048 * MIB, 2, 2, "device", True)),
        ([PIPELINE, f"{ROLLOUT}.dtype=float32", f"{MASTER}=bf16"], Transfer(2, 2048 * MIB, 2, 2, "device", True)),
        ([PIPELINE, "trainer.v1.pipeline_rl.staging=none"], Transfer(2, 2048 * MIB, 2, 3, "none", True)),
        ([PIPELINE, f"{BACKEND}=gloo"], Transfer(2, 2048 * MIB, 0, 0, "host")),
        ([SEPARATE, f"{BACKEND}=nccl"], Transfer(4, 2048 * MIB, 2, 3, "none", True)),
        ([SEPARATE, f"{BACKEND}=mooncake"], Transfer(4, 2048 * MIB, 2, 3, "none", True, needs_room=True)),
        ([], Transfer(4, 2048 * MIB)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_config_says_how_weights_travel(overrides: list[str], wanted: Transfer) -> None:
    assert read_transfer(compose_config(*overrides)) == wanted


@pytest.mark.parametrize(
    ("overrides", "needs_room"),
    [([], True), ([SEPARATE, f"{BACKEND}=gloo"], True), ([PIPELINE], False)],
    ids=["sync", "separate_async", "pipeline_rl"],
)
def test_on_the_cpu_verl_needs_room_for_every_weight(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], needs_room: bool
) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    assert read_transfer(compose_config(*overrides)).needs_room is needs_room
    if not needs_room:
        staging = "trainer.v1.pipeline_rl.staging=none"
        assert read_transfer(compose_config(*overrides, staging)).needs_room


def test_bucket_smaller_than_a_weight_is_said_with_the_number_to_set() -> None:
    transfer = Transfer(sent_bytes=4, bucket_bytes=64 * MIB, needs_room=True)
    said = bucket_problem(transfer, 49152 * 576)
    assert said is not None and "update_weights_bucket_megabytes=64 is smaller" in said
    assert "108.0 MiB" in said and said.endswith("set it to 108 or more")
    assert bucket_problem(Transfer(4, 108 * MIB, needs_room=True), 49152 * 576) is None
    assert bucket_problem(Transfer(4, 64 * MIB), 49152 * 576) is None, "NCCL cuts a weight in pieces"
