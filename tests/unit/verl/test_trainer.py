# SPDX-License-Identifier: Apache-2.0
"""What our trainer does before and after verl's start: each piece is called, and at its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalerl_verl.advantage import length_step
from scalerl_verl.advantage.step import AdvantageStep
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.generator import frontend
from scalerl_verl.ledger import verl as ledgers
from scalerl_verl.verl import trainer
from scalerl_verl.verl.run_state import RunState
from tests.steps import in_front_of
from tests.unit.composed import ACTOR, changed


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


class Steps(OfVerl):
    """Methods of a step, which say what they saw."""

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        self.calls.append(self.config.actor_rollout_ref.actor.loss_agg_mode)
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        self.calls.append("advantages")
        return batch


@pytest.mark.parametrize(("preset", "mode"), [("prompt_mean", "token-mean"), ("cispo", "seq-mean-token-sum-norm")])
def test_entropy_of_a_batch_is_averaged_by_a_mode_of_verl_s(
    preset: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's trainer aggregates the metric itself, and knows no prompt-mean."""
    monkeypatch.setattr(trainer, "probe_first_batch", lambda *args: None)
    changes = {} if preset == "prompt_mean" else {f"{ACTOR}.loss_agg_mode": mode}
    made = in_front_of(Steps)(changed(preset, changes))
    typed = made.config.actor_rollout_ref.actor.loss_agg_mode
    made._compute_old_log_prob("batch", {})
    assert made.calls == [mode] and made.config.actor_rollout_ref.actor.loss_agg_mode == typed


def test_pipeline_checks_the_ages_of_the_rows_that_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and counts are those of the advantages: no second look at all masks of the batch."""
    batch: Any = SimpleNamespace(tags=[{}, {"is_padding": True}, {}])
    step = AdvantageStep("token-mean", {}, batch=batch, num_tokens_B=np.array([3, 1, 5]))
    step._extra_fields = [{"of": "a"}, {"of": "a"}, {"of": "b"}]
    made: Any = object.__new__(trainer.ScaleRLPipeline)
    made.scalerl = SimpleNamespace(step=step)
    monkeypatch.setattr(trainer.ScaleRLTrainer, "_compute_advantage", lambda self, batch, metrics: batch)
    made.measure = lambda extras, counts: {"ages": list(zip([extra["of"] for extra in extras], counts, strict=True))}
    metrics: dict[str, Any] = {}
    assert made._compute_advantage(batch, metrics) is batch
    assert metrics == {"ages": [("a", 3), ("b", 5)]}


@pytest.mark.parametrize("with_kl", [True, False])
@pytest.mark.parametrize("weights", [None, "weights"])
def test_terms_beside_the_loss_get_its_row_weights(
    with_kl: bool, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = SimpleNamespace(weights_B=weights, result=None, count_outcomes=lambda: made.calls.append("outcomes"))

    @contextlib.contextmanager
    def steps(config: Any, metrics: dict) -> Iterator[Any]:
        yield step

    monkeypatch.setattr(trainer, "advantage_step", steps)
    monkeypatch.setattr(trainer, "find_sampler", lambda given: None)
    monkeypatch.setattr(length_step, "watches_lengths", lambda config: False)
    monkeypatch.setattr(trainer, "write_weights", lambda batch, weights_B: (batch, weights_B))
    made = in_front_of(Steps)(changed("prompt_mean", {f"{ACTOR}.use_kl_loss": with_kl}))
    written = made._compute_advantage("batch", {})
    assert written == (("batch", "weights") if with_kl and weights else "batch")
    assert made.calls == ["advantages", "outcomes"] and made.scalerl.step is step
