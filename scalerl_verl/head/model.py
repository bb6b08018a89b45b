# SPDX-License-Identifier: Apache-2.0
"""The FP32 head on one model instance: its output layer computes in FP32, or turns hidden states into log-probs.

Only instances are changed, never classes: verl patches `model.__class__.forward`, and actor, reference and critic can
share a class in one process. The model's own forward runs, up to and through its output layer, so whatever it does
around that layer stays (a router's losses, a vision tower). What it does to the logits afterwards cannot be done to
log-probs: such a model is refused in fused form, by looking at what comes out.

Everything happens inside the layer's own call, because FSDP2 may shard the layer as a unit of its own: its weight is a
plain, gathered tensor only there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from scalerl_verl.errors import HeadError
from scalerl_verl.head import LogProbs, fp32_logits, linear_logprobs, shared_pass_logprobs
from scalerl_verl.head.settings import SHARED_PASS
from scalerl_verl.head.shared_pass import TokenLoss
from scalerl_verl.head.verl_token_loss import current_token_loss
from scalerl_verl.names import FUSED_KERNELS, HEAD_BACKEND

_STATE = "_scalerl_head"
_AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap", "lm_head_multiplier")
"""Config keys of models that change their logits after the output layer (Gemma, Cohere, Granite, RecurrentGemma,
Falcon-H1). Others are found by what comes out of their forward."""


@dataclass
class _Request:
    """What the output layer is asked for during one forward of its model."""

    labels: torch.Tensor
    temperature: float
    token_loss: TokenLoss | None = None

    def compute(self, hidden: torch.Tensor, weight: torch.Tensor) -> LogProbs:
        if hidden.shape[:-1] != self.labels.shape:
            raise HeadError(
                f"the model hands its output layer hidden states of shape {list(hidden.shape)} for labels of shape "
                f"{list(self.labels.shape)}: it drops or adds positions, so that labels would not belong to their "
                f"tokens; set {FUSED_KERNELS}=False for this model"
            )
        if self.token_loss is None:
            logp, entropy = linear_logprobs(hidden, weight, self.labels, temperature=self.temperature)
        else:
            logp, entropy = shared_pass_logprobs(
                hidden, weight, self.labels, self.token_loss, temperature=self.temperature
            )
        # Copies, no views: FSDP2 hangs a hook on what its units return, which a view could lose.
        return LogProbs(logp.clone(), entropy.clone())


@dataclass
class HeadState:
    """What is known about the output layer of one model; its attribute `_scalerl_head`."""

    backend: str
    fused: bool
    model_forward: Callable[..., Any]
    """forward of the model's class when the head was put on: a later patch of the class does not reach this model"""
    output_class: type
    request: _Request | None = None
    num_calls: int = 0
    on_call: Callable[[torch.nn.Linear, torch.Tensor, torch.Tensor], None] | None = None
    """called once with (layer, hidden states, gathered weight): the start-up probe"""


def put_head_on(model: Any, backend: str, fused: bool, output_class: type) -> None:
    """Give this instance the FP32 head.

    Args:
        model: a causal LM of transformers, before LoRA and FSDP.
        backend: one of `head_settings.BACKENDS`.
        fused: forward returns log-probs and entropies (verl's `use_fused_kernels=True`); else FP32 logits.
        output_class: verl's model output with the fields `log_probs` and `entropy`.

    Raises:
        HeadError: this model cannot have it; says why.
    """
    layer = output_layer(model)
    _refuse_unsupported(model, layer, fused)
    state = HeadState(backend, fused, type(model).forward, output_class)
    setattr(layer, _STATE, state)
    layer.forward = MethodType(_layer_forward, layer)
    forward = _fused_forward if fused else _logits_forward

    # verl reads the signature of a model's forward to see what it takes.
    @functools.wraps(type(model).forward)
    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    model.forward = MethodType(model_forward, model)


def output_layer(model: Any) -> Any:
    """Return the module that makes a model's logits, or None."""
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if getter is not None else None


def head_state(model: Any) -> HeadState | None:
    """Return the state of a model's FP32 head, or None if it has none."""
    state = getattr(output_layer(model), _STATE, None)
    return state if isinstance(state, HeadState) else None


