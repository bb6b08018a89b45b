# SPDX-License-Identifier: Apache-2.0
"""Which engine verl takes in a run of ours, and what loss and head it has; test_engine_gradients trains with it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import verl.utils.device
import verl.workers.engine
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.trainer.distillation import distillation_ppo_loss
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.utils import losses

from scalerl_verl.cpu.verl import HostMemoryEngine
from scalerl_verl.errors import PatchError
from scalerl_verl.head.model import head_state
from scalerl_verl.upstream.activation import PLATFORM_ENV
from scalerl_verl.verl import actor_loss, engine
from scalerl_verl.verl.engine import HeadEngine, LossEngine, MegatronHeadEngine


class OfMegatron(FSDPEngineWithLMHead):
    """Stands for an engine that no CPU can import."""


class OfVendor(FSDPEngineWithLMHead):
    """Stands for an engine of another plugin."""


def registry_of(device: str) -> Any:
    """A registry of its own with what verl's holds for one device."""

    class Registry(EngineRegistry):
        _engines: ClassVar[dict[str, Any]] = {}

    fsdp = ["fsdp", "fsdp2"]
    Registry.register("language_model", fsdp, device)(FSDPEngineWithLMHead)
    Registry.register("value_model", fsdp, device)(FSDPEngineWithValueHead)
    Registry.register("language_model", "megatron", device)(OfMegatron)
    return Registry


