# SPDX-License-Identifier: Apache-2.0
"""Calls into vLLM's engine core at a weight update: token counts, a new prefix-cache salt, and the swap itself.

The front end sees tokens some time after they were sampled; only the scheduler knows the exact count at the moment of
the swap. And it alone can see that a request, sent under the old weights, has not started yet. Pausing, loading and
resuming in one call saves round trips between processes while the engine stands still.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from scalerl_verl.errors import WeightSyncError
from scalerl_verl.upstream.spec import PatchSpec

METHOD = "scalerl_begin_version"
SWAP = "scalerl_swap_weights"
RECOMPUTE = "scalerl_force_recompute"


def begin_version(engine: Any, salt: str, continued: Collection[str] = ()) -> dict[str, tuple[int, int]]:
    """Note a change of weights while the scheduler is paused.

    Requests that have not computed anything yet belong to the new weights: they get its salt, so that they cannot
    take over a prefix computed under the old ones.

    Args:
        engine: vLLM's EngineCore.
        salt: ``cache_salt`` of the new weights.
        continued: ids of requests that go on with a prefix of their own, which stays what it is.

    Returns:
        Engine-internal request id -> (tokens sampled so far, tokens in its KV cache).
    """
    counts = {}
    for request_id, request in engine.scheduler.requests.items():
        counts[request_id] = (request.num_output_tokens, request.num_computed_tokens)
        if request_id not in continued and request.num_output_tokens == 0 and request.num_computed_tokens == 0:
            request.cache_salt = salt
            request.block_hashes = []
            request.update_block_hashes()
    return counts


def swap_weights(
    engine: Any, salt: str, staged: list[bytes], recompute: bool, continued: Collection[str] = ()
) -> Future[dict[str, Any]]:
    """Pause with every request kept, load the staged weights, note the new version, resume.

    Args:
        engine: vLLM's EngineCore.
        salt: ``cache_salt`` of the new weights.
        staged: for each rank of the engine the layout of its staged weights, see `scalerl_verl.generator.worker`.
        recompute: whether running requests have to compute their KV again.
        continued: as of `begin_version`.

    Returns:
        Future of ``counts`` as of `begin_version`, ``drain_s`` (from the call to the end of the steps that were under
        way), ``swap_s`` (loading) and ``pause_s`` (no step runs; ``swap_s`` included). On an error the engine stays
        paused: its weights may be half old, half new.
    """
    called = time.perf_counter()
    result: Future[dict[str, Any]] = Future()

    def swap(paused: Future[None] | None = None) -> None:
        try:
            if paused is not None:
                paused.result()  # since 0.31 vLLM reports here that it could not pause
            idle = time.perf_counter()
            engine.model_executor.collective_rpc("update_weights_from_ipc", kwargs={"staged": staged})
            loaded = time.perf_counter()
            counts = begin_version(engine, salt, continued)
            if recompute:
                force_recompute(engine)
            engine.resume_scheduler()
            # The engine's loop called this right before it waits for a message; any will do.
            engine.input_queue.put_nowait((_wake_up(), None))
            times = {"drain_s": idle - called, "swap_s": loaded - idle, "pause_s": time.perf_counter() - idle}
            result.set_result({"counts": counts, **times})
        except Exception as error:  # noqa: BLE001 - goes to who waits; raised here, it would end the engine's loop
            result.set_exception(error)

    paused = engine.pause_scheduler(mode="keep", clear_cache=False)
    if paused is None:
        swap()
    else:
        paused.add_done_callback(swap)
    return result


def force_recompute(engine: Any) -> None:
    """Make all requests of the paused engine compute their KV again.

    Raises:
        WeightSyncError: vLLM would not let go of the old KV.
    """
    if not engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise WeightSyncError(
            "vLLM kept KV of the old weights although it was asked to recompute it (kv_on_update=recompute). Set "
            "kv_on_update=keep, and report this vLLM version"
        )


def _wake_up() -> Any:
    from vllm.v1.engine import EngineCoreRequestType

    return EngineCoreRequestType.WAKEUP


def _build(original: Any, module: ModuleType) -> Any:
    setattr(original, METHOD, begin_version)
    setattr(original, SWAP, swap_weights)
    setattr(original, RECOMPUTE, force_recompute)
    return original


SPECS = (
    PatchSpec(
        name="vllm.engine.begin_version",
        module="vllm.v1.engine.core",
        target="EngineCore",
        build=_build,
        kind="register",
        why="A weight update needs the token count of each request at the moment of the swap, must keep waiting "
        "requests from reusing a prefix of the old weights, and should pause for the swap only. The engine core "
        "answers calls to its own methods only, so ours are added to it.",
        distribution="vllm",
        sources=(),
        removal="vLLM reports token counts when it pauses, salts prefixes by weight version, and loads weights that "
        "were staged before the pause",
        late_ok=True,
        attributes=("scheduler", "model_executor"),
    ),
)
