# SPDX-License-Identifier: Apache-2.0
"""vLLM side: every request samples by a seed of its own, where the environment asks for it."""

from __future__ import annotations

import functools
import os
import zlib
from typing import Any


def register() -> None:
    """Called by vLLM in every process, possibly more than once."""
    if not os.environ.get("PROBE_SEED"):
        return
    from vllm.v1.engine.async_llm import AsyncLLM

    generate = AsyncLLM.generate
    if hasattr(generate, "__wrapped__"):
        return

    @functools.wraps(generate)
    def seeded(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        # The seed that came along is its response's. A second request of a response must not draw the same again.
        sampling_params.seed = zlib.crc32(repr((sampling_params.seed, list(prompt["prompt_token_ids"]))).encode())
        return generate(self, prompt, sampling_params, *args, **kwargs)

    AsyncLLM.generate = seeded
