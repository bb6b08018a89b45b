# SPDX-License-Identifier: Apache-2.0
"""After an engine was built: is the FP32 head really there, and does it really compute in FP32?

One small forward through verl's own engine (its padding, autocast and sharding), during which the output layer, its
weight gathered, is also measured against float64.
"""

from __future__ import annotations

from typing import Any

import torch

from scalerl_verl.errors import HeadError
from scalerl_verl.head import fp32_logits, linear_logprobs
from scalerl_verl.head.model import HeadState, head_state, output_layer
from scalerl_verl.head.settings import model_backend
from scalerl_verl.upstream import status

PROBE_LOGITS = (21.03, 30.97)
"""Range of the largest logits of the probes. FP32 is off by about 1e-5 there (31 x 2^-24, a few roundings). bf16
numbers between 16 and 32 lie 0.125 apart: over `NUM_PROBES` values, which fall anywhere between two of them, bf16
logits are off by more than 1e-2. Nothing lies in between."""
TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-4}
"""Largest error of a log-prob, by the dtype of the weight. FP32 weights are held to less, because TF32 (10 bits of
mantissa in each operand) is off by about 31 x 2^-11 / sqrt(hidden size), 2e-4 at a hidden size of 4096."""
NUM_PROBES = 16
_COLUMNS_AT_ONCE = 8192
_LENGTHS = (5, 3)


def check_model(model: Any, model_config: Any) -> None:
    """Raise unless a model, complete but for its sharding, has the FP32 head that verl's model config asks for.

    Raises:
        HeadError: the head is not there, or an adapter sits on it.
    """
    backend = model_backend(model_config)
    if backend is not None:
        _require_head(model, backend)


def check_engine(engine: Any) -> None:
    """Raise unless the engine's model has the FP32 head that its config asks for; record what was measured.

    Raises:
        HeadError: the head is not ours, LoRA sits on it, or its numbers are not FP32.
    """
    backend = model_backend(engine.model_config)
    if backend is None:
        return
    state = _require_head(engine.module, backend)
    measured: dict[str, Any] = {}
    state.on_call = lambda layer, hidden, weight: measured.update(measure(layer, hidden, weight, state.fused))
    log_probs = _small_forward(engine)
    if not measured:
        raise HeadError(
            f"impl_backend={backend}: a forward of verl's engine does not pass through the FP32 head. Look for what "
            "else replaces the model's output layer or its forward, or set impl_backend=torch"
        )
    if log_probs.dtype != torch.float32 or not bool(log_probs.isfinite().all()):
        what = "non-finite" if log_probs.dtype == torch.float32 else str(log_probs.dtype)
        raise HeadError(
            f"impl_backend={backend}: verl's engine returns {what} log-probs from FP32 logits; finite float32 is "
            "needed. Check the weights of the model, and whether another patch changes verl's log-probs, or set "
            "impl_backend=torch"
        )
    entry = {
        "side": "trainer",
        "backend": backend,
        "fused": state.fused,
        "forward_only": bool(engine.engine_config.forward_only),
    }
    status.add_fact("fp32_head", entry | measured)
    require_fp32(backend, measured)


def require_fp32(backend: str, measured: dict[str, Any]) -> None:
    """Raise HeadError unless what was measured is within what FP32 is off by."""
    if not measured["max_error"] <= measured["tolerance"]:
        raise HeadError(
            f"impl_backend={backend}: log-probs of the output layer are off by {measured['max_error']:.3g} from "
            f"float64 ({measured['weight_dtype']} weights); FP32 stays within {measured['tolerance']:g}, bf16 logits "
            "and TF32 do not. Look for what else patches the output layer or the matrix products of this process."
        )


