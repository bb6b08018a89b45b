# SPDX-License-Identifier: Apache-2.0
"""Child program of test_weight_transfer: verl's FSDP2 engine sends over gloo, engines of one and two ranks stage.

python weight_updates.py FOLDER; RANK and WORLD_SIZE (of the trainer) in the environment. Rank 0 also plays the workers
of the generators and writes FOLDER/updates.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from scalerl_verl.cpu.gloo_checkpoint import GlooCheckpointEngine
from scalerl_verl.errors import WeightSyncError
from scalerl_verl.pipeline import pieces
from scalerl_verl.pipeline.sending import SendingWorker, stream_weights
from scalerl_verl.pipeline.weights import StagingWorker
from tests.unit.head.head_engines import Case, make_engine

MODELS = ("qwen3", "qwen3-tied", "qwen3-moe")
ADAPTED = ("qwen3", "qwen3-tied")
"""Models that also train adapters, which are sent merged."""
DTYPES = ("bfloat16", "float32")
ENGINES = {"TP 1": (1, "device"), "TP 2": (2, "device"), "TP 2, host": (2, "host")}
"""Ranks of the engine, and where it stages; without a GPU all of it is host memory."""
PIECE_BYTES = 4096
BUCKET_BYTES = 8192
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def make_workers(engine: Any, dtype: str, num_receivers: int, is_master: bool) -> tuple[Any, list[Any]]:
    """verl's workers without their constructors, which want Ray actors around them."""
    sender = SendingWorker.__new__(SendingWorker)
    sender.config = OmegaConf.create({"rollout": {"dtype": dtype}})
    sender.actor = SimpleNamespace(engine=engine)
    sender.checkpoint_engine = GlooCheckpointEngine(BUCKET_BYTES, is_master=is_master, timeout_s=60)
    receivers = []
    for rank in range(num_receivers):
        receiver = StagingWorker.__new__(StagingWorker)
        receiver.checkpoint_engine = GlooCheckpointEngine(BUCKET_BYTES, timeout_s=60)
        receiver.server_adapter = SimpleNamespace(rollout_rank=rank, replica_rank=0)
        receivers.append(receiver)
    return sender, receivers


def join_group(sender: Any, receivers: list[Any], rank: int) -> None:
    master = sender.checkpoint_engine.prepare()
    if rank > 0:
        sender.checkpoint_engine.init_process_group(-1, 1 + len(receivers), ("127.0.0.1", 1))
        return
    engines = [sender.checkpoint_engine, *(receiver.checkpoint_engine for receiver in receivers)]
    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(lambda at: engines[at].init_process_group(at, len(engines), master), range(len(engines))))


async def update(sender: Any, receivers: list[Any], staging: str, rank: int) -> list[tuple[str, bytes]]:
    """One update; what each receiver returned."""
    nobody: frozenset[Any] = frozenset()
    receiving = [receiver.stage_weights(staging, nobody, nobody, 1) for receiver in receivers] if rank == 0 else []
    _, *staged = await asyncio.gather(sender.update_weights(global_steps=1), *receiving)
    return staged


