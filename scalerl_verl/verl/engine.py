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
                raise PatchError(f"verl does not take the engine registered for {backend} on {device}, {vendor}")


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
        "The list of aggregation modes is local to this method: any other name than verl's is a ValueError.",
        _NO_MODE,
    ),
    override(
        "engine.loss",
        "verl.workers.utils.losses",
        "ppo_loss",
        "d7a7f4ab82c8a092467633bb9951c45697f58f3abf4c47137a8bb80ee159bfa7",
        "Entropy and KL have no advantage to carry the weights of rows, every metric of a policy loss is declared a "
        "mean, and verl's losses multiply by the mask, which NaN at a masked token outlives.",
        "verl weighs its terms, keeps declared aggregations and selects by the mask",
    ),
    override(
        "engine.aggregation",
        "verl.trainer.ppo.core_algos",
        "agg_loss",
        "baa1eabb337dd663c9191186b7da54398d0f80460450c95f2162980dd147032e",
        "prompt-mean is one of its modes over weighted advantages; KL and entropy go through it with their weights.",
        _NO_MODE,
    ),
    override(
        "engine.distillation",
        "verl.trainer.distillation.losses",
        "distillation_ppo_loss",
        "3cb963abf6c840baab5810fcab7a1fa1a47f4240545d903dcf5762375bf804a0",
        "It calls verl's loss of the actor by name; ours has to be called in its place.",
        "verl takes the policy loss of a distilled actor as an argument",
    ),
    override(
        "engine.batch",
        _FSDP_MODULE,
        "FSDPEngine.forward_backward_batch",
        "61bb6b9269129c24261530d7d8a56fe9f7d96acf3124a41c657610d21e4cbf28",
        "The loss function that a worker was given comes to its engine here, whatever the engine.",
        "verl takes the loss of an actor from the config",
    ),
    override(
        "engine.model",
        _FSDP_MODULE,
        "FSDPEngine._build_module",
        "a8f042195bba20d7d61281d73f4e2eb30eea1343c0bb2f698638167a2691ff6b",
        "verl chooses among its fused heads by name and takes an unknown name for none; each rounds logits to bf16 "
        "or patches the model's class.",
        _NO_HEAD,
    ),
    override(
        "engine.adapters",
        _FSDP_MODULE,
        "FSDPEngine._build_fsdp_module",
        "924053b5bdcba34f697926662ebea6d37b5f018cce19d1bee60f8cbb6f0fcb36",
        "An adapter on the output layer bypasses the head. On a CPU, weights cannot be moved to pinned memory.",
        _NO_HEAD,
    ),
    override(
        "engine.check",
        _FSDP_MODULE,
        "FSDPEngine.initialize",
        "523d499887d6a09ae277083c7ecf19abb1bd03ac5e183d6bba3f88fb45b6cf53",
        "Whether the head is active shows only in the model as the engine has built it: after LoRA, QAT and FSDP.",
        _NO_HEAD,
    ),
    override(
        "engine.token_loss",
        _FSDP_MODULE,
        "FSDPEngineWithLMHead.forward_step",
        "35ff7839ba6246689cc72e2a1fde548c11409e388ccc9eef63d1f5d40172d095",
        "The model's forward sees neither recorded log-probs nor advantages, which a head that shares its pass with "
        "backward needs.",
        "verl hands the loss to fused heads",
    ),
    override(
        "engine.megatron.batch",
        _MEGATRON_MODULE,
        "MegatronEngine.forward_backward_batch",
        "45725fc86fbecc18f180ef5f75ae139770e5e1c7171f1af2b9c72e0dfd64ead6",
        "The loss function that a worker was given comes to its engine here.",
        "verl takes the loss of an actor from the config",
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.micro_batch",
        _MEGATRON_MODULE,
        "MegatronEngineWithLMHead.postprocess_micro_batch_func",
        "13fbd481b9a7aacc3d603f287f52a61e73bb5d2296a1c827a3a19f1f9025e1e1",
        "It undoes Megatron's division by micro-batches: a loss of ours is a part of the whole batch's.",
        "verl takes the loss of an actor from the config",
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.model",
        _MEGATRON_MODULE,
        "MegatronEngine._maybe_enable_fused_kernels",
        "6ae73045725127f82be1c36dc2974228e2f606ed9917bb4f2b68a60abce3abb2",
        "It puts verl's own fused head on the model, whose logits are bf16 products, as soon as the weights are there.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.log_probs",
        _MEGATRON_MODULE,
        "MegatronEngineWithLMHead._lm_head_logits_processor",
        "f93da547df5797b29a4b583c0dd9cc467253e60c859c4f77f87101e5db7d9eb0",
        "It makes log-probs of logits, which a fused head never has.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.step",
        _MEGATRON_MODULE,
        "MegatronEngineWithLMHead.forward_step",
        "03c3b06ceb47d91880ef0ccd2b128222c27ca53f214c4a7b3067df43da6d780f",
        "It asks for log-probs right after the model's forward, of what its output layer returned.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
    override(
        "engine.megatron.forward",
        "verl.models.mcore.model_forward",
        "gptmodel_forward_model_engine",
        "6ab15275916c80dd0086975a795b72b3868fce7ec73855075e218e2087557093",
        "Labels and temperatures come to the processor in the layout in which tokens come to the model.",
        _NO_HEAD,
        needs=_MEGATRON_CORE,
    ),
)
