# SPDX-License-Identifier: Apache-2.0
"""Row weights for the terms beside the policy loss: a KL loss and an entropy bonus have no advantage to carry them.

The driver folds weights into the advantages, and writes them into the batch once more, by themselves. In the trainer's
workers they multiply these terms before verl aggregates them. So all terms average over the same tokens in the same
way: `prompt-mean` over prompts, and responses that a filter or a reward shaping leaves out are left out of all.

Shape legend: B rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FIELD = "scalerl_row_weights"
"""Column of the batch: the row's weight at each token of its response, as verl lays out advantages."""


def write_weights(batch: Any, weights_B: NDArray[np.float64]) -> Any:
    """Add the weights to the batch that the trainer's workers get.

    Args:
        batch: verl's KVBatchMeta.
        weights_B: in the order of its rows, padding rows included, [B].

    Returns:
        verl's KVBatchMeta with the new column.
    """
    import transfer_queue as tq
    from tensordict import TensorDict

    kind = {"keys": batch.keys, "partition_id": batch.partition_id}
    mask = tq.kv_batch_get(**kind, select_fields=["response_mask"])["response_mask"]
    lengths_B = mask.offsets().diff().tolist()
    rows = [torch.full((length,), float(weight)) for length, weight in zip(lengths_B, weights_B, strict=True)]
    column = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    written = tq.kv_batch_put(**kind, fields=TensorDict({FIELD: column}, batch_size=len(rows)))
    written.extra_info.update(batch.extra_info)
    return written


def read_weights(micro_batch: Any) -> torch.Tensor | None:
    """Weight of each row of a micro-batch in the trainer's workers, [B]; None if its terms have none."""
    if FIELD not in micro_batch:
        return None
    column = micro_batch[FIELD]
    return column.values()[column.offsets()[:-1]]
