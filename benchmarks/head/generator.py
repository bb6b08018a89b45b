# SPDX-License-Identifier: Apache-2.0
"""What an FP32 head costs in the generator: its matrix product, and the throughput of a vLLM engine with it on and off.

python -m benchmarks.head.generator                on a CUDA device, as recorded: a minute and the start of an engine
python -m benchmarks.head.generator --no-engine    the products only
python -m benchmarks.head.generator --tiny         the same code in small, on a CPU too; records nothing

Every product is checked against float64 first; one that fails its bound is recorded as failed and not timed. The engine
is one process with weights made by vLLM (load_format=dummy) whose head is switched between rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import append_rows, describe_gpu, run_facts
from scalerl_verl.head.matmul import exact_fp32, mm_fp32
from scalerl_verl.head.precision import MAX_RELATIVE_ERROR, float64_logits, logit_errors, probe_columns

RIVAL_RELATIVE_ERROR = 5e-3
"""bf16 logits are 1.7e-3 off; more would be a broken call."""
OURS, BF16 = "scalerl_verl", "bf16 logits"
CALLS = 10


@dataclass(frozen=True)
class Sizes:
    """What is measured, in full or in small."""

    hidden: tuple[int, ...] = (1024, 4096)
    batches: tuple[int, ...] = (1, 16, 64, 256)
    vocab: int = 151936
    engine_hidden: int = 4096
    layers: int = 36
    """An engine of 8B parameters: a step takes the device longer than the processor, whose noise is then hidden."""
    num_requests: int = 256
    num_tokens: int = 128
    rounds: int = 12


TINY = Sizes((64,), (1, 8), 1000, 128, 2, 8, 8, 2)


def multiply_cast(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Operands cast to FP32 at every call."""
    with exact_fp32():
        return hidden_NH.float() @ weight_VH.float().t()


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    BF16: torch.nn.functional.linear,
    OURS: lambda hidden_NH, weight_VH: mm_fp32(hidden_NH, weight_VH.t()),
    "cast to FP32 each call": multiply_cast,
}


def percentiles(values: list[float]) -> dict[str, float]:
    numbers = np.percentile(values, [20, 50, 80])
    return {name: round(float(number), 4) for name, number in zip(("p20", "p50", "p80"), numbers, strict=True)}


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, until the device has finished."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        run()
        return time.perf_counter() - begin_s
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def repeat(run: Callable[..., Any], *operands: torch.Tensor) -> None:
    for _ in range(CALLS):
        run(*operands)


def bench_products(sizes: Sizes, device: torch.device, repetitions: int, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a size and implementation, which take turns; `CALLS` calls a measurement."""
    generator = torch.Generator(device).manual_seed(0)
    rows = []
    for num_hidden in sizes.hidden:
        weight_VH = torch.randn(sizes.vocab, num_hidden, device=device, generator=generator).bfloat16()
        columns = probe_columns(sizes.vocab).to(device)
        for batch in sizes.batches:
            hidden_NH = torch.randn(batch, num_hidden, device=device, generator=generator).bfloat16()
            reference = float64_logits(hidden_NH, weight_VH[columns])
            errors = {n: logit_errors(run(hidden_NH, weight_VH)[:, columns], reference) for n, run in PRODUCTS.items()}
            limits = {name: RIVAL_RELATIVE_ERROR if name == BF16 else MAX_RELATIVE_ERROR for name in PRODUCTS}
            timed = [name for name in PRODUCTS if errors[name]["relative_error"] <= limits[name]]
            times: dict[str, list[float]] = {name: [] for name in timed}
            for repetition in range(repetitions + 2):
                for name in timed:
                    spent = seconds_of(partial(repeat, PRODUCTS[name], hidden_NH, weight_VH), device)
                    if repetition >= 2:  # two rounds to warm up
                        times[name].append(spent / CALLS * 1e3)
            case = {"batch": batch, "hidden": num_hidden, "vocab": sizes.vocab, "dtype": "bfloat16"}
            for name in PRODUCTS:
                row = {"case": case, "impl": name, "metric": "head_product", "unit": "ms", "error": errors[name]}
                row |= {"failed": name not in timed, "peak_gib": None, **facts}
                if name in timed:
                    row |= percentiles(times[name])
                rows.append(row)
                shown = f"{row['p50']:8.3f} ms" if name in timed else "FAILED its check"
                print(f"H {num_hidden:5} batch {batch:4} {name:>24}: {shown}  {errors[name]['relative_error']:.1e}")
    return rows


def start_engine(sizes: Sizes, folder: Path) -> Any:
    """vLLM with an FP32 head on a Qwen3 of the given size; the head's check runs when the model is loaded."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", SCALERL_VERL_ACTIVE="1")
    from transformers import Qwen3Config
    from vllm import LLM

    hidden = sizes.engine_hidden
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=sizes.vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(hidden // 512, 1),
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        dtype="bfloat16",
    ).save_pretrained(folder)
    options: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.is_available():
        # As in training: decoding from CUDA graphs, without torch.compile.
        compilation = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [sizes.num_requests],
        }
        options = {"compilation_config": compilation, "gpu_memory_utilization": 0.5}
    return LLM(
        model=str(folder),
        hf_overrides={"head_dtype": "float32"},
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=sizes.num_requests,
        max_num_batched_tokens=max(4096, 16 * sizes.num_requests),
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=False,
        **options,
    )


