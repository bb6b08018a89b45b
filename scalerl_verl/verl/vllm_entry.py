# SPDX-License-Identifier: Apache-2.0
"""Entry point ``vllm.general_plugins: scalerl``: called in every vLLM process, possibly more than once."""

from __future__ import annotations


def register() -> None:
    """Install the vLLM patches of this process; does nothing that a run without our names could notice."""
    from scalerl_verl.upstream import registry, status
    from scalerl_verl.verl.patches import VLLM_SPECS

    registry.install(VLLM_SPECS)
    registry.activate()
    status.record("vllm")
