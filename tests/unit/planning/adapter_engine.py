# SPDX-License-Identifier: Apache-2.0
"""Child program of test_adapters.py: bytes of verl's FSDP2 engine with adapters after a step of AdamW.

python -m tests.unit.planning.adapter_engine FOLDER TARGETS, where FOLDER/model is a model and TARGETS a JSON value.
The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.unit.head.head_engines import Case, make_engine


def local_bytes(tensors: list[torch.Tensor]) -> int:
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def main() -> None:
    folder, targets = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    case = Case(model="model", fused=False, lora=True)
    engine = make_engine(folder, case, "AdamW", lora={"merge": True}, target_modules=targets)
    engine.module(input_ids=torch.arange(1, 9)[None]).logits.square().mean().backward()
    parameters = list(engine.module.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    engine.optimizer.step()
    states = [value for state in engine.optimizer.state.values() for value in state.values() if value.ndim]
    sizes = {"weights": parameters, "gradients": gradients, "optimizer": states}
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    print(json.dumps({**{name: local_bytes(tensors) for name, tensors in sizes.items()}, "trained": trained}))


if __name__ == "__main__":
    main()
