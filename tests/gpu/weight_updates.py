# SPDX-License-Identifier: Apache-2.0
"""Child program of test_weight_updates: verl's FSDP engines on a GPU, weights staged for another process.

python -m tests.gpu.weight_updates FOLDER; reads FOLDER/<model>, writes FOLDER/updates.json: what arrived in the other
process, and what the device needed meanwhile, for each strategy, model and staging.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import verl  # noqa: F401 - loads the plugin

from scalerl_verl.pipeline.sending import stream_weights
from scalerl_verl.pipeline.staging import StagingBuffer
from tests.unit.head.head_engines import Case, make_engine

STRATEGIES = ("fsdp2", "fsdp")
MODELS = ("qwen3", "qwen3-tied")
STAGING = ("device", "host")
TIMEOUT_S = 150
"""Seconds after which each process says where it hangs."""


def digest(weight: torch.Tensor) -> str:
    """Of its bits, dtype and shape."""
    data = weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{weight.dtype} {tuple(weight.shape)} {hashlib.sha256(data).hexdigest()}"


def read_layouts(connection: Any) -> None:
    """The generator's side, in a process of its own: open each layout and say what lies there, twice a layout."""
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    kept = []  # a generator never lets go of memory that it opened
    while (layout := connection.recv()) is not None:
        weights = pickle.loads(layout).open(device)
        for _ in range(2):
            connection.send({name: digest(weight.to(device)) for name, weight in weights})
            connection.recv()
        kept.append(weights)


def update(engine: Any, staging: StagingBuffer) -> dict[str, Any]:
    """One transfer into the staging buffer; seconds, and bytes that the device needed beyond the buffer."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, staged = torch.cuda.memory_allocated(), staging.num_bytes
    started = time.perf_counter()
    staging.begin()
    largest = 0
    for name, weight in stream_weights(engine, torch.bfloat16):
        staging.put(name, weight)
        largest = max(largest, weight.nbytes)
    staging.finish()
    on_device = staging.num_bytes - staged if staging._on_device else 0
    return {
        "seconds": time.perf_counter() - started,
        "extra_bytes": torch.cuda.max_memory_allocated() - before - on_device,
        "largest_bytes": largest,
    }


def rounded(engine: Any) -> dict[str, str]:
    """What has to arrive: verl's own weights in full precision, rounded once."""
    weights = engine.get_per_tensor_param()[0]
    return {name: digest(weight.to(torch.bfloat16)) for name, weight in weights}


def run(folder: Path, strategy: str, model: str, connection: Any, kept: list[StagingBuffer]) -> dict[str, Any]:
    engine = make_engine(folder, Case(model=model, param_dtype="bf16", strategy=strategy))
    results = {}
    for name in STAGING:
        staging = StagingBuffer(on_device=name == "device")
        found = update(engine, staging)
        connection.send(staging.finish())
        first, wanted = connection.recv(), rounded(engine)
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(1.5)
        again = update(engine, staging)
        connection.send("next")
        second, changed = connection.recv(), rounded(engine)
        connection.send("done")
        kept.append(staging)
        results[name] = {
            **again,
            "first_seconds": found["seconds"],
            "bytes": staging.num_bytes,
            "missing": sorted(set(wanted) - set(first)),
            "wrong": sorted(name for name in first if first[name] != wanted[name]),
            "wrong_after_update": sorted(name for name in second if second[name] != changed[name]),
            "names": len(second),
        }
    return results


def main() -> None:
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    folder = Path(sys.argv[1])
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=read_layouts, args=(theirs,), daemon=True)
    reader.start()
    theirs.close()  # the reader's end is the reader's alone: if it dies, waiting for it fails
    kept: list[StagingBuffer] = []
    results = {f"{s}|{m}": run(folder, s, m, ours, kept) for s in STRATEGIES for m in MODELS}
    ours.send(None)
    reader.join()
    (folder / "updates.json").write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
