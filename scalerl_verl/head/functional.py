# SPDX-License-Identifier: Apache-2.0
"""The public function of the FP32 head and the checks of its arguments.

Shape legend: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from scalerl_verl.head import chunked, naive

IMPLEMENTATIONS = ("auto", "chunked", "naive")
"""Names `impl` takes. `auto` is `chunked`; `naive` is the float64 truth for small inputs."""

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class LogProbs(NamedTuple):
    """What the head says about each token."""

    logp: torch.Tensor
    """log-probability of the label, shape of `labels`; FP32 (float64 from `naive`)."""
    entropy: torch.Tensor
    """entropy of the distribution in nats, like `logp`."""


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    impl: str = "auto",
    chunk_rows: int | None = None,
) -> LogProbs:
    """Return the log-probability of each label and the entropy at each token; the LM head's logits are FP32.

        x = hidden weight^T / temperature        logp = x_y - log sum_j exp x_j        entropy = -sum_j p_j log p_j

    y is the label of a token, j runs over the vocabulary, p = softmax(x). Products of 16-bit operands are accumulated
    in FP32 and not rounded back, so only the order of summation differs from a product of upcast operands. FP32
    operands are multiplied in true FP32, even where the process allows TF32. If the dtypes of `hidden` and `weight`
    differ, both are promoted to a common dtype. autocast has no effect.

    Both outputs have gradients for `hidden` and `weight`. A token whose upstream gradients are both zero (a masked
    token) contributes nothing to them, even if its hidden state is NaN. A weight that is tied to the embedding is
    supported.

    Args:
        hidden: last hidden states, [..., H] float32, bfloat16, float16 or float64.
        weight: weight of the LM head, [V, H], same dtypes; a plain tensor (gather a sharded weight first).
        labels: token ids whose log-probabilities are returned, [...] integer in [0, V).
        temperature: divisor of the logits, > 0: one number, or one per token, [...] floating-point.
        impl: "auto" or "chunked": logits of one chunk of tokens at a time; "naive": all logits in float64, for tests.
        chunk_rows: number of tokens in a chunk. None: as many as have 1.75 GiB of FP32 logits.

    Returns:
        `LogProbs(logp, entropy)`, both of shape [...], in nats, float32; float64 if an operand is float64 or `impl` is
        "naive". On CUDA a label outside [0, V) yields NaN, because a check would wait for the device.

    Raises:
        ValueError: shapes, dtypes or devices do not match, temperature <= 0, a label is out of range (checked on the
            CPU only), `impl` is unknown, `chunk_rows` < 1, or "naive" is given too many logits.

    Source: ScaleRL (arXiv 2510.13786), section 3.2, which takes the FP32 head from MiniMax-M1 (arXiv 2506.13585).
    """
    check_arguments(hidden, weight, labels, temperature, chunk_rows)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; {', '.join(IMPLEMENTATIONS)} are allowed. Set one of them.")
    shape = labels.shape
    hidden_NH, labels_N = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long().contiguous()
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.expand(shape).reshape(-1).float()
    if impl == "naive":
        logp_N, entropy_N = naive.linear_logprobs(hidden_NH, weight, labels_N, temperature)
    else:
        logp_N, entropy_N = chunked.linear_logprobs(hidden_NH, weight, labels_N, temperature, chunk_rows)
    return LogProbs(logp_N.view(shape), entropy_N.view(shape))


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | torch.Tensor,
    chunk_rows: int | None,
    in_vocabulary: bool = True,
) -> None:
    """Raise ValueError for what `linear_logprobs` cannot take; labels need be no rows of a weight that is a part."""
    for name, tensor in {"hidden": hidden, "weight": weight}.items():
        if tensor.dtype not in FLOATING:
            raise ValueError(f"{name} is {tensor.dtype}; bfloat16, float16, float32 or float64 is allowed.")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}; [..., H] and [V, H] with the same H are "
            "allowed. If the weight is sharded, gather it before the head."
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels is {list(labels.shape)}; it must be {list(hidden.shape[:-1])}, one per hidden state.")
    if labels.dtype.is_floating_point or labels.dtype == torch.bool or labels.dtype.is_complex:
        raise ValueError(f"labels is {labels.dtype}; an integer dtype is allowed.")
    if not hidden.device == weight.device == labels.device:
        raise ValueError(
            f"hidden, weight and labels are on {hidden.device}, {weight.device} and {labels.device}; "
            "move them to one device."
        )
    if weight.shape[0] == 0:
        raise ValueError("weight has no rows: a vocabulary of 0 tokens has no probabilities.")
    if not isinstance(temperature, torch.Tensor) and not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature is {temperature}; a finite number > 0 is allowed.")
    if isinstance(temperature, torch.Tensor) and temperature.device.type == "cpu" and not bool((temperature > 0).all()):
        raise ValueError(f"temperature has entries down to {float(temperature.min())}; numbers > 0 are allowed.")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; a number >= 1 or None is allowed.")
    if not in_vocabulary or labels.device.type != "cpu" or not labels.numel():
        return
    if not 0 <= int(labels.min()) <= int(labels.max()) < len(weight):
        raise ValueError(
            f"labels lie in [{int(labels.min())}, {int(labels.max())}]; token ids in [0, {len(weight)}) are allowed. "
            "Give masked positions any valid id: without an upstream gradient they contribute nothing."
        )
