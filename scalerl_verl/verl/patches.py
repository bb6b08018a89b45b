# SPDX-License-Identifier: Apache-2.0
"""Every upstream symbol this package touches."""

from __future__ import annotations

from scalerl_verl.cpu import verl as cpu
from scalerl_verl.cpu import vllm as cpu_linear
from scalerl_verl.head import vllm as head
from scalerl_verl.pipeline import vllm as engine_versions
from scalerl_verl.upstream.spec import PatchSpec
from scalerl_verl.verl import (
    bypass_mode,
    calls,
    engine,
    overrides,
    server,
    startup_check,
    training_step,
    weight_sync,
)

VERL_SPECS: tuple[PatchSpec, ...] = (
    *startup_check.SPECS,
    *bypass_mode.SPECS,
    *training_step.SPECS,
    *overrides.SPECS,
    *engine.SPECS,
    *weight_sync.SPECS,
    *server.SPECS,
    *cpu.SPECS,
    *calls.VERL_SPECS,
)
VLLM_SPECS: tuple[PatchSpec, ...] = (*cpu_linear.SPECS, *head.SPECS, *engine_versions.SPECS, *calls.VLLM_SPECS)

SYMBOLS: tuple[PatchSpec, ...] = VERL_SPECS + VLLM_SPECS
