# SPDX-License-Identifier: Apache-2.0
"""vLLM's `LLM.generate`, the batch call of a script without a server, on an engine set up as the server's was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.frontend.turns import measured


def make_llm(config: Any) -> Any:
    """`LLM` with the settings of an engine that has ended. ``config`` is that engine's ``VllmConfig``."""
    from vllm import LLM

    model, scheduler, cache, compilation = (
        config.model_config,
        config.scheduler_config,
        config.cache_config,
        config.compilation_config,
    )
    return LLM(
        model=model.model,
        dtype=model.dtype,
        seed=model.seed,
        max_model_len=model.max_model_len,
        enforce_eager=model.enforce_eager,
        logprobs_mode=model.logprobs_mode,
        load_format=config.load_config.load_format,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        enable_prefix_caching=cache.enable_prefix_caching,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        async_scheduling=scheduler.async_scheduling,
        compilation_config={
            "mode": int(compilation.mode),
            "cudagraph_mode": compilation.cudagraph_mode.name,
            "cudagraph_capture_sizes": compilation.cudagraph_capture_sizes,
        },
    )


def take_turn(llm: Any, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, float]:
    """What one call that answers all costs this process (`measured`), and whether an answer lacks tokens."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=1.0, logprobs=0, detokenize=False, max_tokens=num_tokens, ignore_eos=True)
    llm.reset_prefix_cache()
    with measured() as found:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    complete = all(len(answer.token_ids) == len(answer.logprobs) == num_tokens for answer in answers)
    return {**found, "failed": not complete}
