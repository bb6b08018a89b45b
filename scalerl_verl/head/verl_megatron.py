# SPDX-License-Identifier: Apache-2.0
"""The FP32 head on a Megatron model: its output layer keeps its rows of the vocabulary, and logits are FP32.

verl's Megatron engine calls the model, whose output layer makes logits of its rows of the vocabulary, and then a
processor of its own, which makes log-probs of them. Fused (`use_fused_kernels=True`), the output layer hands its hidden
states over instead, and the processor makes log-probs of them a chunk at a time; else the output layer makes FP32
logits, and verl's processor works on these. Only the instance of the output layer is changed. It is on the last
pipeline stage, and its input may be scattered over ranks (sequence parallelism): it is gathered as Megatron does it.

Shape legend: S positions of the packed micro-batch on this rank, B its rows (1 if packed), H hidden size, P rows of the
output layer's weight on this rank, N probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from scalerl_verl.errors import HeadError
from scalerl_verl.head import LogProbs, fp32_logits, vocab_parallel_logprobs
from scalerl_verl.head.verl_check import NUM_PROBES, PROBE_LOGITS, TOLERANCE, require_fp32
from scalerl_verl.names import FP32, FUSED_KERNELS, HEAD_BACKEND, MODEL
from scalerl_verl.upstream import status

_COLUMNS_AT_ONCE = 8192
_NEED_LOGITS = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


@dataclass
class MegatronHead:
    """The FP32 head of one process's output layer.

    Args:
        layer: Megatron's output layer, a `ColumnParallelLinear`.
        model: the GPT model that it belongs to.
        fused: log-probs from hidden states; else FP32 logits.
        vocab_size: tokens of the model; rows of the weights beyond are Megatron's padding.
    """

    layer: Any
    model: Any
    fused: bool
    vocab_size: int
    taken: tuple[torch.Tensor, torch.Tensor] | None = None
    """Hidden states, [S, B, H], and weight of the forward under way, until the processor takes them."""
    num_logits: int = 0
    """Forwards whose FP32 logits the processor has not seen yet."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the vocabulary."""
        return self.layer.tp_group

    @property
    def weight(self) -> torch.Tensor:
        """The rows of this rank; of a tied model they are the embedding's."""
        tied = self.model.share_embeddings_and_output_weights
        weight: torch.Tensor = self.model.shared_embedding_or_output_weight() if tied else self.layer.weight
        return weight

    def rows(self, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows that belong to tokens, and the token of the first."""
        first = dist.get_rank(self.group) * len(weight)
        return weight[: max(self.vocab_size - first, 0)], first

    def log_probs(
        self, hidden_SBH: torch.Tensor, weight: torch.Tensor, labels_BS: torch.Tensor, temperature: Any
    ) -> LogProbs:
        """Log-probs and entropies of labels, [B, S] FP32 each; hidden states have Megatron's order of dimensions."""
        rows, first = self.rows(weight)
        # Without sequence parallelism every rank has all hidden states, and its part of their gradient; with it,
        # Megatron adds the parts up as it scatters them.
        return vocab_parallel_logprobs(
            hidden_SBH.transpose(0, 1),
            rows,
            labels_BS,
            self.group,
            first,
            temperature=temperature,
            sums_hidden=not self.layer.sequence_parallel,
        )

    def process(
        self, labels_BS: torch.Tensor, temperature_BS: torch.Tensor, calculate_entropy: bool, **options: Any
    ) -> dict[str, torch.Tensor]:
        """What verl's processor of logits returns: ``log_probs`` (and ``entropy``) of each position, [B, S] FP32.

        Args:
            labels_BS: the token that follows each position.
            temperature_BS: FP32.
            calculate_entropy: whether entropies are asked for.
            options: what else verl asks of its processor; what needs logits is refused.
        """
        for option in _NEED_LOGITS:
            if options.get(option):
                raise HeadError(
                    f"{option} needs logits, which the fused FP32 head does not make: set {FUSED_KERNELS}=False"
                )
        if self.taken is None:
            raise HeadError(
                "impl_backend=fp32: a forward of verl's Megatron engine does not pass through the FP32 head; set "
                f"{HEAD_BACKEND}=torch"
            )
        (hidden_SBH, weight), self.taken = self.taken, None
        if hidden_SBH.shape[:2] != labels_BS.shape[::-1]:
            raise HeadError(
                f"the output layer got hidden states of shape {list(hidden_SBH.shape)} for labels of shape "
                f"{list(labels_BS.shape)}: set {FUSED_KERNELS}=False for this model"
            )
        # Padding has temperature 0 in verl; what comes out there is thrown away.
        positive_BS = torch.where(temperature_BS > 0, temperature_BS, 1e-8)
        logp, entropy = self.log_probs(hidden_SBH, weight, labels_BS, positive_BS)
        return {"log_probs": logp, "entropy": entropy} if calculate_entropy else {"log_probs": logp}

    def check_logits(self, logits: torch.Tensor) -> None:
        """Raise unless these are the FP32 logits that the output layer made last."""
        if not self.num_logits or logits.dtype not in (torch.float32, torch.float64):
            raise HeadError(
                f"impl_backend=fp32: the logits of verl's Megatron engine are {logits.dtype} or do not come from the "
                f"FP32 head; set {HEAD_BACKEND}=torch"
            )
        self.num_logits = 0


def put_megatron_head_on(chunks: Any, backend: str, fused: bool, vocab_size: int) -> MegatronHead | None:
    """Give the output layer among these parts of a model the FP32 head.

    Args:
        chunks: the parts of the model in this process, as Megatron wraps them.
        backend: verl's ``impl_backend``.
        fused: verl's ``use_fused_kernels``.
        vocab_size: tokens of the model.

    Returns:
        None if the output layer is in another pipeline stage.

    Raises:
        HeadError: this model cannot have it; says why.
    """
    from verl.utils.megatron_utils import unwrap_model

    if backend != FP32:
        raise HeadError(f"impl_backend={backend} is not made for Megatron: set {HEAD_BACKEND}={FP32}")
    heads = []
    for chunk in chunks:
        model = unwrap_model(chunk)
        if getattr(model, "post_process", False):
            heads.append(_put_on(model, fused, vocab_size))
    if len(heads) > 1:
        raise HeadError(
            f"{len(heads)} parts of this process's model have an output layer; the FP32 head knows one: set "
            f"{HEAD_BACKEND}=torch"
        )
    return heads[0] if heads else None


def _put_on(model: Any, fused: bool, vocab_size: int) -> MegatronHead:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    name, layer = type(model).__name__, getattr(model, "output_layer", None)
    if not isinstance(model, GPTModel) or not isinstance(layer, ColumnParallelLinear):
        raise HeadError(
            f"the FP32 head is made for the output layer of Megatron's GPTModel; this model is {name}, whose output "
            f"layer is {type(layer).__module__}.{type(layer).__name__} (an adapter, a vision model or a value head "
            f"replaces it): set {HEAD_BACKEND}=torch"
        )
    config = model.config
    reasons = {
        f"its multi-token prediction calls the output layer, too: set {MODEL}.mtp.enable=False": (
            getattr(config, "mtp_num_layers", None)
        ),
        "its output layer has a bias": layer.bias is not None,
        "its logits are gathered (parallel_output=False)": layer.gather_output,
        "it defers the output layer's gradient: leave defer_embedding_wgrad_compute out of "
        "override_transformer_config": getattr(config, "defer_embedding_wgrad_compute", False),
        "it scales its logits (use_mup)": getattr(config, "use_mup", False),
        "its logits are soft-capped": getattr(config, "final_logit_softcapping", None),
        "something replaced the forward of its output layer": "forward" in vars(layer),
    }
    for reason, holds in reasons.items():
        if holds:
            raise HeadError(f"the FP32 head cannot be put on {name}: {reason}, or set {HEAD_BACKEND}=torch")
    head = MegatronHead(layer, model, fused, vocab_size)
    num_rows = layer.output_size
    if num_rows < vocab_size or len(head.rows(head.weight)[0]) == 0:
        raise HeadError(
            f"the output layer of {name} has {num_rows} rows over {dist.get_world_size(head.group)} ranks for "
            f"{vocab_size} tokens: a rank would hold padding alone; set a smaller tensor_model_parallel_size"
        )
    if num_rows > vocab_size and not fused:
        raise HeadError(
            f"Megatron pads the {vocab_size} tokens of {name} to {num_rows} rows, which verl's log-probs of logits "
            f"count as tokens: set {FUSED_KERNELS}=True, which leaves them out"
        )
    layer.forward = MethodType(_forward_with(head), layer)
    return head


def _forward_with(head: MegatronHead) -> Any:
    """forward of the output layer, with Megatron's arguments and results."""

    def forward(
        self: Any,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
        )

        if runtime_gather_output or any(bool(value) for value in others.values()):
            raise HeadError(
                f"the output layer was asked for gathered logits or a loss ({sorted(others)}), which the FP32 head "
                f"does not make; set {HEAD_BACKEND}=torch"
            )
        weight = self.weight if weight is None else weight
        hidden_SBH = input_
        if self.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(
                input_, tensor_parallel_output_grad=True, group=self.tp_group
            )
        if head.fused:
            if head.taken is not None:
                raise HeadError(
                    "the output layer was called twice before its log-probs were computed, which the fused FP32 head "
                    f"does not support: set {HEAD_BACKEND}=torch"
                )
            head.taken = hidden_SBH, weight
            return hidden_SBH.new_zeros(*hidden_SBH.shape[:2], 1), None
        head.num_logits += 1
        if not self.sequence_parallel:
            hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH, group=self.tp_group)
        return fp32_logits(hidden_SBH, weight), None

    return forward


