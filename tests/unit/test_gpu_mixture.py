# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests of a mixture of experts launch composes and fits; their replay of routing is checked here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scalerl_verl.cli import main
from scalerl_verl.config import model_checks
from scalerl_verl.config.checks import find_problems
from tests.e2e.launching import make_assets, tiny_overrides
from tests.e2e.weights import compare_updates
from tests.gpu.mixture import compare, make_mixture, pipeline_lines, recipe_lines
from tests.unit.composed import compose_config

RUNS = {
    "recipe": lambda assets, model: recipe_lines(assets, model, recorded=False),
    "recorded": lambda assets, model: recipe_lines(assets, model, recorded=True),
    "pipeline": pipeline_lines,
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("name", RUNS)
def test_launches_of_the_gpu_tests_are_accepted_and_fit(
    assets: Path, mixture: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*tiny_overrides(assets, tmp_path), *RUNS[name](assets, mixture)]
    config = compose_config(*lines)
    assert find_problems(config) == [] and list(model_checks.find_model_problems(config)) == []
    assert main(["plan", *lines, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.fixture(scope="module")
def rows(mixture: Path) -> dict[str, list[torch.Tensor]]:
    """Two responses as an engine would return them that chooses experts by chance."""
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "routed_experts")
    }
    for num_prompt, num_response in ((3, 5), (4, 9)):
        tokens = torch.randint(7, 90, (num_prompt + num_response,), generator=generator)
        draws = torch.rand(len(tokens), len(model.model.layers), 16, generator=generator)
        experts = draws.topk(4).indices
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = make_router(layer.mlp.gate, experts[:, number])
        with torch.no_grad():
            logp = model(tokens[None]).logits[0].log_softmax(-1)
        places = torch.arange(num_prompt - 1, len(tokens) - 1)
        found["prompts"].append(tokens[:num_prompt])
        found["responses"].append(tokens[num_prompt:])
        found["response_mask"].append(torch.ones(num_response, dtype=torch.int64))
        found["rollout_log_probs"].append(logp[places, tokens[num_prompt:]])
        # verl has a row for the last token, too, which nobody routed.
        found["routed_experts"].append(torch.cat([experts[:-1], torch.zeros_like(experts[-1:])]).to(torch.int16))
    return found


def make_router(gate: torch.nn.Module, experts_TK: torch.Tensor):
    def forward(hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_TE = hidden_TH @ gate.weight.T
        chosen_TK = torch.stack([row[index] for row, index in zip(logits_TE.exp(), experts_TK, strict=True)])
        return logits_TE, chosen_TK / chosen_TK.sum(-1, keepdim=True), experts_TK

    return forward


def test_replayed_routing_gives_the_log_probs_of_the_engine(mixture: Path, rows: dict[str, list[torch.Tensor]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    replayed, own = (compare(model, rows, replay=replay) for replay in (True, False))
    # FP32 over four layers: a few roundings of 2^-24 of logits of 10 or so.
    assert replayed.largest < 1e-4
    assert own.mean > 0.1 and own.rerouted > 0.9, "4 of 16 experts drawn by chance are hardly ever the router's"
    assert compare(model, rows, replay=False) == own, "a replay leaves nothing behind"


@pytest.mark.parametrize("prefix", ["", "routed_experts."])
def test_experts_of_the_engine_are_compared_one_by_one(mixture: Path, tmp_path: Path, prefix: str) -> None:
    """vLLM stacks experts, under one of two names; a swapped pair of them must be seen."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.save(dict(unfuse_moe_params(weights.items(), "qwen3_moe")), tmp_path / "sent-0.pt")
    held = {
        f"model.layers.{number}.mlp.experts.{prefix}{name}": getattr(layer.mlp.experts, ours).detach().bfloat16()
        for number, layer in enumerate(model.model.layers)
        for name, ours in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj"))
    }
    torch.save(held, tmp_path / "held-0.pt")
    assert compare_updates(tmp_path) == 1
    name = f"model.layers.3.mlp.experts.{prefix}w2_weight"
    torch.save({**held, name: held[name].roll(1, 0)}, tmp_path / "held-0.pt")
    with pytest.raises(AssertionError, match=r"layers\.3"):
        compare_updates(tmp_path)
