# SPDX-License-Identifier: Apache-2.0
"""verl's training engines with our loss and FP32 head, in verl's own registry.

verl looks an engine up by (device, vendor) first and by device alone second, and registers its own by device alone. In
a run of ours, the engine of this machine's vendor is a subclass of the one that verl would have taken.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from scalerl_verl.cpu.verl import HostMemoryEngine
from scalerl_verl.errors import PatchError
from scalerl_verl.names import MEGATRON, SHARED_PASS, STRATEGIES
from scalerl_verl.upstream.activation import is_cpu_platform
from scalerl_verl.upstream.spec import override

_FSDP = ("fsdp", "fsdp2")
_MODEL_TYPES = {"language_model": "FSDPEngineWithLMHead", "value_model": "FSDPEngineWithValueHead"}
_FSDP_MODULE = "verl.workers.engine.fsdp.transformer_impl"
_MEGATRON_MODULE = "verl.workers.engine.megatron.transformer_impl"
_MEGATRON_CORE = "megatron.core"
_Engine: Any = object
"""What the mixins stand on is known only when verl is there."""


class LossEngine(_Engine):
    """Any engine of verl, which trains with our version of verl's loss of the actor."""

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        from scalerl_verl.verl.actor_loss import training_loss

        return super().forward_backward_batch(data, training_loss(loss_function), forward_only=forward_only)


class HeadEngine(LossEngine):
    """An FSDP engine whose model has the FP32 head that the config asks for, checked once the engine stands."""

    def _build_module(self) -> Any:
        """The model before LoRA and FSDP; verl takes the name of our head for that of none."""
        from verl.models.transformers.dense_common import CausalLMOutputForPPO

        from scalerl_verl.head.model import put_head_on
        from scalerl_verl.head.settings import model_backend

        model = super()._build_module()
        if (backend := model_backend(self.model_config)) is not None:
            put_head_on(model, backend, self.model_config.use_fused_kernels, CausalLMOutputForPPO)
        return model

    def _build_fsdp_module(self, module: Any) -> Any:
        """The sharded model; FSDP2 cannot shard an adapter on the head, and says so in terms of class layouts."""
        from scalerl_verl.head.verl_check import check_model

        check_model(module, self.model_config)
        return super()._build_fsdp_module(module)

    def initialize(self) -> Any:
        from scalerl_verl.head.verl_check import check_engine

        result = super().initialize()
        check_engine(self)
        return result

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """One micro-batch; a head that makes gradients in forward is told the loss of each token first."""
        from scalerl_verl.head.settings import model_backend

        if forward_only or model_backend(self.model_config) != SHARED_PASS:
            return super().forward_step(micro_batch, loss_function, forward_only)

        from verl.utils.device import get_device_id

        from scalerl_verl.head.verl_token_loss import token_loss_of

        micro_batch = micro_batch.to(get_device_id())
        with token_loss_of(self, micro_batch, loss_function):
            return super().forward_step(micro_batch, loss_function, forward_only)


class MegatronHeadEngine(LossEngine):
    """verl's Megatron engine with the FP32 head on its output layer, measured once the weights are there."""

    _head: Any = None

    def _maybe_enable_fused_kernels(self) -> None:
        """What verl does once the model stands: with our head, its own fused one stays off."""
        from scalerl_verl.head.settings import model_backend

        backend = model_backend(self.model_config)
        if backend is None:
            super()._maybe_enable_fused_kernels()
            return

        from megatron.core import parallel_state

        from scalerl_verl.head.verl_megatron import put_megatron_head_on, record_head

        fused, vocab_size = (
            self.model_config.use_fused_kernels,
            self.model_config.hf_config.get_text_config().vocab_size,
        )
        self._head = put_megatron_head_on(self.module, backend, fused, vocab_size)
        # verl's workers read it again with every batch.
        self.engine_config.use_fused_kernels = False
        stages = parallel_state.get_pipeline_model_parallel_group()
        record_head(self._head, backend, fused, bool(self.engine_config.forward_only), stages)

    def _lm_head_logits_processor(self, logits: Any, label: Any, temperature: Any, **options: Any) -> Any:
        """Log-probs (and entropies) of a micro-batch: of hidden states if the head is fused, else of FP32 logits."""
        if self._head is None:
            return super()._lm_head_logits_processor(logits, label, temperature, **options)
        if not self._head.fused:
            self._head.check_logits(logits)
            return super()._lm_head_logits_processor(logits, label, temperature, **options)
        return self._head.process(label, temperature, **options)