class HeadSwitch:
    """Switches the head of a live engine and says what its logits are."""

    def __init__(self, llm: Any) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        model = llm.apply_model(lambda model: model)[0]
        (self.layer,) = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
        self.dtype: torch.dtype | None = None

    def set(self, fp32: bool) -> None:
        if hasattr(self.layer, "fp32_head"):
            self.layer.fp32_head = fp32
        else:
            self.layer.head_dtype = torch.float32 if fp32 else None

    def observe(self, run: Callable[[], Any]) -> torch.dtype | None:
        """dtype of the logits during a call."""
        hook = self.layer.register_forward_hook(lambda _, __, logits: setattr(self, "dtype", logits.dtype))
        run()
        hook.remove()
        return self.dtype


def bench_engine(sizes: Sizes, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens a second with the head on and off, rounds taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        llm = start_engine(sizes, Path(folder))
    from vllm import SamplingParams

    from scalerl_verl.upstream import status

    (record,) = status.read_facts("fp32_head")
    prompts = [{"prompt_token_ids": [1 + i % 7] * 16} for i in range(sizes.num_requests)]
    params = SamplingParams(max_tokens=sizes.num_tokens, logprobs=0, ignore_eos=True, detokenize=False)
    switch = HeadSwitch(llm)

    def generate() -> None:
        llm.generate(prompts, params, use_tqdm=False)

    wanted = {BF16: torch.bfloat16, OURS: torch.float32}
    for name, dtype in wanted.items():
        switch.set(dtype == torch.float32)
        seen = switch.observe(generate)  # warms up, too
        if seen != dtype:
            raise RuntimeError(f"{name}: the engine's logits are {seen}, not {dtype}: switching the head had no effect")
    rates: dict[str, list[float]] = {name: [] for name in wanted}
    for _ in range(sizes.rounds):
        for name, dtype in wanted.items():
            switch.set(dtype == torch.float32)
            begin_s = time.perf_counter()
            generate()
            rates[name].append(sizes.num_requests * sizes.num_tokens / (time.perf_counter() - begin_s))
    case = {"requests": sizes.num_requests, "tokens": sizes.num_tokens, "hidden": sizes.engine_hidden}
    case |= {"layers": sizes.layers, "vocab": sizes.vocab, "dtype": "bfloat16"}
    rows = []
    for name in wanted:
        error = {key: record[key] for key in ("max_abs_error", "relative_error")} if name == OURS else None
        row = {"case": case, "impl": name, "metric": "engine_throughput", "unit": "tokens/s", "peak_gib": None}
        rows.append(row | {"error": error, "failed": False, **percentiles(rates[name]), **facts})
        print(f"engine {name:>24}: {rows[-1]['p50']:10.0f} tokens/s")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--no-engine", action="store_true", help="measure the products only")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any device; record nothing")
    parser.add_argument("--dry-run", action="store_true", help="print, record nothing")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not arguments.tiny:
        print("no CUDA device: these numbers mean something on one only", file=sys.stderr)
        return 2
    sizes = TINY if arguments.tiny else Sizes()
    facts = {**run_facts(uuid.uuid4().hex[:12]), **(describe_gpu() if on_gpu else {})}
    rows = bench_products(sizes, torch.device("cuda" if on_gpu else "cpu"), arguments.repetitions, facts)
    if not arguments.no_engine:
        if on_gpu:
            torch.cuda.empty_cache()
        rows += bench_engine(sizes, facts)
    if not (arguments.tiny or arguments.dry_run):
        append_rows("vllm_head", rows)
    return int(any(row["failed"] for row in rows if row["impl"] == OURS))


if __name__ == "__main__":
    sys.exit(main())
