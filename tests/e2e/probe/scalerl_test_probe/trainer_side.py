# SPDX-License-Identifier: Apache-2.0
"""Trainer loop (driver of the step): trains one recorded batch again under other settings, notes prompts, waits."""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from scalerl_verl.upstream.import_hooks import after_import


def _folder() -> Path:
    return Path(os.environ["PROBE_DIR"])


@contextmanager
def _changed(trainer: Any, changes: dict[str, Any]) -> Iterator[None]:
    """The trainer with the config keys of a toggle; a value of None takes the key away."""
    from omegaconf import OmegaConf, open_dict

    before, loader = trainer.config, trainer.train_dataloader
    trainer.config = OmegaConf.create(OmegaConf.to_container(before, resolve=False))
    with open_dict(trainer.config):
        for path, value in changes.items():
            if value is not None:
                OmegaConf.update(trainer.config, path, value, force_add=True)
                continue
            section, _, key = path.rpartition(".")
            OmegaConf.select(trainer.config, section).pop(key)
    OmegaConf.resolve(trainer.config)
    if "data.sampler" in changes:
        # A run without it draws from the sampler that ours wraps.
        trainer.train_dataloader = SimpleNamespace(sampler=loader.sampler.base)
    try:
        yield
    finally:
        trainer.config, trainer.train_dataloader = before, loader


def _set_loss(trainer: Any) -> None:
    """Hand the workers the loss of the current config, as they make it themselves at the start of a run."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    actor = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
    trainer.actor_rollout_wg.set_loss_fn(functools.partial(ppo_loss, config=actor))


def _replay(trainer: Any, batch: Any) -> None:
    """Train ``batch``, which was just trained, once more from the same weights for each toggle of PROBE_TOGGLES."""
    toggles = json.loads(Path(os.environ["PROBE_TOGGLES"]).read_text())
    history = getattr(getattr(trainer.train_dataloader, "sampler", None), "history", None)
    visits = history.state_dict() if history is not None else None
    start, gradients = str(_folder() / "replay"), _folder() / "gradient.pt"
    trainer.actor_rollout_wg.save_checkpoint(start, None, trainer.global_steps)
    # What is trained here again is the test's doing, not the run's: its compute is not counted.
    ledger, trainer.scalerl.ledger = trainer.scalerl.ledger, None
    found = {}
    for name, changes in {**toggles, "the run's own": {}}.items():
        trainer.actor_rollout_wg.load_checkpoint(local_path=start)
        metrics: dict[str, Any] = {}
        gradients.unlink(missing_ok=True)
        with _changed(trainer, changes):
            _set_loss(trainer)
            # The last one leaves its advantages in the batch, where the rest of the step expects them.
            trainer._update_actor(trainer._compute_advantage(batch, metrics), metrics)
        if gradients.exists():
            gradients.rename(_folder() / f"gradient of {name}.pt")
        found[name] = {key: float(value) for key, value in metrics.items()}
    trainer.actor_rollout_wg.load_checkpoint(local_path=start)
    if visits is not None:
        history.load_state_dict(visits)
    trainer.scalerl.ledger = ledger
    (_folder() / "replay.json").write_text(json.dumps(found))


def _install_replay(module: ModuleType) -> None:
    update_actor = module.ScaleRLTrainer._update_actor

    @functools.wraps(update_actor)
    def _update_actor(self: Any, batch: Any, metrics: dict) -> Any:
        batch = update_actor(self, batch, metrics)
        if self.global_steps == 1 and not getattr(self, "_replaying", False):
            self._replaying = True
            _replay(self, batch)
        return batch

    module.ScaleRLTrainer._update_actor = _update_actor


def _note(**entry: Any) -> None:
    with (_folder() / "prompts.jsonl").open("a") as stream:
        stream.write(json.dumps(entry) + "\n")


def _install_prompt_log(module: ModuleType) -> None:
    submit, train = module.PPOTrainer._submit_batch_to_rollout, module.PPOTrainer._step_once

    @functools.wraps(submit)
    def _submit_batch_to_rollout(self: Any, batch: Any) -> Any:
        for uid, info in zip(batch["uid"], batch["extra_info"], strict=True):
            row = getattr(info, "data", info)["index"]
            _note(event="handed out", step=self.global_steps, uid=str(getattr(uid, "data", uid)), row=int(row))
        return submit(self, batch)

    # Not _update_actor: a batch without any signal never gets there.
    @functools.wraps(train)
    def _step_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = train(self, *args, **kwargs)
        uids = {key.split("_")[0] for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")}
        for uid in sorted(uids):
            _note(event="trained", step=self.global_steps, uid=uid)
        return batch

    module.PPOTrainer._submit_batch_to_rollout = _submit_batch_to_rollout
    module.PPOTrainer._step_once = _step_once


def _install_routing(module: ModuleType) -> None:
    """Rows of a mixture's step: verl keeps the experts of each token beside them, if it is asked to record them."""
    compute = module.ScaleRLTrainer._compute_old_log_prob

    @functools.wraps(compute)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: dict) -> Any:
        import torch
        import transfer_queue as tq

        fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "routed_experts"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = {name: list(data[name].unbind()) for name in fields}
        torch.save(rows, _folder() / f"routing-{self.global_steps}.pt")
        return compute(self, batch, metrics)

    module.ScaleRLTrainer._compute_old_log_prob = _compute_old_log_prob


