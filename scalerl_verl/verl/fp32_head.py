# SPDX-License-Identifier: Apache-2.0
"""Where verl's FSDP engine gets the FP32 head: named like its own fused kernels, checked once the engine stands."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

_VERSIONS = VERL_VERSIONS
_REMOVAL = "verl has an impl_backend with FP32 logits (see patches/verl)"


def _build_forward(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def patch_forward_with_backends(
        model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> Any:
        from scalerl_verl.head.settings import BACKENDS

        if fused_kernels_backend not in BACKENDS:
            return original(model, use_fused_kernels, fused_kernels_backend)

        from verl.models.transformers.dense_common import CausalLMOutputForPPO

        from scalerl_verl.head.model import put_head_on

        return put_head_on(model, fused_kernels_backend, use_fused_kernels, CausalLMOutputForPPO)

    return patch_forward_with_backends


def _build_sharding(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _build_fsdp_module(self: Any, model: Any) -> Any:
        from scalerl_verl.head.verl_check import check_model

        check_model(model, self.model_config)
        return original(self, model)

    return _build_fsdp_module


def _build_check(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def initialize(self: Any) -> Any:
        result = original(self)
        from scalerl_verl.head.verl_check import check_engine

        check_engine(self)
        return result

    return initialize


def _build_step(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        from scalerl_verl.head.settings import SHARED_PASS

        options = self.model_config.fused_kernel_options or {}
        if forward_only or options.get("impl_backend") != SHARED_PASS:
            return original(self, micro_batch, loss_function, forward_only)

        from verl.utils.device import get_device_id

        from scalerl_verl.head.verl_token_loss import token_loss_of

        micro_batch = micro_batch.to(get_device_id())
        with token_loss_of(self, micro_batch, loss_function):
            return original(self, micro_batch, loss_function, forward_only)

    return forward_step


SPECS = (
    PatchSpec(
        name="verl.fp32_head.forward",
        module="verl.models.transformers.monkey_patch",
        target="patch_forward_with_backends",
        build=_build_forward,
        kind="wrap",
        why="verl chooses among its fused heads by name and takes an unknown name for none; each rounds logits to bf16 "
        "or patches the model's class.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("86a549d0bfbd34f9dac786718ce06203938181097d8f1e71a068ed718338f376",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
    PatchSpec(
        name="verl.fp32_head.adapters",
        module="verl.workers.engine.fsdp.transformer_impl",
        target="FSDPEngine._build_fsdp_module",
        build=_build_sharding,
        kind="wrap",
        why="An adapter on the output layer bypasses the head; FSDP2 cannot shard such a layer and says so in terms of "
        "class layouts.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("924053b5bdcba34f697926662ebea6d37b5f018cce19d1bee60f8cbb6f0fcb36",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
    PatchSpec(
        name="verl.fp32_head.check",
        module="verl.workers.engine.fsdp.transformer_impl",
        target="FSDPEngine.initialize",
        build=_build_check,
        kind="wrap",
        why="Whether the head is active shows only in the model as the engine has built it: after LoRA, QAT and FSDP, "
        "and for model types for which verl skips its patches.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("523d499887d6a09ae277083c7ecf19abb1bd03ac5e183d6bba3f88fb45b6cf53",),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    ),
    PatchSpec(
        name="verl.fp32_head.token_loss",
        module="verl.workers.engine.fsdp.transformer_impl",
        target="FSDPEngineWithLMHead.forward_step",
        build=_build_step,
        kind="wrap",
        why="The model's forward sees neither recorded log-probs nor advantages, which a head that shares its pass "
        "with backward needs.",
        distribution="verl",
        versions=_VERSIONS,
        sources=("35ff7839ba6246689cc72e2a1fde548c11409e388ccc9eef63d1f5d40172d095",),
        when="named",
        removal="verl hands the loss to fused heads",
        late_ok=True,
    ),
)
