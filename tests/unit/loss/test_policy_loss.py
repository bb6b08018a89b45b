# SPDX-License-Identifier: Apache-2.0
"""A loss is a module, a line in the names and a preset: a planted one composes under the recipe and trains."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from scalerl_verl import names
from scalerl_verl.loss import cispo
from scalerl_verl.loss.policy_loss import PolicyLoss, find_loss

PLANTED = "scalerl_planted"
CAP = "actor_rollout_ref.actor.policy_loss.eps_max"


def planted_loss(logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor, advantages_BT: torch.Tensor,
                 mask_BT: torch.Tensor) -> torch.Tensor:  # fmt: skip
    return -2 * advantages_BT * logp_train_BT


def planted_metrics(*tensors: torch.Tensor) -> dict[str, tuple[float, str]]:
    return {"scalerl/loss/planted": (3.0, "max")}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """As if `names.LOSSES` had a line more and `scalerl_verl.loss` a module more."""
    module: Any = ModuleType("scalerl_verl.loss.planted")
    module.LOSS = PolicyLoss(planted_loss, planted_metrics)
    monkeypatch.setitem(sys.modules, "scalerl_verl.loss.planted", module)
    monkeypatch.setitem(names.LOSSES, PLANTED, "planted")
    monkeypatch.setitem(names.VALUES, names.LOSS_MODE, frozenset(names.LOSSES))
    return PLANTED


def test_each_name_has_a_loss_whose_options_are_keys_of_its_section() -> None:
    from scalerl_verl.names.keys import KEYS

    for name in names.LOSSES:
        assert set(find_loss(name).options) <= set(KEYS[names.LOSS_SECTION])
    assert find_loss(names.CISPO).token_loss is cispo.cispo_token_loss


def test_planted_loss_composes_under_the_recipe(planted: str, only_config_checks: list[str]) -> None:
    from scalerl_verl.advantage.step import uses_names
    from scalerl_verl.verl import startup
    from tests.unit.composed import compose_config

    line = f"actor_rollout_ref.actor.policy_loss.loss_mode={planted}"
    startup.prepare_run(compose_config("+scalerl=recipe", line, f"~{CAP}"))
    assert uses_names(compose_config(line)), "the step takes it for a loss of ours, without the rest of the recipe, too"
    with pytest.raises(ValueError, match=rf"{CAP} is read by .*scalerl_cispo.* only, but loss_mode={planted}"):
        startup.prepare_run(compose_config("+scalerl=recipe", line))


def test_planted_loss_is_what_verl_calls(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalerl_verl.verl import algorithms
    from scalerl_verl.verl.install import register_algorithms

    registered: dict[str, Any] = {}
    core_algos: Any = SimpleNamespace(
        POLICY_LOSS_REGISTRY=registered,
        register_policy_loss=lambda name: lambda function: registered.setdefault(name, function),
        register_adv_est=lambda name: lambda function: None,
    )
    register_algorithms(core_algos)
    monkeypatch.setattr(algorithms, "require_checked_run", lambda name: None)
    config = SimpleNamespace(policy_loss={"loss_mode": planted}, global_batch_info={"batch_num_tokens": 4})
    logp_BT = torch.full((2, 2), -0.5, requires_grad=True)
    loss, metrics = registered[planted](
        torch.zeros(2, 2), logp_BT, torch.ones(2, 2), torch.ones(2, 2).bool(), "token-mean", config
    )
    assert loss.item() == 1.0
    assert "scalerl/loss/planted" in metrics and "scalerl/loss/planted" in algorithms.metric_aggregations()
