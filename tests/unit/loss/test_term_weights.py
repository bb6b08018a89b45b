# SPDX-License-Identifier: Apache-2.0
"""Weights of rows on their way from the driver to the terms of the loss; test_engine_gradients has the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from scalerl_verl.loss.term_weights import FIELD, read_weights, write_weights

LENGTHS = {"a_0_0": 3, "b_0_0": 1, "c_0_0": 5}


class QueueInMemory:
    """Stands for verl's TransferQueue, which needs Ray: knows the masks, keeps what is put."""

    def __init__(self) -> None:
        self.put: TensorDict | None = None

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        assert select_fields == ["response_mask"]
        masks = [torch.ones(LENGTHS[key], dtype=torch.long) for key in keys]
        column = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        return TensorDict({"response_mask": column}, batch_size=len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.put = fields
        return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition_id, fields=["advantages", FIELD])


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> QueueInMemory:
    queue = QueueInMemory()
    for name in ("kv_batch_get", "kv_batch_put"):
        monkeypatch.setattr(tq, name, getattr(queue, name))
    return queue


def micro_batch(queue: QueueInMemory, rows: list[int]) -> Any:
    """These rows, as verl's workers cut them out of what they got."""
    assert queue.put is not None
    column = torch.nested.as_nested_tensor([queue.put[FIELD][row] for row in rows], layout=torch.jagged)
    return TensorDict({FIELD: column}, batch_size=len(rows))


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_each_row_gets_its_weight_whatever_micro_batch_it_is_in(queue: QueueInMemory, rows: list[int]) -> None:
    weights_B = np.array([0.5, 0.0, 2.25])
    batch = KVBatchMeta(keys=list(LENGTHS), tags=[{}, {}, {}], partition_id="train", extra_info={"of": "verl"})
    written = write_weights(batch, weights_B)
    assert written.keys == batch.keys and written.extra_info == {"of": "verl"} and FIELD in written.fields
    assert queue.put is not None and queue.put[FIELD].offsets().diff().tolist() == list(LENGTHS.values())
    found = read_weights(micro_batch(queue, rows))
    assert found is not None and found.tolist() == weights_B[rows].tolist()


def test_batches_without_weights_have_none() -> None:
    assert read_weights(TensorDict({"advantages": torch.ones(2, 3)}, batch_size=2)) is None