def register(engines: ModuleType) -> None:
    """Put our engines into verl's registry, for the device and vendor of this process.

    Args:
        engines: the module ``verl.workers.engine``.

    Raises:
        PatchError: another plugin has registered an engine for this vendor, or verl looks engines up another way.
    """
    from verl.utils.device import get_device_name, get_vendor

    registry = engines.EngineRegistry
    # The variables are verl's, and win over what it finds.
    device = os.environ.get("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.environ.get("VERL_ENGINE_VENDOR") or get_vendor()
    for model_type in _MODEL_TYPES:
        for backend in STRATEGIES:
            engine = _verl_engine(engines, model_type, backend)
            if engine is None:
                continue
            ours = _make_engine(engine, backend)
            try:
                registry.register(model_type=model_type, backend=backend, device=device, vendor=vendor)(ours)
            except AssertionError as error:
                raise PatchError(
                    f"another plugin has registered {engine.__module__}.{engine.__name__} for {backend} on {device} of "
                    f"vendor {vendor}, where this run needs an engine with our loss: leave out that plugin or our names"
                ) from error
            if registry.get_engine_cls(model_type, backend) is not ours:
                raise PatchError(
                    f"verl does not take the engine that scalerl_verl registered for {backend} on {device} of vendor "
                    f"{vendor}. Install a version that 'scalerl doctor' lists"
                )


def _verl_engine(engines: ModuleType, model_type: str, backend: str) -> Any:
    """The engine that verl takes in a run without our names, or on a CPU could take; None if there is none."""
    try:
        return engines.EngineRegistry.get_engine_cls(model_type, backend)
    except (AssertionError, ValueError):
        if not (is_cpu_platform() and backend in _FSDP):
            return None
    return getattr(engines.fsdp.transformer_impl, _MODEL_TYPES[model_type])


def _make_engine(engine: Any, backend: str) -> Any:
    mixins: tuple[Any, ...] = (_HEADS.get(backend, LossEngine),)
    if is_cpu_platform():
        mixins = (*mixins, HostMemoryEngine)
    return type(f"ScaleRL{engine.__name__}", (*mixins, engine), {})


_HEADS: dict[str, Any] = {**dict.fromkeys(_FSDP, HeadEngine), MEGATRON: MegatronHeadEngine}
"""Strategy -> engine with our loss that has an FP32 head, too."""

_NO_HEAD = "verl has an impl_backend with FP32 logits (see patches/verl)"
_NO_MODE = "verl has a prompt-level aggregation mode (see patches/verl)"
SPECS = (
    override(
        "engine.config",
        "verl.workers.config.actor",
        "ActorConfig.__post_init__",
        "512487971933331a323044a1dec790326e6ffc8af98a14ca76c06950432385b9",
        "The list of aggregation modes is local to this method, and any other name is a ValueError.",
        _NO_MODE,
    ),
    override(
        "engine.loss",
        "verl.workers.utils.losses",
        "ppo_loss",
        "d7a7f4ab82c8a092467633bb9951c45697f58f3abf4c47137a8bb80ee159bfa7",
        "Entropy and KL have no advantage that could carry the row weights. verl averages every metric of a policy "
        "loss. verl's losses multiply by the mask, so NaN at a masked token stays NaN.",
        "verl weights entropy and KL by row, aggregates metrics as declared, and selects by the mask",
    ),
    override(
        "engine.aggregation",
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        "baa1eabb337dd663c9191186b7da54398d0f80460450c95f2162980dd147032e",
        "prompt-mean is computed by one of its modes from weighted advantages. KL and entropy are multiplied by the "
        "row weights before they are aggregated with it.",
        _NO_MODE,
    ),
    override(
        "engine.distillation",
        "verl.trainer.distillation.losses",
        "distillation_ppo_loss",
        "3cb963abf6c840baab5810fcab7a1fa1a47f4240545d903dcf5762375bf804a0",
        "It calls verl's actor loss by name; our loss has to be called instead.",
        "verl takes the policy loss of a distilled actor as an argument",
    ),
    override(
        "engine.batch",
        _FSDP_MODULE,
        "FSDPEngine.forward_backward_batch",
        "61bb6b9269129c24261530d7d8a56fe9f7d96acf3124a41c657610d21e4cbf28",
        "Every engine receives the worker's loss function here, so our loss takes its place here.",
        "verl takes the loss of an actor from the config",
    ),
    override(
        "engine.model",
        _FSDP_MODULE,
        "FSDPEngine._build_module",
        "a8f042195bba20d7d61281d73f4e2eb30eea1343c0bb2f698638167a2691ff6b",
        "Our FP32 head is put on the model here. verl's own fused heads round logits to bf16 or patch the class of "
        "the model, and verl ignores an unknown name.",
        _NO_HEAD,
    ),
    override(
        "engine.adapters",
        _FSDP_MODULE,
        "FSDPEngine._build_fsdp_module",
        "924053b5bdcba34f697926662ebea6d37b5f018cce19d1bee60f8cbb6f0fcb36",
        "A LoRA adapter on the output layer would bypass the FP32 head, so it is refused here. On a CPU, weights "
        "cannot be moved to pinned memory.",
        _NO_HEAD,
    ),
    override(
        "engine.check",
        _FSDP_MODULE,
        "FSDPEngine.initialize",
        "523d499887d6a09ae277083c7ecf19abb1bd03ac5e183d6bba3f88fb45b6cf53",
        "Only the finished model (after LoRA, QAT and FSDP) shows whether the FP32 head is active, so it is checked "
        "here.",
        _NO_HEAD,
    ),
    override(
        "engine.token_loss",
        _FSDP_MODULE,
        "FSDPEngineWithLMHead.forward_step",
        "35ff7839ba6246689cc72e2a1fde548c11409e388ccc9eef63d1f5d40172d095",
        "The head with a shared pass computes gradients during forward. It needs the recorded log-probs and "
        "advantages, which the model's forward does not get.",
        "verl hands the loss to fused heads",
    ),
    override(
        "engine.megatron.batch",
        _MEGATRON_MODULE,
        "MegatronEngine.forward_backward_batch",
        "45725fc86fbecc18f180ef5f75ae139770e5e1c7171f1af2b9c72e0dfd64ead6",
        "The engine receives the worker's loss function here, so our loss takes its place here.",
        "verl takes the loss of an actor from the config",
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.micro_batch",
        _MEGATRON_MODULE,
        "MegatronEngineWithLMHead.postprocess_micro_batch_func",
        "13fbd481b9a7aacc3d603f287f52a61e73bb5d2296a1c827a3a19f1f9025e1e1",
        "It undoes Megatron's division by the number of micro-batches. Our loss relies on this, because the "
        "micro-batch losses must add up to the loss of the batch.",
        "verl takes the loss of an actor from the config",
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.model",
        _MEGATRON_MODULE,
        "MegatronEngine._maybe_enable_fused_kernels",
        "6ae73045725127f82be1c36dc2974228e2f606ed9917bb4f2b68a60abce3abb2",
        "It puts verl's own fused head, with bf16 logits, on the model once the weights are loaded. Our FP32 head is "
        "put there instead.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.log_probs",
        _MEGATRON_MODULE,
        "MegatronEngineWithLMHead._lm_head_logits_processor",
        "f93da547df5797b29a4b583c0dd9cc467253e60c859c4f77f87101e5db7d9eb0",
        "It computes log-probs from logits. Our fused head has no logits, so it computes them from hidden states.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.step",
        _MEGATRON_MODULE,
        "MegatronEngineWithLMHead.forward_step",
        "03c3b06ceb47d91880ef0ccd2b128222c27ca53f214c4a7b3067df43da6d780f",
        "It passes the result of the output layer to the log-prob function right after the model's forward; the FP32 "
        "head relies on this order.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.forward",
        "verl.models.mcore.model_forward",
        "gptmodel_forward_model_engine",
        "6ab15275916c80dd0086975a795b72b3868fce7ec73855075e218e2087557093",
        "It passes labels and temperatures to the log-prob function in the same layout as the tokens; the FP32 head "
        "relies on it.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
)
