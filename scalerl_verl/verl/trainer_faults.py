# SPDX-License-Identifier: Apache-2.0
"""Faults of verl 0.9.1 that break disaggregated training."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

_VERSIONS = VERL_VERSIONS


def _build_logger(original: Any, module: ModuleType) -> Any:
    info = original.info

    @functools.wraps(info)
    def info_without_flush(message: object, *args: Any, flush: bool = False, **kwargs: Any) -> None:
        info(message, *args, **kwargs)

    original.info = info_without_flush
    return original


def _build_snapshot(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> Any:
        shards, spec = original(model)
        return {name: (tensor.clone(), layout) for name, (tensor, layout) in shards.items()}, spec

    return fsdp2_sharded_save_to_cpu


def _build_poll(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        interval = (self.sampler_kwargs or {}).get("poll_interval_s")
        if interval is not None:
            self.poll_interval = float(interval)

    return __init__


SPECS = (
    PatchSpec(
        name="verl.separate_async.logger_flush",
        module="verl.trainer.ppo.v1.trainer_separate_async",
        target="logger",
        build=_build_logger,
        kind="wrap",
        why="PPOTrainerSeparateAsync._setup calls logger.info(..., flush=True) when hybrid_engine=False: a TypeError "
        "as soon as INFO is enabled.",
        distribution="verl",
        versions=_VERSIONS,
        sources=(),
        when="named",
        removal="verl drops flush=True from that call",
        late_ok=True,
    ),
    PatchSpec(
        name="verl.fsdp2.cpu_snapshot",
        module="verl.utils.fsdp_utils",
        target="fsdp2_sharded_save_to_cpu",
        build=_build_snapshot,
        kind="wrap",
        why="tensor.detach().cpu() returns the parameter's own memory when it already lives on the CPU: the saved "
        "pi_old silently follows training when parameter_sync_step > 1.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("5e1356156fc38b8b4f96fcb8c7cf0a3614ccadc5ebf6a5b3d34c8b1d8eb6c180",),
        when="cpu",
        removal="verl copies instead of calling .cpu()",
    ),
    PatchSpec(
        name="verl.replay_buffer.poll_interval",
        module="verl.trainer.ppo.v1.replay_buffer",
        target="ReplayBuffer.__init__",
        build=_build_poll,
        kind="wrap",
        why="The built-in buffer polls every 2 s, which is the step time of a small model; the trainer has no key "
        "for it. trainer.v1.sampler.sampler_kwargs.poll_interval_s (which the built-in buffer ignores) sets it.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("5e227f18fc7ca68443fac67809e115ae562049fb2662b897873480ec4d131cef",),
        when="named",
        removal="verl exposes poll_interval in trainer.v1.sampler",
        late_ok=True,
    ),
)
