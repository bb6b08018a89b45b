# SPDX-License-Identifier: Apache-2.0
"""The FP32 head in verl's own FSDP2 engine on 1 and 2 gloo ranks: fused, as logits, and with a shared pass.

Truths: the same engine with a float64 head (whatever differs then is the head's), and for FP32 models a float64 model
of transformers, row by row, without verl and without the package.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.head.head_engines import CASES, EPS_MAX, PROMPTS, RESPONSES, TEMPERATURE, make_rows
from tests.unit.verl.ranks import run_ranks

CHILD = Path(__file__).with_name("head_engines.py")
VOCAB_SIZE = 97
SIZE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

LOGP_TOLERANCE = 1e-5
"""log-probs lie within 30 of 0 here; FP32 is off by a few times 30 x 2^-24 = 2e-6, bf16 logits by 3e-2"""
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""relative, of all gradients together; in bf16 the gradient of hidden states is rounded (2^-9 each) before the trunk's
own bf16 backward, which can turn one more rounding of it into others all the way down"""
EXACT_HEAD_TOLERANCE = 1e-6
"""relative, for the head's own weight under bf16: its gradient is summed in FP32 and not rounded (FP32 storage)"""


def save_models(folder: Path) -> None:
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZE, tie_word_embeddings=False)),
        "qwen3-tied": Qwen3ForCausalLM(Qwen3Config(**SIZE, tie_word_embeddings=True)),
        "qwen3-moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE, **EXPERTS, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=False)),
    }
    torch.manual_seed(0)
    for name, model in models.items():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough for logits of +-10, where bf16 is coarse.
                parameter.data.normal_(std=0.3)
        model.save_pretrained(folder / name)


def run_engines(folder: Path, world_size: int) -> dict[str, dict[str, Any]]:
    run_ranks(CHILD, folder, world_size)
    return torch.load(folder / f"results-{world_size}.pt", weights_only=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return run_engines(folder, 1) | run_engines(folder, 2)


def predicted(values: torch.Tensor) -> torch.Tensor:
    """Without the last position of each row: its label is another row's token, or padding."""
    lengths = torch.tensor([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    keep = torch.ones(len(values), dtype=torch.bool)
    keep[lengths.cumsum(0) - 1] = False
    return values[keep]


def logp_error(found: dict[str, Any], truth: dict[str, Any]) -> float:
    return float((predicted(found["logp"]).double() - predicted(truth["logp"]).double()).abs().max())


def gradient_error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    assert sorted(found) == sorted(truth)
    flat = [torch.cat([gradients[name].flatten().double() for name in sorted(truth)]) for gradients in (found, truth)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


WITH_TRUTH = [name for name in CASES if name.count("|") == 2 and not name.endswith("truth")]


@pytest.mark.parametrize("name", WITH_TRUTH)
def test_head_is_the_float64_head(results: dict[str, dict[str, Any]], name: str) -> None:
    found, truth = results[name], results[name.rsplit("|", 1)[0] + "|truth"]
    assert found["logp_dtype"] == "torch.float32"
    assert logp_error(found, truth) < LOGP_TOLERANCE
    assert float((found["entropy"].double() - truth["entropy"].double()).abs().max()) < LOGP_TOLERANCE
    assert gradient_error(found["gradients"], truth["gradients"]) < GRADIENT_TOLERANCE[CASES[name].param_dtype]
    if "lm_head.weight" in truth["gradients"]:
        own = [{"lm_head": result["gradients"]["lm_head.weight"]} for result in (found, truth)]
        assert gradient_error(*own) < (EXACT_HEAD_TOLERANCE if CASES[name].param_dtype == "bf16" else 1e-5)


@pytest.mark.works_with("LoRA", "CISPO", "FP32 head")
@pytest.mark.works_with("Ulysses", "CISPO", "prompt average", "FP32 head")
@pytest.mark.works_with("entropy bonus", "CISPO", "FP32 head")
@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        *(
            (f"{how}|{kind}", "qwen3|fp32|truth")
            for how in ("packed", "packed, padded")
            for kind in ("fused", "logits")
        ),
        *(
            (f"{how}|{kind}", "qwen3|fp32|truth")
            for how in ("two ranks", "sequence parallel")
            for kind in ("fused", "logits")
        ),
        *((f"sequence parallel, prompts|{kind}", "prompts|truth") for kind in ("fused", "logits")),
        *((f"checkpointing|{kind}", "qwen3-tied|fp32|truth") for kind in ("fused", "logits")),
        *((f"entropy|{kind}", "entropy|truth") for kind in ("fused", "logits")),
        *((f"shared pass, {how}|shared", "qwen3|fp32|truth") for how in ("padded", "packed", "sequence parallel")),
        ("shared pass, two ranks|shared", "qwen3-tied|fp32|truth"),
        ("shared pass, bf16|shared", "qwen3-moe|bf16|truth"),
        ("shared pass, masked|shared", "shared pass, masked|fused"),
        ("lora|fused", "lora|logits"),
    ],
)
def test_layout_ranks_checkpointing_lora_and_shared_pass_change_nothing(
    results: dict[str, dict[str, Any]], name: str, same_as: str
) -> None:
    found, truth = results[name], results[same_as]
    tolerance = GRADIENT_TOLERANCE[CASES[name].param_dtype]
    assert gradient_error(found["gradients"], truth["gradients"]) < tolerance
    assert logp_error(found, truth) < LOGP_TOLERANCE


@pytest.mark.works_with("Ulysses", "CISPO", "prompt average", "advantages", "interruption", "FP32 head")
@pytest.mark.parametrize("kind", ["fused", "logits"])
def test_sequence_parallel_step_leaves_the_weights_of_one_rank(results: dict[str, dict[str, Any]], kind: str) -> None:
    """Two ranks share each response, whose forced tokens lie on both; what was recorded of these is NaN."""
    found, truth = (results[name]["moved"] for name in (f"sequence parallel, prompts|{kind}", "prompts|truth"))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in results["prompts|truth"]["gradients"].values()))
    assert norm > 1, "the step must be clipped, which takes the gradient of both ranks"
    assert gradient_error(found, truth) < GRADIENT_TOLERANCE["fp32"]
    assert sum(float(change.square().sum()) for change in truth.values()) > 1e-3


