# SPDX-License-Identifier: Apache-2.0
"""FP32 LM head: log-probabilities and entropy from hidden states, logits in FP32 and never all at once.

PyTorch is imported only when a function is taken from here, because the list of patches is in this folder, too.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "IMPLEMENTATIONS": "functional",
    "LogProbs": "functional",
    "fp32_logits": "logits",
    "linear_logprobs": "functional",
    "shared_pass_logprobs": "shared_pass",
    "vocab_parallel_logprobs": "sharded",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
