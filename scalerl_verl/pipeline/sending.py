# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of a weight update: each weight in the generator's dtype before it is gathered, and only once.

verl's FSDP engine gathers and sends weights as they are stored, which is FP32 unless asked otherwise: twice the bytes
of a bf16 generator, on the way and in its staging buffer. vLLM rounds them on loading, FSDP rounds them for its forward
pass, both to the nearest: rounded before they are gathered they are the same numbers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name, offload_fsdp_model_to_cpu
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine_workers import ActorRolloutRefWorker

from scalerl_verl.errors import WeightSyncError
from scalerl_verl.names import MODEL
from scalerl_verl.pipeline.transfer import generator_dtype

logger = logging.getLogger(__name__)
_WRAPPER = "_fsdp_wrapped_module"


class SendingWorker(ActorRolloutRefWorker):
    """verl's training worker, which sends weights to generators as they hold them."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        """Send all weights over the checkpoint engine, of whichever ``mode``; its metrics, and the bytes in GiB."""
        name = generator_dtype(self.config, "rollout")
        weights = _Counted(stream_weights(self.actor.engine, None if name is None else getattr(torch, name)))
        try:
            metrics = await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}
        except Exception:
            weights.drain()  # the other ranks of the trainer may wait for this one in the gathering of a weight
            raise
        finally:
            weights.close()  # a transfer that failed must not leave adapters merged, or weights on the device
        return {**metrics, "scalerl/pipeline/sent_gib": weights.num_bytes / 2**30}


class _Counted:
    """Weights one after the other, and how many bytes they were."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights, self.num_bytes = iter(weights), 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self._weights:
            self.num_bytes += weight.numel() * weight.element_size()
            yield name, weight

    def drain(self) -> None:
        """Gather what nobody has asked for yet, for the ranks that gather it together with this one."""
        for _ in self._weights:
            pass

    def close(self) -> None:
        """End what hands the weights out, however far it got."""
        if hasattr(self._weights, "close"):
            self._weights.close()


def stream_weights(engine: Any, dtype: torch.dtype | None) -> Iterable[tuple[str, torch.Tensor]]:
    """All weights by name, gathered one after the other as they are asked for.

    Parameters wider than ``dtype`` are cast to it, shard by shard, before they are gathered: the trainer never has a
    second copy of more than one. Buffers and what is no floating-point number stay as they are. A parameter of several
    names (tied embeddings) comes once, under its first, as in a checkpoint of transformers. Adapters (LoRA) come merged
    into the weights, and are merged in the trainer until the last weight was taken or the iterable is closed.

    Args:
        engine: verl's FSDP engine; of others weights come as verl hands them out.
        dtype: of the generator's weights; None: as stored.
    """
    module = engine.module
    if not isinstance(module, torch.nn.Module):
        return engine.get_per_tensor_param()[0]
    original, taken = module.state_dict, []

    def state_dict(*args: Any, **kwargs: Any) -> _SentWeights:
        taken.append(_SentWeights(original(*args, **kwargs), module, dtype))
        return taken[-1]

    # verl's generator takes one shard after the other out of this dict and gathers it. An attribute of this one module,
    # for this one call: checkpoints are written from the state dict as it is.
    module.state_dict = state_dict
    has_adapters = hasattr(_unwrapped(module), "peft_config")
    if has_adapters:
        # verl's own has every merged weight rounded to bf16, also for a generator of another dtype.
        engine._merged_lora_per_tensor_param = functools.partial(_stream_merged, engine, dtype)
    try:
        weights, _ = engine.get_per_tensor_param()
    finally:
        del module.state_dict
        if has_adapters:
            del engine._merged_lora_per_tensor_param
    if not taken and not has_adapters:
        logger.warning(
            "%s sends weights in the dtype in which it stores them: without a state dict they cannot be cast first",
            type(engine).__name__,
        )
    return weights


def _stream_merged(engine: Any, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with the adapters merged into them, under the names of the model without adapters.

    Everything happens while they are merged: the state dict shows the memory in which verl merges them, and from which
    it takes them out again.

    Raises:
        WeightSyncError: verl left an adapter out.
    """
    module = engine.module
    try:
        with merged_lora_context(module, backup_adapters=True):
            _require_merged(module)
            sent = _SentWeights(normalize_peft_param_name(module.state_dict()), module, dtype)
            named = convert_weight_keys(sent, _unwrapped(module))
            gathered = ((name, _gather(weight)) for name, weight in named.items())
            yield from unfuse_moe_params(gathered, engine.model_config.hf_config.model_type)
    finally:
        if engine._is_offload_param:
            offload_fsdp_model_to_cpu(module)


def _gather(weight: torch.Tensor) -> torch.Tensor:
    """The whole weight in memory of its own: who sends it may do so after the adapters are taken out again."""
    if isinstance(weight, DTensor):
        return weight.to(get_device_id(), non_blocking=True).full_tensor()
    return weight.detach().clone()


def _require_merged(module: torch.nn.Module) -> None:
    from peft.tuners.lora import LoraLayer

    # Under FSDP2 verl merges what lies in a wrapped part of the model, and says nothing of the rest.
    left = [name for name, part in module.named_modules() if isinstance(part, LoraLayer) and not part.merged]
    if left:
        raise WeightSyncError(
            f"verl does not merge the adapters of {', '.join(left[:3])}{' ...' if len(left) > 3 else ''}, which would "
            f"leave the generators without them: take these out of {MODEL}.target_modules"
        )


class _SentWeights(dict[str, Any]):
    """A state dict without repeated parameters, whose items are cast as they are taken."""

    def __init__(self, weights: dict[str, Any], module: torch.nn.Module, dtype: torch.dtype | None) -> None:
        repeated = _repeated_names(module)
        super().__init__((name, weight) for name, weight in weights.items() if name not in repeated)
        self._buffers = _plain((name for name, _ in module.named_buffers()), module)
        self._dtype = dtype

    def items(self) -> Any:
        for name, weight in super().items():
            yield name, weight if name in self._buffers else _narrow(weight, self._dtype)


def _narrow(weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is None or not weight.is_floating_point() or weight.dtype.itemsize <= dtype.itemsize:
        return weight
    return weight.detach().to(dtype)


def _repeated_names(module: torch.nn.Module) -> frozenset[str]:
    """Names of parameters that have another name before; the same on every rank, whatever its shards hold."""
    first: dict[int, str] = {}
    names = [
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    ]
    # FSDP1 keeps flat parameters, in which ties do not show; transformers notes them.
    noted = getattr(_unwrapped(module), "all_tied_weights_keys", None) or {}
    return _plain(names, module) | set(noted)


def _plain(names: Iterable[str], module: torch.nn.Module) -> frozenset[str]:
    """Names as in the model without FSDP1 and adapters."""
    plain = {name.replace(f"{_WRAPPER}.", ""): None for name in names}
    return frozenset(normalize_peft_param_name(plain) if hasattr(_unwrapped(module), "peft_config") else plain)


def _unwrapped(module: torch.nn.Module) -> Any:
    return getattr(module, _WRAPPER, module)