def test_cases_that_should_differ_differ(results: dict[str, dict[str, Any]]) -> None:
    base = results["qwen3|fp32|truth"]["gradients"]
    for name in ("entropy|truth", "shared pass, masked|fused", "prompts|truth"):
        assert gradient_error(results[name]["gradients"], base) > 1e-3, name


@pytest.mark.works_with("mixture of experts", "CISPO", "FP32 head")
@pytest.mark.parametrize("model", ["qwen3", "qwen3-tied", "qwen3-moe", "llama"])
def test_engine_has_the_gradient_of_a_float64_model(
    folder: Path, results: dict[str, dict[str, Any]], model: str
) -> None:
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped products have no float64
    reference = AutoModelForCausalLM.from_pretrained(folder / model, **how).double()
    rows = make_rows(VOCAB_SIZE)
    num_tokens = sum(int(mask.sum()) for mask in rows["loss_mask"])
    total, logp_rows, capped = torch.zeros((), dtype=torch.float64), [], []
    for i, prompt in enumerate(PROMPTS):
        tokens = rows["input_ids"][i]
        logits = reference(tokens[None]).logits[0] / TEMPERATURE
        logp = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        logp_rows.append(logp.detach())
        mine = logp[prompt - 1 :]
        rho = (mine.detach() - rows["old_log_probs"][i].double()).exp()
        capped += (rho > EPS_MAX).tolist()
        loss = -rho.clamp(max=EPS_MAX) * rows["advantages"][i].double() * mine
        total = total + loss[rows["loss_mask"][i]].sum() / num_tokens
    total.backward()
    assert any(capped) and not all(capped), "the batch must reach both sides of the cap"
    truth = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    for kind in ("fused", "logits"):
        found = results[f"{model}|fp32|{kind}"]
        assert float((predicted(found["logp"]).double() - torch.cat(logp_rows)).abs().max()) < LOGP_TOLERANCE
        assert gradient_error(found["gradients"], truth) < GRADIENT_TOLERANCE["fp32"]


def test_what_the_start_check_measured(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        fact = result["fact"]
        assert fact["fused"] is CASES[name].fused and fact["backend"] == CASES[name].backend
        assert fact["weight_dtype"] == {"fp32": "float32", "bf16": "bfloat16"}[CASES[name].param_dtype]
        assert 0 < fact["max_error"] < fact["tolerance"]


def test_hidden_states_arrive_in_the_model_s_dtype_and_storage_stays_untouched(
    results: dict[str, dict[str, Any]],
) -> None:
    for kind in ("fused", "logits"):
        result = results[f"qwen3-tied|bf16|{kind}"]
        assert result["seen"]["hidden"].dtype == torch.bfloat16
        assert result["storage_dtypes"] == ["torch.float32"] and result["tied"]
        assert "lm_head.weight" not in result["gradients"], "one gradient for the tied weight"