def run_update(engine: Any, dtype: str, num_ranks: int, staging: str, rank: int) -> dict[str, Any]:
    sender, receivers = make_workers(engine, dtype, num_ranks, rank == 0)
    join_group(sender, receivers, rank)
    gathered: set[str] = set()
    full_tensor = DTensor.full_tensor

    def gather(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        gathered.add(str(self.dtype).removeprefix("torch."))
        return full_tensor(self, *args, **kwargs)

    with mock.patch.object(DTensor, "full_tensor", gather):
        staged = asyncio.run(update(sender, receivers, staging, rank))
    if rank > 0:
        return {}
    layouts = [pickle.loads(layout).open(torch.device("cpu")) for _, layout in staged if layout]
    return {
        "gathered": sorted(gathered),
        "names": [name for name, _ in layouts[0]],
        "dtypes": sorted({str(weight.dtype).removeprefix("torch.") for layout in layouts for _, weight in layout}),
        "copies": len(layouts),
        "allocated": [receiver._staging.num_bytes for receiver in receivers if receiver._staging is not None],
        "weights": [sum(weight.nbytes for _, weight in layout) for layout in layouts],
        "layouts": layouts,
    }


def count_verl(engine: Any) -> dict[str, Any]:
    """What verl's engine hands out by itself."""
    weights = [(name, str(weight.dtype), weight.nbytes) for name, weight in engine.get_per_tensor_param()[0]]
    return {"bytes": sum(size for _, _, size in weights), "names": [name for name, _, _ in weights]}


def head_of_forward(engine: Any) -> torch.Tensor:
    """The output layer's weight as FSDP gives it to the forward pass."""
    seen = []
    layer = engine.module.get_output_embeddings()
    handle = layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    with torch.no_grad():
        engine.module(input_ids=torch.tensor([[1, 2, 3]]))
    handle.remove()
    if hasattr(engine.module, "reshard"):
        engine.module.reshard()
    return seen[0].full_tensor() if isinstance(seen[0], DTensor) else seen[0]


def check_values(engine: Any, result: dict[str, Any], masters: dict[str, torch.Tensor], dtype: str, head: Any) -> None:
    """Every staged number is the master's, rounded once; the head is what the trainer multiplies with."""
    for layout in result.pop("layouts", []):
        staged = dict(layout)
        for name, master in masters.items():
            if name in staged:
                assert torch.equal(staged[name], master.to(getattr(torch, dtype))), name
        if dtype == str(head.dtype).removeprefix("torch."):
            assert torch.equal(staged.get(HEAD, staged[EMBEDDING]), head)


def with_buffers(engine: Any) -> None:
    """Buffers as a router's balance has them, and counters: no FSDP shards those."""
    engine.module.model.register_buffer("balance", torch.full((4,), 1.0 + 2.0**-20))
    engine.module.model.register_buffer("num_seen", torch.tensor([2**40 + 1, 3]))
    engine.module.model.register_buffer("used", torch.tensor([True, False]))


def read_state(engine: Any) -> dict[str, torch.Tensor]:
    return {name: weight.full_tensor().clone() for name, weight in engine.module.state_dict().items()}


def merged_by_hand(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a fresh load would hold: W + B A alpha / r of each adapter, 8 / 4 here."""
    merged = {}
    for name, weight in state.items():
        if "lora_" in name:
            continue
        adapter = name.replace("base_layer.weight", "lora_{}.default.weight")
        if adapter != name:
            weight = weight + 2 * state[adapter.format("B")] @ state[adapter.format("A")]
        merged[name.removeprefix("base_model.model.").replace(".base_layer", "")] = weight
    return merged


def run_adapted(folder: Path, model: str, dtype: str, rank: int, world: int) -> dict[str, Any]:
    """Two updates of a model with adapters, which change before each; then one that ends after its first weight.

    Differences are relative to the largest number of a weight: the trainer sums a product in another order.
    """
    engine = make_engine(folder, Case(model=model, param_dtype="bf16", world=world, lora=True), lora={"merge": True})
    updates: list[dict[str, Any]] = []
    state = read_state(engine)
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                if "lora_B" in name:  # 0 at first
                    parameter.add_(0.1)
        state = read_state(engine)
        wanted = merged_by_hand(state)
        base = merged_by_hand({name: 0 * weight if "lora_B" in name else weight for name, weight in state.items()})
        result = run_update(engine, dtype, 1, "device", rank)
        for layout in result.pop("layouts", []):
            differences = {k: float((v.float() - wanted[k]).abs().max() / wanted[k].abs().max()) for k, v in layout}
            result["worst"] = max(differences.values())
            result["merged"] = [name for name, weight in layout if not torch.equal(wanted[name], base[name])]
            result["missing"] = sorted(set(wanted) - set(differences))
        updates.append(result)
    sending = stream_weights(engine, getattr(torch, dtype))
    next(sending)
    sending.close()
    left = [name for name, weight in read_state(engine).items() if not torch.equal(weight, state[name])]
    return {"updates": updates, "changed in the trainer": left}


def refuse_adapter(folder: Path, world: int) -> str:
    """What is said of an adapter that verl leaves out of the merged weights."""
    case = Case(model="qwen3-tied", world=world, lora=True, backend="torch")
    engine = make_engine(folder, case, lora={"merge": True}, target_modules=["q_proj", "embed_tokens"])
    try:
        next(stream_weights(engine, torch.bfloat16))
    except WeightSyncError as error:
        return str(error)
    return ""


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    pieces.PIECE_BYTES = PIECE_BYTES
    results: dict[str, Any] = {}
    for model in MODELS:
        engine = make_engine(folder, Case(model=model, param_dtype="bf16", world=world))
        masters = {name: weight.full_tensor() for name, weight in engine.module.state_dict().items()}
        head = head_of_forward(engine)
        results[f"{model}|verl"] = count_verl(engine)
        for dtype in DTYPES:
            for name, (num_ranks, staging) in ENGINES.items():
                result = run_update(engine, dtype, num_ranks, staging, rank)
                check_values(engine, result, masters, dtype, head)
                results[f"{model}|{dtype}|{name}"] = result
    for model in ADAPTED:
        for dtype in DTYPES:
            results[f"adapters|{model}|{dtype}"] = run_adapted(folder, model, dtype, rank, world)
    results["adapter left out"] = refuse_adapter(folder, world)
    with_buffers(engine)
    sent = dict(stream_weights(engine, torch.bfloat16))
    results["buffers"] = {
        name: (str(sent[f"model.{name}"].dtype), sent[f"model.{name}"].tolist())
        for name in ("balance", "num_seen", "used")
    }
    state = engine.module.state_dict()
    results["state dict afterwards"] = sorted({str(weight.dtype) for weight in state.values()})
    if rank == 0:
        (folder / "updates.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
