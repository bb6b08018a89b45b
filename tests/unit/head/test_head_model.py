# SPDX-License-Identifier: Apache-2.0
"""The FP32 head on model instances: which models it fits, what it refuses, and that it stays where it was put."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
import verl  # noqa: F401 - loads the plugin
from verl.models.transformers.dense_common import CausalLMOutputForPPO, forward_with_torch_backend
from verl.models.transformers.monkey_patch import patch_forward_with_backends

from scalerl_verl.errors import HeadError
from scalerl_verl.head import linear_logprobs
from scalerl_verl.head import verl_check as head_check
from scalerl_verl.head.model import head_state, put_head_on
from scalerl_verl.head.verl_check import measure

SIZE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
TOKENS = torch.tensor([[5, 9, 1, 60, 33], [7, 2, 2, 8, 4]])
FUSED = {"input_ids": TOKENS, "temperature": 0.7, "return_dict": True, "use_cache": False}


def make(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZE | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.4)
    return model.to(dtype)


def put(model: Any, fused: bool, backend: str = "fp32") -> Any:
    put_head_on(model, backend, fused, CausalLMOutputForPPO)
    return model


@pytest.fixture
def qwen3_class() -> Iterator[type]:
    """verl patches classes for good: put Qwen3's forward back."""
    kind, forward = transformers.Qwen3ForCausalLM, transformers.Qwen3ForCausalLM.forward
    yield kind
    kind.forward = forward


