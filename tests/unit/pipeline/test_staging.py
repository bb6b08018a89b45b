# SPDX-License-Identifier: Apache-2.0
"""The memory in which weights are collected: what the other process sees, and when it has to be told anew."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import pytest
import torch

from scalerl_verl.pipeline import pieces
from scalerl_verl.pipeline.pieces import ALIGNMENT
from scalerl_verl.pipeline.staging import Layout, StagingBuffer

CPU = torch.device("cpu")
OTHER_PROCESS = """
import pickle, sys, torch
layout = pickle.loads(bytes.fromhex(sys.stdin.readline()))
weights = layout.open(torch.device("cpu"))
while sys.stdin.readline():
    print({name: weight.double().sum().item() for name, weight in weights}, flush=True)
"""


def weights_of(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {
        "embedding": torch.randn(30, 7, generator=draw),
        "gate": torch.randn(5, generator=draw, dtype=torch.float64),
        "norm": torch.randn(3, generator=draw).bfloat16(),
        "scale": torch.randn((), generator=draw),
        "none": torch.zeros(0, 4),
        "strided": torch.randn(6, 4, generator=draw).t(),
        "head": torch.randn(30, 7, generator=draw).half(),
    }


def fill(buffer: StagingBuffer, weights: dict[str, torch.Tensor]) -> Layout:
    buffer.begin()
    for name, weight in weights.items():
        buffer.put(name, weight)
    return pickle.loads(buffer.finish())


def assert_seen(layout: Layout, weights: dict[str, torch.Tensor]) -> None:
    seen = layout.open(CPU)
    assert [name for name, _ in seen] == list(weights)
    for name, weight in seen:
        assert weight.dtype == weights[name].dtype and weight.shape == weights[name].shape
        assert torch.equal(weight, weights[name]), name


@pytest.fixture(params=[64, 1024, pieces.PIECE_BYTES], ids=["weights larger than a piece", "several", "one piece"])
def buffer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StagingBuffer:
    monkeypatch.setattr(pieces, "PIECE_BYTES", request.param)
    return StagingBuffer(on_device=True)


def test_every_weight_is_seen_as_it_was_sent(buffer: StagingBuffer) -> None:
    layout = fill(buffer, weights_of(0))
    assert_seen(layout, weights_of(0))
    assert all(place.offset % ALIGNMENT == 0 for place in layout.places)


def test_memory_is_opened_once_and_shows_every_version(buffer: StagingBuffer) -> None:
    layout = fill(buffer, weights_of(0))
    first = buffer.layout_id
    fill(buffer, weights_of(1))
    assert buffer.layout_id == first
    assert_seen(layout, weights_of(1))


def test_no_weight_lies_on_another(buffer: StagingBuffer) -> None:
    layout = fill(buffer, weights_of(0))
    taken = sorted((p.segment, p.offset, p.offset + p.shape.numel() * p.dtype.itemsize) for p in layout.places)
    for (segment, _, end), (next_segment, start, _) in itertools.pairwise(taken):
        assert next_segment > segment or start >= end


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.update(head=torch.ones(40, 7)),
        lambda weights: weights.update(gate=torch.ones(5)),
        lambda weights: weights.pop("head"),
        lambda weights: weights.update(more=torch.ones(2)),
        lambda weights: weights.update(embedding=weights.pop("embedding")),
    ],
    ids=["shape", "dtype", "one fewer", "one more", "order"],
)
def test_other_weights_are_another_layout(buffer: StagingBuffer, change: object) -> None:
    fill(buffer, weights_of(0))
    before, changed = buffer.layout_id, weights_of(1)
    change(changed)  # type: ignore[operator]
    assert_seen(fill(buffer, changed), changed)
    assert buffer.layout_id != before
    settled = buffer.layout_id
    fill(buffer, changed)
    assert buffer.layout_id == settled


def test_another_process_sees_versions_as_they_come(buffer: StagingBuffer) -> None:
    layout = fill(buffer, weights_of(0))
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    with other:
        print(pickle.dumps(layout).hex(), file=other.stdin, flush=True)
        for version in (0, 1, 2):
            fill(buffer, weights_of(version))
            print(file=other.stdin, flush=True)
            wanted = {name: weight.double().sum().item() for name, weight in weights_of(version).items()}
            assert eval(other.stdout.readline()) == pytest.approx(wanted)
        other.stdin.close()
