# SPDX-License-Identifier: Apache-2.0
"""Patches and classes that verl needs to train on a CPU."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import PatchSpec

_Engine: Any = object
"""What a mixin of verl's engines stands on is known only when verl is there."""


def _build_process_group(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: Any = None, backend: Any = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


class HostMemoryEngine(_Engine):
    """Any FSDP engine of verl whose weights are never moved to pinned host memory: there is none without a GPU.

    verl does that with the weights of a reference policy, which only runs forward; on a CPU they are in host memory.
    """

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        config = self.engine_config
        self.engine_config = dataclasses.replace(config, forward_only=False, offload_policy=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


SPECS = (
    PatchSpec(
        name="verl.cpu.process_group",
        module="verl.utils.distributed",
        target="initialize_global_process_group_ray",
        build=_build_process_group,
        kind="wrap",
        why="The backend string 'cpu:gloo,<device>:<backend>' names the CPU twice, which torch refuses.",
        sources=("e9ec517a0089c3c5e6917f28bdd2f55bf493b452aa70fd85c7c17bd12a3e485f",),
        when="cpu",
        removal="verl leaves the device part out when the device is the CPU",
    ),
)