def _require_head(module: Any, backend: str) -> HeadState:
    model = getattr(module, "_fsdp_wrapped_module", module)
    if hasattr(model, "peft_config"):
        model = model.get_base_model()
    state, layer, embedding = head_state(model), output_layer(model), model.get_input_embeddings()
    for name, part, plain in (("output layer", layer, torch.nn.Linear), ("embedding", embedding, torch.nn.Embedding)):
        if hasattr(part, "base_layer") or hasattr(part, "modules_to_save"):
            raise HeadError(
                f"impl_backend={backend}: LoRA sits on the {name} ({type(part).__name__}), whose adapter bypasses the "
                "FP32 head: leave lm_head and embed_tokens out of target_modules and modules_to_save"
            )
        if part is not None and not isinstance(part, plain):
            raise HeadError(
                f"impl_backend={backend}: after the FP32 head was put on, the {name} was replaced by "
                f"{type(part).__name__}, which bypasses the head: leave that out, or set impl_backend=torch"
            )
    if state is None or "forward" not in vars(layer) or "forward" not in vars(model):
        raise HeadError(
            f"impl_backend={backend} has no effect on {type(model).__name__}: something took the head off again before "
            "the model was sharded; leave that out, or set impl_backend=torch"
        )
    return state


def _small_forward(engine: Any) -> torch.Tensor:
    """Return the log-probs of a few tokens, [N], by the path that verl's own log-prob computation takes."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_id

    vocab_size = engine.model_config.hf_config.get_text_config().vocab_size
    rows = [torch.arange(1, n + 1) % vocab_size for n in _LENGTHS]
    fields = {"input_ids": rows, "position_ids": [torch.arange(n) for n in _LENGTHS]}
    nested = {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in fields.items()}
    data = TensorDict(nested, batch_size=len(rows)).to(get_device_id())
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=engine.use_remove_padding,
        use_fused_kernels=engine.model_config.use_fused_kernels,
        calculate_entropy=False,
    )
    with engine.eval_mode(), torch.no_grad():
        _, output = engine.forward_step(data, loss_function=None, forward_only=True)
        if hasattr(engine.module, "reshard"):
            # FSDP2 keeps the root's weights gathered for a backward that does not come.
            engine.module.reshard()
    return output["model_output"]["log_probs"].values()


@torch.no_grad()
def measure(layer: Any, hidden: torch.Tensor, weight: torch.Tensor, fused: bool) -> dict[str, Any]:
    """Return the largest error of the head's log-probs against float64 on hidden states made for this weight.

    Probe i is w_y scaled such that its logit of token y lies in `PROBE_LOGITS`; log-probs of that token and of another
    are compared.

    Args:
        layer: the output layer.
        hidden: hidden states of the call under way; their dtype and device are used.
        weight: the gathered weight as the head sees it, [V, H].
        fused: measure the log-prob function, else the logits.
    """
    candidates = torch.linspace(0, len(weight) - 1, 4 * NUM_PROBES, device=weight.device).long()
    # The longest of some rows: the row of a token that no data ever had may be (all but) zero, and a probe that lifts
    # its logit would lift those of other tokens to where FP32 has no digits left.
    at = candidates[weight[candidates].double().norm(dim=-1).topk(NUM_PROBES).indices]
    rows = weight[at].double()
    norms = rows.square().sum(dim=-1, keepdim=True)
    heights = torch.linspace(*PROBE_LOGITS, NUM_PROBES, dtype=torch.float64, device=weight.device)[:, None]
    probes = (heights * rows / norms.clamp(min=torch.finfo(torch.float32).tiny)).to(hidden.dtype)
    bias = None if layer.bias is None else layer.bias.double()
    parts = [probes.double() @ part.double().t() for part in weight.split(_COLUMNS_AT_ONCE)]
    truth = torch.cat(parts, dim=-1)
    truth = torch.log_softmax(truth if bias is None else truth + bias, dim=-1)
    error = torch.zeros((), dtype=torch.float64, device=weight.device)
    for labels in (at, at.roll(1)):
        if fused:
            logp = linear_logprobs(probes, weight, labels).logp.double()
        else:
            logp = torch.log_softmax(fp32_logits(probes, weight, layer.bias).double(), dim=-1)
            logp = logp.gather(1, labels[:, None])[:, 0]
        error = torch.maximum(error, (logp - truth.gather(1, labels[:, None])[:, 0]).abs().max())
    return {
        "weight_dtype": str(weight.dtype).removeprefix("torch."),
        "hidden_dtype": str(hidden.dtype).removeprefix("torch."),
        "max_error": float(error),
        "tolerance": TOLERANCE.get(weight.dtype, TOLERANCE[torch.float32]),
    }
