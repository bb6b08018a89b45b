# SPDX-License-Identifier: Apache-2.0
"""The call into vLLM's engine core, on vLLM's own requests and block hashes."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()
pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from scalerl_verl.pipeline.vllm import begin_version, swap_weights  # noqa: E402

BLOCK = 4


def make_request(name: str, salt: str | None) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(10)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def engine_with(*requests: Request) -> Any:
    """Stands for the EngineCore, of which the call reads the scheduler's requests and nothing else."""
    return SimpleNamespace(scheduler=SimpleNamespace(requests={r.request_id: r for r in requests}))


@pytest.mark.fault("the prefix cache serves a new request KV of old weights")
def test_waiting_request_gets_the_prefix_of_the_new_weights() -> None:
    """Fault: prefix cache keeps blocks of old weights, and a new request is served KV many versions old."""
    waiting = make_request("waiting", "weights-1")
    old, fresh = list(waiting.block_hashes), make_request("fresh", "weights-2").block_hashes
    assert old != fresh
    assert begin_version(engine_with(waiting), "weights-2") == {"waiting": (0, 0)}
    assert waiting.block_hashes == fresh and waiting.cache_salt == "weights-2"


def test_waiting_request_that_goes_on_with_a_response_keeps_its_prefix() -> None:
    waiting = make_request("waiting", "weights-1")
    before = list(waiting.block_hashes)
    assert begin_version(engine_with(waiting), "weights-2", ["waiting"]) == {"waiting": (0, 0)}
    assert waiting.block_hashes == before and waiting.cache_salt == "weights-1"


@pytest.mark.fault("the prefix cache serves a new request KV of old weights")
def test_running_request_keeps_its_prefix_and_is_counted() -> None:
    running, prefilling = make_request("running", "weights-1"), make_request("prefilling", "weights-1")
    running.num_computed_tokens = 12
    running.append_output_token_ids([7, 7, 7])
    prefilling.num_computed_tokens = BLOCK
    before = list(running.block_hashes), list(prefilling.block_hashes)
    counts = begin_version(engine_with(running, prefilling), "weights-2")
    assert counts == {"running": (3, 12), "prefilling": (0, BLOCK)}
    assert (running.block_hashes, prefilling.block_hashes) == before
    running.append_output_token_ids([8, 8, 8])
    assert len(running.block_hashes) == 16 // BLOCK, "its later blocks are hashed on as before"


def test_preempted_request_is_no_new_one() -> None:
    """Its tokens were sampled under the old weights; it is the same response that goes on."""
    preempted = make_request("preempted", "weights-1")
    preempted.append_output_token_ids([5])
    before = list(preempted.block_hashes)
    assert begin_version(engine_with(preempted), "weights-2") == {"preempted": (1, 0)}
    assert preempted.block_hashes == before


def test_engine_that_could_not_pause_is_not_loaded_into() -> None:
    """Since 0.31 vLLM reports a failed pause through its future; the steps may still run then."""
    paused, loaded = Future(), []
    engine = SimpleNamespace(
        pause_scheduler=lambda mode, clear_cache: paused,
        model_executor=SimpleNamespace(collective_rpc=lambda *args, **kwargs: loaded.append(args)),
    )
    swapped = swap_weights(engine, "weights-1", [b""], recompute=False)
    assert not swapped.done()
    paused.set_exception(RuntimeError("planted fault"))
    with pytest.raises(RuntimeError, match="planted fault"):
        swapped.result(timeout=0)
    assert loaded == []