def _refuse_unsupported(model: Any, layer: Any, fused: bool) -> None:
    name, config = type(model).__name__, model.config
    if layer is None:
        raise HeadError(
            f"{name} has no output layer over the vocabulary: the FP32 head is for language models (actor and "
            f"reference); set {HEAD_BACKEND}=torch"
        )
    if type(layer) is not torch.nn.Linear:
        raise HeadError(
            f"the output layer of {name} is {type(layer).__module__}.{type(layer).__name__}, not torch.nn.Linear: its "
            f"product cannot be replaced; set {HEAD_BACKEND}=torch"
        )
    for module, what in ((model, name), (layer, f"the output layer of {name}")):
        if "forward" in vars(module):
            raise HeadError(f"something else already replaced forward of {what}: leave it out, or the FP32 head")
    if getattr(config, "vision_config", None) is not None:
        raise HeadError(
            f"{name} has a vision tower: verl gives such models forwards of its own, with which the FP32 head is not "
            f"tested; set {HEAD_BACKEND}=torch"
        )
    forward = type(model).forward
    if forward.__module__.startswith("verl.") and "normal" not in forward.__name__:
        raise HeadError(
            f"verl patched the class {name} with {forward.__name__} for another model of this process: use one "
            "impl_backend for all models of a class"
        )
    if not fused:
        return
    if layer.bias is not None:
        raise HeadError(
            f"the output layer of {name} has a bias, which the fused head does not add: set {FUSED_KERNELS}=False"
        )
    for key in _AFTER_HEAD:
        # 1 is the identity of the scales, None and 0 switch a cap off.
        if getattr(config, key, None) not in (None, 0, 1, 1.0):
            raise HeadError(_changes_logits(name, f"config.{key}={getattr(config, key)}"))


def _changes_logits(name: str, how: str) -> str:
    return (
        f"{name} changes its logits after the output layer ({how}), and a fused head computes log-probs before that: "
        f"set {FUSED_KERNELS}=False, and the FP32 head gives the model FP32 logits instead"
    )


def _layer_forward(self: Any, hidden: torch.Tensor) -> Any:
    """forward of the output layer: FP32 logits, or the log-probs that the model's forward was asked for."""
    state: HeadState = getattr(self, _STATE)
    state.num_calls += 1
    weight = self.weight
    if hasattr(weight, "full_tensor"):
        raise HeadError("the output layer was called while its weight is sharded: call the model, not its parts")
    if state.on_call is not None:
        probe, state.on_call = state.on_call, None
        probe(self, hidden, weight)
    if state.request is None:
        return fp32_logits(hidden, weight, self.bias)
    return state.request.compute(hidden, weight)


def _call_model(self: Any, state: HeadState, *args: Any, **kwargs: Any) -> Any:
    before = state.num_calls
    output = state.model_forward(self, *args, **kwargs)
    if state.num_calls != before + 1:
        raise HeadError(
            f"{type(self).__name__} called its output layer {state.num_calls - before} times in one forward, 1 is "
            "expected: its logits do not (all) come from the FP32 head; set "
            f"{HEAD_BACKEND}=torch"
        )
    return output


def _logits_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """forward of the model without fusion: its own, whose logits must have stayed FP32."""
    state = head_state(self)
    assert state is not None, "this forward is put on together with the head"
    output = _call_model(self, state, *args, **kwargs)
    logits = output[0] if isinstance(output, tuple) else output.logits
    if logits.dtype not in (torch.float32, torch.float64):
        raise HeadError(
            f"{type(self).__name__} rounds its FP32 logits to {logits.dtype} after the output layer: the FP32 head "
            f"would have no effect; set {HEAD_BACKEND}=torch"
        )
    return output


def _fused_forward(self: Any, *args: Any, shift_labels: Any = None, temperature: float = 1.0, **kwargs: Any) -> Any:
    """forward of the model with fusion: `log_probs` and `entropy` of the labels, [B, T] FP32 each.

    `shift_labels` are the next tokens where verl made them (packed, sequence parallel); else `labels` or `input_ids`,
    moved by one.
    """
    state = head_state(self)
    assert state is not None, "this forward is put on together with the head"
    labels = next_tokens(shift_labels, kwargs.pop("labels", None), args[0] if args else kwargs.get("input_ids"))
    token_loss = None
    if state.backend == SHARED_PASS and torch.is_grad_enabled():
        token_loss = current_token_loss()
    state.request = _Request(labels, temperature, token_loss)
    try:
        output = _call_model(self, state, *args, **kwargs | {"return_dict": True})
    except (TypeError, AttributeError) as error:
        # LogProbs is a tuple: "can't multiply sequence" is what Python says of `logits * 0.5`.
        if "LogProbs" not in str(error) and "multiply sequence" not in str(error):
            raise
        raise HeadError(_changes_logits(type(self).__name__, f"{type(error).__name__}: {error}")) from error
    finally:
        state.request = None
    if type(output.logits) is not LogProbs:
        raise HeadError(_changes_logits(type(self).__name__, f"they arrive as {type(output.logits).__name__}"))
    return state.output_class(
        log_probs=output.logits.logp,
        entropy=output.logits.entropy,
        past_key_values=output.past_key_values,
        hidden_states=output.hidden_states,
        attentions=output.attentions,
    )


def next_tokens(shift_labels: Any, labels: Any, input_ids: Any) -> torch.Tensor:
    """Return the token that follows each position, [B, T]; the last one of a row is whatever comes first in it."""
    if shift_labels is not None:
        return shift_labels
    source = labels if labels is not None else input_ids
    if source is None:
        raise HeadError(
            "the fused FP32 head needs labels or input_ids: inputs_embeds alone do not say which tokens were sampled"
        )
    return torch.roll(source, shifts=-1, dims=-1)