def register(registry: Any) -> None:
    engine.register(SimpleNamespace(EngineRegistry=registry, fsdp=verl.workers.engine.fsdp))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl finds a GPU of NVIDIA's."""
    for variable in (PLATFORM_ENV, "VERL_ENGINE_DEVICE", "VERL_ENGINE_VENDOR"):
        monkeypatch.delenv(variable, raising=False)
    for module in (verl.utils.device, verl.workers.engine.base):
        monkeypatch.setattr(module, "get_device_name", lambda: "cuda")
        monkeypatch.setattr(module, "get_vendor", lambda: "nvidia")


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
@pytest.mark.parametrize(
    ("model_type", "of_verl"), [("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)]
)
def test_fsdp_engine_of_a_run_of_ours_has_our_head_and_loss(
    on_gpu: None, model_type: str, of_verl: type, backend: str
) -> None:
    registry = registry_of("cuda")
    assert registry.get_engine_cls(model_type, backend) is of_verl
    register(registry)
    found = registry.get_engine_cls(model_type, backend)
    assert issubclass(found, of_verl) and issubclass(found, HeadEngine)
    assert not issubclass(found, HostMemoryEngine), "weights of a reference are moved to pinned memory"


def test_megatron_s_engine_has_our_loss_and_a_head_of_its_own(on_gpu: None) -> None:
    registry = registry_of("cuda")
    register(registry)
    found = registry.get_engine_cls("language_model", "megatron")
    assert issubclass(found, OfMegatron) and issubclass(found, MegatronHeadEngine) and not issubclass(found, HeadEngine)


def test_other_engine_has_our_loss_alone(on_gpu: None) -> None:
    registry = registry_of("cuda")
    registry.register("language_model", "torchtitan", "cuda")(OfMegatron)
    register(registry)
    found = registry.get_engine_cls("language_model", "torchtitan")
    assert issubclass(found, OfMegatron) and issubclass(found, LossEngine)
    assert not issubclass(found, (HeadEngine, MegatronHeadEngine))
    with pytest.raises(AssertionError, match="Unknown backend"):
        registry.get_engine_cls("language_model", "veomni")


def test_cpu_engine_is_made_of_verl_s_own_without_pinned_memory(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    for module in (verl.utils.device, verl.workers.engine.base):
        monkeypatch.setattr(module, "get_device_name", lambda: "cpu")
        monkeypatch.setattr(module, "get_vendor", lambda: "cpu")
    registry = registry_of("cuda")
    register(registry)
    for model_type, of_verl in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        found = registry.get_engine_cls(model_type, "fsdp2")
        assert issubclass(found, of_verl) and issubclass(found, HeadEngine) and issubclass(found, HostMemoryEngine)
    with pytest.raises(ValueError, match="No engine registered"):
        registry.get_engine_cls("language_model", "megatron")


def test_vendor_that_the_user_names_gets_our_engine_too(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "metax")
    registry = registry_of("cuda")
    register(registry)
    assert issubclass(registry.get_engine_cls("language_model", "fsdp2"), HeadEngine)


def test_engine_of_another_plugin_in_our_place_is_refused_by_name(on_gpu: None) -> None:
    registry = registry_of("cuda")
    registry.register("language_model", "fsdp2", "cuda", "nvidia")(OfVendor)
    with pytest.raises(PatchError, match=r"test_engine\.OfVendor for fsdp2 on cuda of vendor nvidia.*leave out"):
        register(registry)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("backend", ["fp32", "fp32_shared_pass", "torch", None])
def test_engine_puts_our_head_where_verl_puts_none(backend: str | None, fused: bool) -> None:
    """verl takes our name for that of none, and goes on."""

    class OfVerl:
        def __init__(self) -> None:
            options = None if backend is None else {"impl_backend": backend}
            self.model_config = SimpleNamespace(fused_kernel_options=options, use_fused_kernels=fused)

        def _build_module(self) -> Any:
            sizes = dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 1)
            model = Qwen3ForCausalLM(Qwen3Config(vocab_size=11, hidden_size=8, intermediate_size=8, **sizes))
            if backend != "torch":  # which changes the class for good
                apply_monkey_patch(
                    model, use_remove_padding=False, use_fused_kernels=fused, fused_kernels_backend=backend
                )
            return model

    kind: Any = type("Engine", (HeadEngine, OfVerl), {})
    state = head_state(kind()._build_module())
    if backend in ("fp32", "fp32_shared_pass"):
        assert state is not None and (state.backend, state.fused) == (backend, fused)
    else:
        assert state is None


def test_only_losses_of_an_actor_are_replaced() -> None:
    config, note = object(), object()
    of_actor = actor_loss.training_loss(functools.partial(losses.ppo_loss, config=config))
    assert of_actor.func is actor_loss.ppo_loss and of_actor.keywords == {"config": config}
    for other in (None, losses.ppo_loss, functools.partial(losses.value_loss, config=config), lambda: note):
        assert actor_loss.training_loss(other) is other


def test_distilled_actor_s_policy_loss_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss calls verl's by name. As a processor of logits it is verl's own."""
    calls: list[Any] = []

    def of_policy(config: Any, model_output: Any, data: Any, dp_group: Any) -> Any:
        calls.append(config)
        return torch.tensor(2.0), {"policy": 1.0}

    names = {
        "ppo_loss": of_policy,
        "distillation_loss": lambda *_: (torch.tensor(3.0), {"distilled": 1.0}),
        "compute_topk_loss": lambda *_: "top k",
    }
    options = SimpleNamespace(use_task_rewards=True, use_policy_gradient=False, distillation_loss_coef=10.0)
    given = functools.partial(
        distillation_ppo_loss, config="actor", distillation_config=SimpleNamespace(distillation_loss=options)
    )
    ours = actor_loss.training_loss(given)
    assert ours.func.__globals__["ppo_loss"] is actor_loss.ppo_loss and ours.keywords == given.keywords
    ours.func.__globals__.update(names)  # a dict of its own: verl's module stays as it is
    try:
        total, metrics = ours(model_output={}, data={})
        assert float(total) == 32.0 and calls == ["actor"] and {"policy", "distilled"} <= set(metrics)
        assert ours(student_logits=torch.zeros(1), data={}) == "top k"
    finally:
        ours.func.__globals__.update({**vars(verl.trainer.distillation.losses), "ppo_loss": actor_loss.ppo_loss})
    assert distillation_ppo_loss.__globals__["ppo_loss"] is losses.ppo_loss