def record_head(
    head: MegatronHead | None, backend: str, fused: bool, forward_only: bool, stages: dist.ProcessGroup
) -> None:
    """Measure the head and note what was found in every pipeline stage: the trainer asks each process.

    Raises:
        HeadError: no stage has a head, or its numbers are not FP32.
    """
    mine = None if head is None else measure_head(head)
    found: list[dict[str, Any] | None] = [None] * dist.get_world_size(stages)
    dist.all_gather_object(found, mine, group=stages)
    measured = next((one for one in found if one is not None), None)
    if measured is None:
        raise HeadError(
            f"impl_backend={backend}: no pipeline stage of the Megatron model has an output layer (post_process): set "
            f"{HEAD_BACKEND}=torch"
        )
    entry = {"side": "trainer", "backend": backend, "fused": fused, "forward_only": forward_only}
    status.add_fact("fp32_head", entry | measured)
    require_fp32(backend, measured)


@torch.no_grad()
def measure_head(head: MegatronHead) -> dict[str, Any]:
    """Return the largest error of the head's log-probs against float64 on hidden states made for this weight.

    Every rank that holds a part of the vocabulary calls it. Probe i is w_y scaled such that its logit of token y lies
    in `verl_check.PROBE_LOGITS`, y among the tokens of the first rank; log-probs of that token and of tokens of every
    rank are compared.
    """
    from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_from_logits

    weight, group = head.weight.detach(), head.group
    rows, first = head.rows(weight)
    probes, at = _probes(rows), _probe_tokens(len(rows), rows)
    source = dist.get_global_rank(group, 0)
    dist.broadcast(probes, source, group=group)
    dist.broadcast(at, source, group=group)
    everywhere = torch.linspace(0, head.vocab_size - 1, NUM_PROBES, device=weight.device).round().long()
    error = torch.zeros((), dtype=torch.float64, device=weight.device)
    for labels in (at, everywhere):
        truth = _float64_log_probs(probes, rows, labels - first, group)
        if head.fused:
            logp = head.log_probs(probes[:, None], weight, labels[None], 1.0).logp[0]
        else:
            logp = vocab_parallel_log_probs_from_logits(fp32_logits(probes, weight), labels)
        error = torch.maximum(error, (logp.double() - truth).abs().max())
    dtype = str(weight.dtype).removeprefix("torch.")
    return {
        "weight_dtype": dtype,
        "hidden_dtype": dtype,
        "max_error": float(error),
        "tolerance": TOLERANCE.get(weight.dtype, TOLERANCE[torch.float32]),
    }