def _install_gate(module: ModuleType) -> None:
    submit, save = module.PPOTrainer._submit_batch_to_rollout, module.PPOTrainer._save_checkpoint
    gated_step = int(os.environ["PROBE_GATE_STEP"])

    @functools.wraps(submit)
    def _submit_batch_to_rollout(self: Any, batch: Any) -> Any:
        if self.global_steps == gated_step:
            rows = [int(getattr(info, "data", info)["index"]) for info in batch["extra_info"]]
            scratch = _folder() / "gate.tmp"
            scratch.write_text(json.dumps(rows))
            scratch.rename(_folder() / "gate.json")
        return submit(self, batch)

    @functools.wraps(save)
    def _save_checkpoint(self: Any) -> Any:
        result = save(self)
        (_folder() / "gate.json").unlink(missing_ok=True)
        return result

    module.PPOTrainer._submit_batch_to_rollout = _submit_batch_to_rollout
    module.PPOTrainer._save_checkpoint = _save_checkpoint


def _install_hold(module: ModuleType) -> None:
    step = module.PPOTrainer.step

    @functools.wraps(step)
    def held_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.global_steps == int(os.environ["PROBE_HOLD_STEP"]):
            (_folder() / "held").touch()
            while True:
                time.sleep(1)
        return step(self, *args, **kwargs)

    module.PPOTrainer.step = held_step


def _install_uids(module: ModuleType) -> None:
    numbers = itertools.count()
    module.uuid = SimpleNamespace(uuid4=lambda: uuid.UUID(int=next(numbers)))


def _install_order(module: ModuleType) -> None:
    """Groups and their rows are trained in the order of their ids, not in that in which they were complete."""
    select, materialize = module.ReplayBuffer._select_prompt_uids, module.ReplayBuffer._materialize_batch

    @functools.wraps(select)
    def _select_prompt_uids(self: Any, partition_id: str, uids: set[str], batch_size: int) -> Any:
        return select(self, partition_id, sorted(uids), batch_size)

    @functools.wraps(materialize)
    def _materialize_batch(self: Any, partition_id: str, uids: list[str], rows: dict[str, dict]) -> Any:
        return materialize(self, partition_id, uids, dict(sorted(rows.items())))

    module.ReplayBuffer._select_prompt_uids = _select_prompt_uids
    module.ReplayBuffer._materialize_batch = _materialize_batch


if os.environ.get("PROBE_TOGGLES"):
    after_import("scalerl_verl.verl.trainer", _install_replay)
if os.environ.get("PROBE_ROUTING"):
    after_import("scalerl_verl.verl.trainer", _install_routing)
if os.environ.get("PROBE_SEED"):
    after_import("verl.trainer.ppo.v1.replay_buffer", _install_order)
for _variable, _install in {
    "PROBE_PROMPTS": _install_prompt_log,
    "PROBE_GATE_STEP": _install_gate,
    "PROBE_HOLD_STEP": _install_hold,
    "PROBE_SEED": _install_uids,
}.items():
    if os.environ.get(_variable):
        after_import("verl.trainer.ppo.v1.trainer_base", _install)
