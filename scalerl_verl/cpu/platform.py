# SPDX-License-Identifier: Apache-2.0
"""``VERL_PLATFORM=cpu``: verl's device abstraction over a plain CPU.

Ray's ``GPU`` resource stands for logical slots here (``ray.init(num_gpus=N)``): verl's placement of trainer and
rollout workers then works unchanged.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _resident_bytes(*_: Any, **__: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mem_get_info(*_: Any, **__: Any) -> tuple[int, int]:
    """(available, total) bytes of the host, in the form of ``torch.cuda.mem_get_info``."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _make_device_module() -> ModuleType:
    """``torch.cpu`` plus the names of ``torch.cuda`` that verl calls on its device module."""
    module = ModuleType("scalerl_verl_cpu_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, _resident_bytes)
    for name in (
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction",
        "manual_seed",
        "manual_seed_all",
        "set_device",
    ):
        setattr(module, name, _nothing)
    extras: dict[str, Any] = {
        "mem_get_info": _mem_get_info,
        "get_device_name": lambda *_, **__: "CPU",
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name, value in extras.items():
        setattr(module, name, value)
    return module


_DEVICE_MODULE = _make_device_module()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A CPU as verl sees an accelerator; chosen by ``VERL_PLATFORM=cpu`` only, never detected."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> Any:
        # verl calls tensor.to(get_device_id()); an integer there would mean cuda:N.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        # Without a limit vLLM reserves half of the memory for the KV cache and binds threads to all cores.
        return {
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        }

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield
