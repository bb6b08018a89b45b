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
        why="The CPU backend packs each linear weight for oneDNN and deletes the parameter, so the next weight update "
        "has no parameter to load into.",
        distribution="vllm",
        sources=(
            "7a8cd246f64d9b0c7513556cb14d6b6b75f17f2ce83d4433a6e5cb917ee0cba9",  # 0.24.0, 0.25.1
            "c1172de05ea5c26917508ee228c6fa1ded0fb7aebc6a2206773022a3b1201636",  # 0.26.0
            "0940331a5d3bc95f63f57d0bb310401e4c5348c6d6c2621cedebf429db03eefd",  # 0.27.1
            "2328614fed6a154d8a7bf9c77a2f6cb25f83ef1fac5b1d18e823ae97fbb2c60e",  # 0.28.0
            "361a17d1606dc80ba018b621d03af8a0559ab69fc21bcdb6e628d52f2dbd6f80",  # 0.29.0, 0.30.0
            "83c37c89a715d31df5cc0ad8da4336b407579b70952b9f7d3f97c0ed7355ceeb",  # 0.31.0
            "d0cc00dbd80cb25dcf8385e51b806e69c58a93ac4269734ed7e99fc7a6edf1d2",  # 0.32.0, 0.33.0
        ),
        when="cpu",
        removal="vLLM can keep (or rebuild) CPU weights for reloading",
        late_ok=True,
    ),
)
