# SPDX-License-Identifier: Apache-2.0
"""``hf_overrides.head_dtype=float32`` in vLLM: the head itself where vLLM ignores the name, and a check everywhere.

vLLM has the name since 0.26. Before, it is read for pooling models only, and a generate model falls back to its own
dtype without a word. There we replace the layer through vLLM's registry for out-of-tree layers; no FP32 copy of the
weight is kept, so a weight update, a tied embedding or a wake-up from sleep cannot leave a stale one behind.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from scalerl_verl.errors import HeadError, PatchError
from scalerl_verl.names import MODEL
from scalerl_verl.upstream.spec import PatchSpec

KEY = "hf_overrides.head_dtype"
NATIVE_SINCE = "0.26"
"""vLLM has the name for generate models from this release on; what is installed is told by `is_native`."""
_LAYER = "LogitsProcessor"


def is_native(layer: type) -> bool:
    """Whether vLLM's own `LogitsProcessor` honours the name for generate models."""
    return hasattr(layer, "_apply_head")


def asks_for_fp32(model_config: Any) -> bool:
    """Whether a vLLM model config asks for an FP32 head, read from what ``hf_overrides`` left in the HF config.

    Raises:
        HeadError: a value that vLLM would map to another dtype than the model's.
    """
    if model_config is None or model_config.runner_type == "pooling":
        return False
    given = getattr(model_config.hf_config, "head_dtype", None)
    name = str(given).lower().removeprefix("torch.")
    if name in ("float32", "float"):
        return True
    if given is not None and name not in ("model", str(model_config.dtype).removeprefix("torch.")):
        raise HeadError(
            f"{KEY}={given}: the head of this model can be float32 or as the rest of it; set float32, or delete the key"
        )
    return False


def refuse_unsupported(vllm_config: Any, native: bool) -> None:
    """Refuse what the FP32 head would not cover.

    Args:
        vllm_config: vLLM's config of this engine, whose model asks for an FP32 head.
        native: whether vLLM itself implements it.

    Raises:
        HeadError: saying what to change.
    """
    import vllm.envs as envs

    if vllm_config.lora_config is not None and not native:
        raise HeadError(
            f"{KEY}=float32 with LoRA adapters in the generator needs vLLM 0.26 or newer: before, their layer computes "
            f"logits of its own. Merge them into the weights ({MODEL}.lora.merge=True), or delete the "
            "key on both sides"
        )
    if vllm_config.speculative_config is not None and not native:
        raise HeadError(
            f"{KEY}=float32 with speculative decoding needs vLLM 0.26 or newer: before, draft logits are stored in the "
            "model's dtype. Switch speculative decoding off, or delete the key on both sides"
        )
    if envs.VLLM_BATCH_INVARIANT:
        raise HeadError(
            f"{KEY}=float32 with VLLM_BATCH_INVARIANT=1 (rollout.full_determinism): the FP32 product depends on the "
            "batch. Switch one of them off"
        )


def _build_layer(original: Any, module: ModuleType) -> Any:
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    if is_native(original):
        return original
    other = op_registry_oot.get(_LAYER)
    if other is not None:
        raise PatchError(
            f"{other.__module__}.{other.__name__} already replaces vLLM's {_LAYER}: uninstall that plugin, or do not "
            f"use {KEY}"
        )
    PluggableLayer.register_oot(make_layer(original), name=_LAYER)
    return original