def _probe_tokens(num_rows: int, rows: torch.Tensor) -> torch.Tensor:
    """The longest of some rows (see `verl_check.measure`), [N]."""
    candidates = torch.linspace(0, num_rows - 1, 4 * NUM_PROBES, device=rows.device).long()
    return candidates[rows[candidates].double().norm(dim=-1).topk(NUM_PROBES).indices]


def _probes(rows: torch.Tensor) -> torch.Tensor:
    """Hidden states in the weight's dtype, [N, H]."""
    chosen = rows[_probe_tokens(len(rows), rows)].double()
    norms = chosen.square().sum(dim=-1, keepdim=True)
    heights = torch.linspace(*PROBE_LOGITS, NUM_PROBES, dtype=torch.float64, device=rows.device)[:, None]
    return (heights * chosen / norms.clamp(min=torch.finfo(torch.float32).tiny)).to(rows.dtype)


def _float64_log_probs(
    probes: torch.Tensor, rows: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Log-probs over all ranks, [N] float64; labels are rows of this rank, or lie outside them."""
    logits = torch.cat([probes.double() @ part.double().t() for part in rows.split(_COLUMNS_AT_ONCE)], dim=-1)
    total = logits.logsumexp(dim=-1)
    most = total.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    is_here = (labels >= 0) & (labels < len(rows))
    chosen = logits.gather(1, labels.clamp(0, len(rows) - 1)[:, None])[:, 0]
    sums = torch.stack([(total - most).exp(), torch.where(is_here, chosen - most, 0.0)])
    dist.all_reduce(sums, group=group)
    return sums[1] - sums[0].log()
