# SPDX-License-Identifier: Apache-2.0
"""Keep linear weights in place on vLLM's CPU backend, so that they can be reloaded."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import PatchSpec


def _build(original: Any, module: ModuleType) -> Any:
    import torch

    @functools.wraps(original)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            original(layer, remove_weight)
            return
        layer.cpu_linear = torch.nn.functional.linear

    return dispatch_cpu_unquantized_gemm


SPECS = (
    PatchSpec(
        name="vllm.cpu.keep_weights",
        module="vllm.model_executor.layers.utils",
        target="dispatch_cpu_unquantized_gemm",
        build=_build,
        kind="wrap",
        why="The CPU backend packs each linear weight for oneDNN and deletes the parameter: the next weight update "
        "has nothing to load into.",
        distribution="vllm",
        versions=">=0.24.0,<0.29",
        sources=("2328614fed6a154d8a7bf9c77a2f6cb25f83ef1fac5b1d18e823ae97fbb2c60e",),
        when="cpu",
        removal="vLLM can keep (or rebuild) CPU weights for reloading",
        late_ok=True,
    ),
)
