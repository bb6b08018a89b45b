# SPDX-License-Identifier: Apache-2.0
"""What our trainer does before and after verl's start: each piece is called, and at its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from scalerl_verl.advantage import length_step
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.generator import frontend
from scalerl_verl.ledger import verl as ledgers
from scalerl_verl.verl import trainer
from scalerl_verl.verl.run_state import RunState
from tests.steps import in_front_of
from tests.unit.composed import changed


class OfVerl:
    """In place of verl's trainer."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.calls: list[str] = []

    def init(self) -> None:
        self.calls.append("init")

    def _init_dataloader(self) -> None:
        self.train_dataloader = "verl's"

    def _load_checkpoint(self) -> str:
        self.global_steps = 7
        return "loaded"


def test_cluster_is_compared_before_verl_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Starting(OfVerl):
        def __init__(self, config: Any) -> None:
            started.append("verl")

    def differ() -> None:
        raise ScaleRLConfigError(["another version on a node"])

    monkeypatch.setattr(trainer, "check_nodes", differ)
    made: Any = type("Trainer", (trainer.ScaleRLTrainer, Starting), {})
    with pytest.raises(ScaleRLConfigError, match="another version"):
        made(changed("recipe", {}))
    assert started == []


def test_servers_are_looked_at_once_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = in_front_of(OfVerl)(changed("fast_frontend", {}))
    monkeypatch.setattr(frontend, "check_replicas", lambda given: given.calls.append("servers"))
    monkeypatch.setattr(trainer, "probe_sides", lambda given: given.calls.append("heads") or 3)
    made.init()
    assert made.calls == ["init", "servers", "heads"] and made.scalerl.first_version == 3


def test_training_data_are_drawn_by_the_sampler_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "with_sampler", lambda loader, data: (loader, data))
    monkeypatch.setattr(trainer, "warn_of_few_problems", lambda given: None)
    made = in_front_of(OfVerl)(changed("curriculum", {}))
    made._init_dataloader()
    assert made.train_dataloader == ("verl's", made.config.data)


def test_resumed_run_goes_on_with_the_checkpoint_s_ledger_and_window(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    made = in_front_of(OfVerl)(changed("recipe", {}))
    made.val_dataset = "questions"
    ledger: Any = SimpleNamespace(
        restore=lambda folder, step: seen.append(("ledger", (folder, step))),
        prompts=SimpleNamespace(mark=lambda dataset, data: seen.append(("prompts", dataset))),
    )
    made.scalerl = RunState(length_step.make_alarm(made.config), ledger)
    monkeypatch.setattr(ledgers, "resumed_folder", lambda given: "saved")
    monkeypatch.setattr(length_step, "restore_alarm", lambda alarm, config, folder: seen.append(("window", folder)))
    monkeypatch.setattr(trainer, "hand_over_queue", lambda given, folder: seen.append(("queue", folder)))
    assert made._load_checkpoint() == "loaded"
    assert seen == [("ledger", ("saved", 7)), ("window", "saved"), ("queue", "saved"), ("prompts", "questions")]
