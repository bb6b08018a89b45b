# SPDX-License-Identifier: Apache-2.0
"""Times against verl's count of operations, a recorded engine, and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config
from verl.utils.flops_counter import _DEVICE_FLOPS, _estimate_qwen2_flops

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.json_lines import read_records
from scalerl_verl.planning.balance import (
    DEVICES,
    Assumptions,
    decode_step_s,
    find_rates,
    touched_weights,
    training_flops,
)
from scalerl_verl.shapes import find_shape

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "vllm_head.jsonl"
ENGINES = [row for row in read_records(RESULTS) if row["metric"] == "engine_throughput"]
DENSE, MIXTURE = find_shape("Qwen/Qwen3-8B-Base"), find_shape("Qwen/Qwen3-30B-A3B-Base")
MEAN = Assumptions(mean_prompt=512, mean_response=7168)


def test_training_flops_are_verl_s_without_the_embedding_lookup() -> None:
    config = Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
    )
    verl = _estimate_qwen2_flops(config, 7680, [7680], 1.0) * 1e12
    lookup = 6 * 151936 * 4096 * 7680
    assert training_flops(DENSE, 1, MEAN, num_forwards=1) == pytest.approx(verl - lookup, rel=1e-9)
    assert training_flops(DENSE, 10, MEAN, num_forwards=2) == pytest.approx(10 * 4 / 3 * (verl - lookup), rel=1e-9)


@pytest.mark.parametrize("name", DEVICES)
def test_operations_a_second_are_verl_s(name: str) -> None:
    assert DEVICES[name].flops == _DEVICE_FLOPS[name.upper()]


@pytest.mark.parametrize("row", ENGINES, ids=lambda row: row["impl"])
def test_decoding_is_as_fast_as_the_recorded_engine(row: dict) -> None:
    """A tied model of the 8B's layers, prompts of 16 tokens; the default efficiency was chosen by these rows."""
    case = row["case"]
    assert (case["hidden"], case["layers"], case["vocab"]) == (DENSE.hidden, DENSE.num_layers, DENSE.vocab)
    mean = Assumptions(mean_prompt=16, mean_response=case["tokens"])
    step_s = decode_step_s(replace(DENSE, tied=True), DEVICES["h200"], case["requests"], 1, mean)
    assert case["requests"] / step_s == pytest.approx(row["p50"], rel=0.15)


def test_recorded_engines_are_there() -> None:
    assert len(ENGINES) >= 2


def test_few_sequences_read_few_experts() -> None:
    experts = 48 * 128 * 3 * 2048 * 768
    dense = MIXTURE.num_params - experts - 151936 * 2048
    assert touched_weights(MIXTURE, 1) == pytest.approx(dense + experts * 8 / 128)
    assert touched_weights(MIXTURE, 1e6) == pytest.approx(dense + experts)
    assert touched_weights(DENSE, 1) == DENSE.num_params - 151936 * 4096


def test_rates_by_hand() -> None:
    device = DEVICES["h100"]
    rates = find_rates(DENSE, device, MEAN, 768, 2, 64, 1)
    assert rates.training_gpu_s == pytest.approx(training_flops(DENSE, 768, MEAN, 2) / (989e12 * 0.35))
    step_s = decode_step_s(DENSE, device, 64, 1, MEAN)
    prefill = 768 * 512 * 2 * DENSE.active_params / (989e12 * 0.35)
    assert rates.generation_gpu_s == pytest.approx(768 * 7168 * step_s / 64 + prefill)
    training_s, generation_s = rates.step_s(80 * rates.trainer_share, 80 * (1 - rates.trainer_share))
    assert training_s == pytest.approx(generation_s), "the share is that at which neither side waits"


@pytest.mark.parametrize(
    "wrong", [{"mean_prompt": 0}, {"training_efficiency": 1.5}, {"decode_efficiency": 0}, {"mean_response": -1}]
)
def test_impossible_assumptions_are_refused(wrong: dict) -> None:
    (name,) = wrong
    with pytest.raises(ScaleRLConfigError, match=name):
        replace(MEAN, **wrong)
