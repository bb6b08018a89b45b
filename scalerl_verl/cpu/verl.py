# SPDX-License-Identifier: Apache-2.0
"""What verl needs to train on a CPU."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

_VERSIONS = VERL_VERSIONS


def _build_process_group(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: Any = None, backend: Any = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


def _register_engines(original: Any, module: ModuleType) -> Any:
    register = module.EngineRegistry.register
    for model_type, engine in (
        ("language_model", module.FSDPEngineWithLMHead),
        ("value_model", module.FSDPEngineWithValueHead),
    ):
        register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(_without_pinned_memory(engine))
    return original


def _without_pinned_memory(engine: Any) -> Any:
    """The engine, whose weights are never moved to pinned host memory: there is none without a GPU.

    verl does that with the weights of a reference policy, which only runs forward; on a CPU they are in host memory.
    """

    def _build_fsdp_module(self: Any, module: Any) -> Any:
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return engine._build_fsdp_module(self, module)
        finally:
            self.engine_config = config

    return type(engine.__name__, (engine,), {"_build_fsdp_module": _build_fsdp_module})


SPECS = (
    PatchSpec(
        name="verl.cpu.process_group",
        module="verl.utils.distributed",
        target="initialize_global_process_group_ray",
        build=_build_process_group,
        kind="wrap",
        why="The backend string 'cpu:gloo,<device>:<backend>' names the CPU twice, which torch refuses.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("e9ec517a0089c3c5e6917f28bdd2f55bf493b452aa70fd85c7c17bd12a3e485f",),
        when="cpu",
        removal="verl leaves the device part out when the device is the CPU",
    ),
    PatchSpec(
        name="verl.cpu.engines",
        module="verl.workers.engine.fsdp.transformer_impl",
        target="EngineRegistry",
        build=_register_engines,
        kind="register",
        why="The FSDP engines are registered for cuda and npu only; they run on the CPU (FSDP2) without pinned memory.",
        distribution="verl",
        versions=_VERSIONS,
        sources=(),
        when="cpu",
        removal="verl registers its FSDP engines for device cpu",
        late_ok=True,
    ),
)
