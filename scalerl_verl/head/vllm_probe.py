# SPDX-License-Identifier: Apache-2.0
"""Is the generator's FP32 head active? Asked of the loaded model, inside the engine's worker process.

Shape legend: N tokens, H hidden size, V vocabulary, C probed columns.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from scalerl_verl.errors import HeadError
from scalerl_verl.head.precision import (
    MAX_RELATIVE_ERROR,
    float64_logits,
    logit_errors,
    probe_columns,
    probe_hidden_states,
)
from scalerl_verl.head.vllm import KEY, is_native, refuse_unsupported
from scalerl_verl.upstream import status

HEAD_FACT = "fp32_head"
"""Key of the process status under which each side says what its head was measured to be."""


def check_engine_head(worker: Any) -> None:
    """Measure the head of a vLLM worker's loaded model and note the record in the process status.

    Args:
        worker: vLLM's worker, its model loaded; the model asks for an FP32 head. All ranks of a tensor-parallel group
            have to call this, as computing logits is a collective operation; on a pipeline rank without the head
            nothing happens.

    Raises:
        HeadError: the head is not FP32 (with the numbers), or the model's logits cannot be checked.
    """
    from vllm.distributed import get_pp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    refuse_unsupported(worker.vllm_config, is_native(LogitsProcessor))
    if not get_pp_group().is_last_rank:
        return
    config = worker.vllm_config.model_config
    hidden_NH = probe_hidden_states(config.get_hidden_size(), config.dtype, worker.device)
    record = measure_head(worker.model_runner.get_model(), LogitsProcessor, hidden_NH)
    if record is None:
        return
    status.add_fact(HEAD_FACT, record)
    problem = judge_head(record)
    if problem is not None:
        raise HeadError(f"{KEY}=float32 has no effect in this vLLM engine: {problem}. Run 'scalerl doctor'")


def judge_head(record: dict[str, Any]) -> str | None:
    """Say what is wrong with a side's record of its head, with the numbers; None if it is FP32."""
    # A NaN compares as too large.
    if record["dtype"] == "float32" and record["relative_error"] <= MAX_RELATIVE_ERROR:
        return None
    return (
        f"the {record['side']}'s head gives {record['dtype']} logits from {record['weight_dtype']} weights, off by "
        f"{record['max_abs_error']:.2g} at most and by {record['relative_error']:.2g} of their size against float64 "
        f"(FP32 stays below {MAX_RELATIVE_ERROR:g})"
    )


def measure_head(model: Any, layer: Any, hidden_NH: torch.Tensor) -> dict[str, Any] | None:
    """Compare the logits of vLLM's layer with float64 on hidden states that go through ``model.compute_logits``.

    What the layer really gets and gives is looked at, so whatever the model does before and after is left out.

    Args:
        model: vLLM model; its head holds this rank's shard of the vocabulary.
        layer: vLLM's ``LogitsProcessor``.
        hidden_NH: probe, [N, H].

    Returns:
        The record; None on a rank that gets no logits (they are gathered on another one).

    Raises:
        HeadError: the model computes its logits in another way, or from an empty shard.
    """
    calls: list[tuple[Any, tuple, dict, Any]] = []

    def remember(module: Any, args: tuple, kwargs: dict, logits_NV: Any) -> None:
        calls.append((module, args, kwargs, logits_NV))

    processors = [module for module in model.modules() if isinstance(module, layer)]
    hooks = [module.register_forward_hook(remember, with_kwargs=True) for module in processors]
    try:
        with _adapters_passed_by(model, layer), torch.inference_mode():
            model.compute_logits(hidden_NH)
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != 1 or calls[0][0].logits_as_input:
        raise HeadError(
            f"{KEY}=float32 is not supported for {type(model).__name__}, which does not compute its logits by one call "
            f"of vLLM's {layer.__name__}: delete the key on both sides"
        )
    module, args, kwargs, logits_NV = calls[0]
    given = inspect.signature(layer.forward).bind(module, *args, **kwargs).arguments
    if logits_NV is None:
        return None
    return _compare(module, given["lm_head"], given["hidden_states"], given.get("embedding_bias"), logits_NV)


@contextlib.contextmanager
def _adapters_passed_by(model: Any, layer: Any) -> Iterator[None]:
    """Inside, a LoRA layer around the logits calls what it wraps: adapters need a batch that says which one is used.

    With adapters vLLM (0.26 and later) sends the base product through the same method of the wrapped layer.
    """

    def call_wrapped(wrapper: Any, lm_head: Any, hidden_states: Any, embedding_bias: Any = None) -> Any:
        return wrapper.base_layer(getattr(lm_head, "base_layer", lm_head), hidden_states, embedding_bias)

    wrappers = [module for module in model.modules() if isinstance(getattr(module, "base_layer", None), layer)]
    for wrapper in wrappers:
        wrapper.forward = functools.partial(call_wrapped, wrapper)
    try:
        yield
    finally:
        for wrapper in wrappers:
            del wrapper.forward


def _compare(
    module: Any, lm_head: Any, hidden_NH: torch.Tensor, bias_V: torch.Tensor | None, logits_NV: torch.Tensor
) -> dict[str, Any]:
    """Compare the columns of this rank's shard, which start at its first token id."""
    shard = lm_head.shard_indices
    num_columns = min(shard.num_org_elements, logits_NV.shape[-1] - shard.org_vocab_start_index)
    if num_columns < 1:
        raise HeadError(
            f"{KEY}=float32 cannot be checked: this rank holds no part of the vocabulary, only padding. Set a smaller "
            "tensor_model_parallel_size, or delete the key on both sides"
        )
    rows_C = probe_columns(num_columns).to(logits_NV.device)
    weight = lm_head.weight
    reference_NC = float64_logits(
        hidden_NH, weight[rows_C], None if bias_V is None else bias_V[rows_C], module.soft_cap, module.scale
    )
    measured_NC = logits_NV[:, shard.org_vocab_start_index + rows_C]
    return {
        "side": "generator",
        "dtype": str(logits_NV.dtype).removeprefix("torch."),
        "weight_dtype": str(weight.dtype).removeprefix("torch."),
        **logit_errors(measured_NC, reference_NC),
    }