def make_layer(original: Any) -> Any:
    """Return a subclass of vLLM's `LogitsProcessor` whose product with the head's weight is FP32 if the model asks."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from scalerl_verl.head.chunked import promote
    from scalerl_verl.head.matmul import mm_fp32

    class Fp32Head:
        """The head's layer with another ``quant_method.apply``, all that `LogitsProcessor` computes with.

        The vocabulary's shard of this rank comes out in FP32; gathering, padding, soft cap and scale are vLLM's.
        """

        def __init__(self, layer: Any) -> None:
            if not isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                raise HeadError(
                    f"{KEY}=float32 needs an unquantised LM head, this one uses {type(layer.quant_method).__name__}: "
                    "leave lm_head out of the quantisation, or delete the key on both sides"
                )
            self._layer = layer
            self.quant_method = self

        def apply(self, _: Any, hidden: Any, bias: Any = None) -> Any:
            hidden_NH, weight_VH = promote(hidden.reshape(-1, hidden.shape[-1]), self._layer.weight)
            logits_NV = mm_fp32(hidden_NH, weight_VH.t())
            if bias is not None:
                logits_NV = logits_NV + bias.to(logits_NV.dtype)
            return logits_NV.view(*hidden.shape[:-1], -1)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._layer, name)

    class Fp32LogitsProcessor(original):
        """vLLM's layer; ``fp32_head`` says whether the model asked for one when the layer was made."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fp32_head = False
            # Read now: outside of the engine's construction there is no current config.
            vllm_config = get_current_vllm_config_or_none()
            if vllm_config is not None and asks_for_fp32(vllm_config.model_config):
                refuse_unsupported(vllm_config, native=False)
                self.fp32_head = True

        def _get_logits(self, hidden_states: Any, lm_head: Any, *others: Any) -> Any:
            return super()._get_logits(hidden_states, self._wrap(lm_head), *others)

        def get_top_tokens(self, lm_head: Any, hidden_states: Any, embedding_bias: Any = None) -> Any:
            return super().get_top_tokens(self._wrap(lm_head), hidden_states, embedding_bias)

        def _wrap(self, lm_head: Any) -> Any:
            return Fp32Head(lm_head) if self.fp32_head else lm_head

    return Fp32LogitsProcessor


def _build_load(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if asks_for_fp32(self.vllm_config.model_config):
            from scalerl_verl.head.vllm_probe import check_engine_head

            check_engine_head(self)
        return result

    return load_model


SPECS = (
    PatchSpec(
        name="vllm.head.layer",
        module="vllm.model_executor.layers.logits_processor",
        target=_LAYER,
        build=_build_layer,
        kind="register",
        why="Before 0.26 vLLM silently ignores hf_overrides.head_dtype for generative models, and the head stays "
        "bf16. Our subclass is registered as an out-of-tree layer; from 0.26 on nothing is registered.",
        distribution="vllm",
        sources=(
            "00201c610b9fa4f32d4d720a258eadf28a2bfc8b71c5d98d8bb32afe786b182e",  # 0.24.0, 0.25.0, 0.25.1
            "03d973a2c68977433d7bd935155d15ee0a79d1fddb51c1057b29a3a32af09c8e",  # 0.26.0
            "da4083d3ba74b351aa44df43d11222a8d3cad8b7128c75afbed03133bbcaec8b",  # 0.27.0, 0.27.1
            "3635894c85db6e20aa8076e0534b6229f5f720cce4a603611e3a0cfc32b619b2",  # 0.28.0
            "1d03d77672924d7562cac87b2f17345f6cb02b5d91d19392fcf8b5ee48646a82",  # 0.29.0, 0.30.0
            "b80c3c90597635ca183413e74dc37c80fd5e32c95e16602009a42c2f0eff73b8",  # 0.31.0 to 0.33.0
        ),
        removal="no supported vLLM is older than 0.26 (see patches/vllm)",
        late_ok=True,
    ),
    PatchSpec(
        name="vllm.head.check",
        module="vllm.v1.worker.gpu_worker",
        target="Worker.load_model",
        build=_build_load,
        kind="wrap",
        why="If the generator lacks the FP32 head that the trainer has, the mismatch is larger than without any. So "
        "the logits of the loaded model are compared with float64, and the engine stops with the measured error if "
        "they are not FP32.",
        distribution="vllm",
        sources=(
            "853e9b6cd1a2463eb165a32448f8bba92b8a2d60179bdd97debfe56426bfa820",  # 0.24.0
            "817e7e67e0a56e4c945816d075a2cc305203bb67d01e7bf41753a62d66f5d143",  # 0.25.0 to 0.29.0
            "11c914ce7f78b077301250a657e81a490fba0ed7b728331cd367323ccbddd3c3",  # 0.30.0
            "9a2d85dd2196f5f849f322fb7cbf7cb68118dc296e84d8254b35885655d1b7ab",  # 0.31.0 to 0.33.0
        ),
        removal="vLLM refuses a head_dtype that it does not apply",
        late_ok=True,
    ),
)