def reference(model: Any, temperature: float = 0.7) -> torch.Tensor:
    """log-probs of the next tokens by the model's own forward in float64, [B, T - 1]."""
    plain = type(model)(model.config).double()
    plain.load_state_dict(model.double().state_dict())
    logits = plain(TOKENS).logits / temperature
    return logits.log_softmax(-1)[:, :-1].gather(2, TOKENS[:, 1:, None])[..., 0]


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Llama", "Mistral", "Gemma", "Phi3", "Olmo2"])
def test_fused_log_probs_of_common_models(kind: str) -> None:
    model = make(kind)
    output = put(model, fused=True)(**FUSED)
    assert output.log_probs.dtype == output.entropy.dtype == torch.float32 and output.logits is None
    torch.testing.assert_close(output.log_probs[:, :-1].double(), reference(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "options", "what"),
    [
        ("Gemma2", {"final_logit_softcapping": 3.0}, "final_logit_softcapping=3.0"),
        ("Cohere", {"logit_scale": 0.5}, "logit_scale=0.5"),
        ("Granite", {"logits_scaling": 4.0}, "logits_scaling=4.0"),
    ],
)
def test_models_that_change_their_logits_are_refused_fused_and_right_without_fusion(
    kind: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(HeadError, match=f"{what}.*use_fused_kernels=False"):
        put(make(kind, **options), fused=True)
    model = make(kind, **options)
    logits = put(model, fused=False)(TOKENS).logits
    assert logits.dtype == torch.float32
    logp = (logits.double() / 0.7).log_softmax(-1)[:, :-1].gather(2, TOKENS[:, 1:, None])[..., 0]
    torch.testing.assert_close(logp, reference(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite"])
def test_a_change_of_logits_under_an_unknown_name_is_found_by_what_comes_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalerl_verl.head.model._AFTER_HEAD", ())
    options = {"Gemma2": {"final_logit_softcapping": 3.0}, "Cohere": {"logit_scale": 0.5}, "Granite": {}}[kind]
    model = put(make(kind, **options), fused=True)
    with pytest.raises(HeadError, match="changes its logits after the output layer"):
        model(**FUSED)


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3Moe"])
def test_bf16_model_has_fp32_logits_and_a_bf16_trunk(kind: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if kind == "Qwen3Moe" else {}
    model = put(make(kind, torch.bfloat16, **experts), fused=False)
    seen: dict[str, torch.Tensor] = {}
    model.lm_head.register_forward_pre_hook(lambda layer, args: seen.update(hidden=args[0].detach()))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(TOKENS).logits
    truth = seen["hidden"].double() @ model.lm_head.weight.double().t()
    assert seen["hidden"].dtype == model.lm_head.weight.dtype == torch.bfloat16
    # 32 sums of products of bf16 numbers: FP32 rounding alone. Rounded to bf16 they would be off by 2^-9 of their size.
    assert float((logits.double() - truth).abs().max()) < 1e-5 < float((truth.bfloat16() - truth).abs().max())


def test_router_logits_and_losses_of_a_mixture_of_experts_stay() -> None:
    model = make("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, output_router_logits=True)
    plain = model(TOKENS)
    with_head = put(model, fused=False)(TOKENS)
    torch.testing.assert_close(with_head.aux_loss, plain.aux_loss)
    assert len(with_head.router_logits) == 1


def test_biased_output_layer() -> None:
    model = make("Phi", rms_norm_eps=1e-5)
    assert model.lm_head.bias is not None
    with pytest.raises(HeadError, match="has a bias"):
        put(model, fused=True)
    model.lm_head.bias.data.normal_()
    truth = model(TOKENS).logits
    torch.testing.assert_close(put(model, fused=False)(TOKENS).logits, truth, atol=1e-5, rtol=0)


def test_head_stays_on_its_instance(qwen3_class: type) -> None:
    class_forward = qwen3_class.forward
    actor, reference_model, plain = (make("Qwen3") for _ in range(3))
    put(actor, fused=True)
    put(reference_model, fused=False)
    assert qwen3_class.forward is class_forward
    assert actor(**FUSED).log_probs is not None
    assert reference_model(TOKENS).logits.shape == plain(TOKENS).logits.shape == (2, 5, 61)
    assert head_state(plain) is None and "forward" not in vars(plain) and "forward" not in vars(plain.lm_head)


def test_verl_s_own_backend_on_the_class_does_not_reach_a_head_that_was_there(qwen3_class: Any) -> None:
    ours, theirs = put(make("Qwen3"), fused=True), make("Qwen3")
    before = ours(**FUSED).log_probs
    patch_forward_with_backends(theirs, use_fused_kernels=True, fused_kernels_backend="torch")
    assert qwen3_class.forward is forward_with_torch_backend
    torch.testing.assert_close(ours(**FUSED).log_probs, before, atol=0, rtol=0)
    with pytest.raises(HeadError, match="one impl_backend for all models of a class"):
        put(make("Qwen3"), fused=False)


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    model = put(make("Qwen3"), fused=True)
    other = copy.deepcopy(model)
    before = model(**FUSED).log_probs
    torch.nn.init.zeros_(other.lm_head.weight)
    assert torch.equal(model(**FUSED).log_probs, before)
    uniform = torch.full_like(before, 61.0).log().neg()
    torch.testing.assert_close(other(**FUSED).log_probs, uniform, atol=1e-5, rtol=0)


def test_models_without_a_plain_output_layer_are_refused() -> None:
    critic = transformers.Qwen3ForTokenClassification(transformers.Qwen3Config(**SIZE, num_labels=1))
    with pytest.raises(HeadError, match="no output layer over the vocabulary"):
        put(critic, fused=False)
    quantised = make("Qwen3")
    quantised.lm_head = type("QuantLinear", (torch.nn.Linear,), {})(16, 61, bias=False)
    with pytest.raises(HeadError, match=r"QuantLinear, not torch\.nn\.Linear"):
        put(quantised, fused=True)
    twice = put(make("Qwen3"), fused=True)
    with pytest.raises(HeadError, match="already replaced forward"):
        put(twice, fused=True)
    vision = make("Qwen3")
    vision.config.vision_config = {}
    with pytest.raises(HeadError, match="vision tower"):
        put(vision, fused=False)


def test_positions_left_out_before_the_head_are_refused() -> None:
    model = put(make("Qwen3"), fused=True)
    with pytest.raises(HeadError, match="labels would not belong to their tokens"):
        model(**FUSED, logits_to_keep=1)


def test_verl_s_labels_are_used_as_they_come() -> None:
    model = put(make("Qwen3"), fused=True)
    own = model(**FUSED)
    given = model(**FUSED, shift_labels=torch.roll(TOKENS, -1, dims=-1))
    assert torch.equal(own.log_probs, given.log_probs)
    other = model(**FUSED, shift_labels=torch.zeros_like(TOKENS))
    hidden = model.model(TOKENS).last_hidden_state
    truth = linear_logprobs(hidden, model.lm_head.weight, torch.zeros_like(TOKENS), temperature=0.7, impl="naive")
    torch.testing.assert_close(other.log_probs.double(), truth.logp, atol=1e-5, rtol=0)


def test_shared_pass_outside_a_training_step_is_refused() -> None:
    model = put(make("Qwen3"), fused=True, backend="fp32_shared_pass")
    with torch.no_grad():
        assert model(**FUSED).log_probs is not None
    with pytest.raises(HeadError, match="makes gradients for loss_mode=scalerl_cispo of an actor's training step"):
        model(**FUSED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_probe_tells_fp32_from_bf16_logits(
    dtype: torch.dtype, fused: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 4001, bias=bias and not fused).to(dtype)
    hidden = torch.zeros(1, 512, dtype=dtype)
    found = measure(layer, hidden, layer.weight, fused)
    assert 0 < found["max_error"] < found["tolerance"] / 3
    # The same head with logits rounded to bf16, in both forms.
    ours_logits, ours_logp = head_check.fp32_logits, head_check.linear_logprobs
    monkeypatch.setattr(head_check, "fp32_logits", lambda *args: ours_logits(*args).bfloat16().float())

    def rounded(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = ours_logits(hidden, weight).bfloat16().float()
        return ours_logp(logits, torch.eye(len(weight)), labels)

    monkeypatch.setattr(head_check, "linear_logprobs", rounded)
    assert measure(layer, hidden, layer.weight, fused)["max_error"] > 1e-2 > 3 * found["tolerance"]
    assert found["weight_dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-5, 1e-3])
def test_probe_is_not_misled_by_rows_of_unused_tokens(scale: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, 2048, bias=False)
    with torch.no_grad():
        layer.weight[-300:] *= scale
        layer.weight[0] *= scale
    layer = layer.to(dtype)
    found = measure(layer, torch.zeros(1, 1024, dtype=dtype), layer.weight, fused=True)
    assert 0 < found["max_error"] < found["tolerance"]


def test_probe_tells_true_fp32_from_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands cut to TF32's 10 bits of mantissa, at the largest hidden size in common use for which that shows."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4096, 2048, bias=False)
    hidden = torch.zeros(1, 4096)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)

    ours = head_check.fp32_logits
    monkeypatch.setattr(head_check, "fp32_logits", lambda x, weight, bias: ours(cut(x), cut(weight.detach()), bias))
    found = measure(layer, hidden, layer.weight, fused=False)
    assert found["max_error"] > found["tolerance"]
