# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose sums are FP32 and stay FP32, whatever the operands and the process's TF32 switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Inside, FP32 products on CUDA and the CPU use all 24 bits of mantissa; the process's own setting returns after.

    TF32 (10 bits) and bf16-in-FP32 modes are process-wide switches: a head that leaves them on is FP32 in name only.
    """
    backends = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    backends = [backend for backend in backends if hasattr(backend, "fp32_precision")]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend, precision in zip(backends, before, strict=True):
            if precision != "ieee":
                backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            if precision != "ieee":
                backend.fp32_precision = precision


def mm_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a @ b in FP32 (float64 for float64 operands), [M, N]; written to `out` if given.

    16-bit operands on CUDA go to the tensor cores as they are, with FP32 accumulation and output: each product of two
    16-bit numbers is exact in FP32, so only the order of summation differs from a product of upcast operands. The CPU
    has no such product and upcasts.
    """
    if a.dtype in HALF_DTYPES and a.device.type == "cuda":
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
    with exact_fp32():
        a, b = upcast(a), upcast(b)
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)


def add_mm_fp32_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to `total` (FP32, or float64 for float64 operands) in place.

    On CUDA the addition is part of the product (beta = 1): the sum over chunks never leaves FP32 and costs no pass of
    its own.
    """
    if a.dtype in HALF_DTYPES and a.device.type == "cuda":
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
        return
    with exact_fp32():
        torch.addmm(total, upcast(a), upcast(b), out=total)


def upcast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit tensor as FP32, any other as it is."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
