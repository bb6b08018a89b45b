# SPDX-License-Identifier: Apache-2.0
"""A call into vLLM's engine core at a weight update: how many tokens each request has, and a new prefix-cache salt.

The front end sees tokens some time after they were sampled; only the scheduler knows the exact count at the moment of
the swap. And it alone can see that a request, sent under the old weights, has not started yet.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import PatchSpec

METHOD = "scalerl_begin_version"


def begin_version(engine: Any, salt: str) -> dict[str, tuple[int, int]]:
    """Note a change of weights while the scheduler is paused.

    Requests that have not computed anything yet belong to the new weights: they get its salt, so that they cannot
    take over a prefix computed under the old ones.

    Args:
        engine: vLLM's EngineCore.
        salt: ``cache_salt`` of the new weights.

    Returns:
        Engine-internal request id -> (tokens sampled so far, tokens in its KV cache).
    """
    counts = {}
    for request_id, request in engine.scheduler.requests.items():
        counts[request_id] = (request.num_output_tokens, request.num_computed_tokens)
        if request.num_output_tokens == 0 and request.num_computed_tokens == 0:
            request.cache_salt = salt
            request.block_hashes = []
            request.update_block_hashes()
    return counts


def _build(original: Any, module: ModuleType) -> Any:
    setattr(original, METHOD, begin_version)
    return original


SPECS = (
    PatchSpec(
        name="vllm.engine.begin_version",
        module="vllm.v1.engine.core",
        target="EngineCore",
        build=_build,
        kind="register",
        why="A weight update has to know each request's token count at the swap, and requests that wait in the engine "
        "must not reuse a prefix of the old weights; the engine core answers calls to its own methods only.",
        distribution="vllm",
        versions=">=0.24.0,<0.29",
        sources=(),
        when="named",
        removal="vLLM reports token counts when it pauses, and salts prefixes by weight version",
        late_ok=True,
    ),
)
