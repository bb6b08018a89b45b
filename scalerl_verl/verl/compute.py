# SPDX-License-Identifier: Apache-2.0
"""Count a run's compute in the trainer, keep the count with its checkpoints, log it with its steps.

Methods that are wrapped for this serve the lengths of responses, too: a symbol is wrapped once.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from scalerl_verl.upstream.spec import VERL_VERSIONS, PatchSpec

_MODULE = "verl.trainer.ppo.v1.trainer_base"
_VERSIONS = VERL_VERSIONS
_REMOVAL = "verl has trainer callbacks for start, step end, validation end and checkpoint load and save"


def _build_start(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from scalerl_verl.ledger.verl import start_ledger

        original(self, *args, **kwargs)
        start_ledger(self)  # starts the clock: what follows takes the GPUs

    return __init__


def _build_load(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _load_checkpoint(self: Any) -> Any:
        from scalerl_verl.advantage.length_step import restore_alarm
        from scalerl_verl.ledger.verl import resumed_folder, start_ledger
        from scalerl_verl.pipeline.mode_change import hand_over_queue

        result = original(self)
        ledger = start_ledger(self)
        if ledger is not None:
            folder = resumed_folder(self)
            ledger.restore(folder, self.global_steps)
            restore_alarm(self, folder)
            hand_over_queue(self, folder)
            ledger.prompts.mark(self.val_dataset, self.config.data)
        return result

    return _load_checkpoint


def _build_step(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def step(self: Any, metrics: dict, timing_raw: dict) -> Any:
        from scalerl_verl.ledger.verl import find_ledger

        result = original(self, metrics, timing_raw)
        ledger = find_ledger(self)
        if ledger is not None:
            ledger.step_metrics = metrics
        return result

    return step


def _build_save(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _save_checkpoint(self: Any) -> Any:
        from scalerl_verl.advantage.length_step import save_alarm
        from scalerl_verl.ledger.verl import find_ledger

        ledger = find_ledger(self)
        if ledger is None:
            return original(self)
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        # Before: a checkpoint that verl has marked as the latest is never without it. After: with the time of saving.
        ledger.keep_step(folder, self.global_steps)
        ledger.save(folder)
        save_alarm(self, folder)
        result = original(self)
        ledger.save(folder)
        return result

    return _save_checkpoint


def _build_validate(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _validate(self: Any) -> Any:
        from scalerl_verl.advantage.length_step import watch_validation
        from scalerl_verl.ledger.verl import begin_validation, end_validation, find_ledger

        ledger = find_ledger(self)
        if ledger is None:
            return original(self)
        begin_validation(ledger, self.global_steps)
        with ledger.prompts.watch(self), watch_validation(self) as lengths:
            metrics = original(self)
            if lengths is not None:
                metrics.update(lengths.metrics(ledger.prompts.of))
        metrics.update(end_validation(ledger, self.total_training_steps))
        if self.global_steps == 0 or not hasattr(self, "timing_raw"):
            ledger.before_validation = None  # no step to log: this is the validation before training
            if not ledger.only_validates:
                ledger.steps.write(self.global_steps, metrics)
        return metrics

    return _validate


def _build_samples(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _val_metrics_update(
        self: Any, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from scalerl_verl.advantage.length_step import note_validation_rewards
        from scalerl_verl.ledger.verl import find_ledger, note_samples

        ledger = find_ledger(self)
        if ledger is not None:
            # verl passes it by name; a validation of another kind may have none.
            expected = kwargs.get("expected_acc_counts")
            note_samples(ledger, data_sources, sample_uids, reward_extra_infos_dict, expected)
            note_validation_rewards(self, reward_extra_infos_dict["reward"])
        return original(self, data_sources, sample_uids, reward_extra_infos_dict, *args, **kwargs)

    return _val_metrics_update


def _build_metrics(original: Any, module: ModuleType) -> Any:
    @functools.wraps(original)
    def _compute_metrics(self: Any, batch: Any, metrics: Any, timing_raw: Any, global_steps: Any, epoch: Any) -> Any:
        from scalerl_verl.ledger.verl import find_ledger, log_step

        result = original(self, batch, metrics, timing_raw, global_steps, epoch)
        ledger = find_ledger(self)
        if ledger is not None:
            log_step(ledger, metrics, global_steps)
        return result

    return _compute_metrics


def _spec(name: str, target: str, build: Any, why: str, source: str) -> PatchSpec:
    return PatchSpec(
        name=f"verl.compute.{name}",
        module=_MODULE,
        target=f"PPOTrainer.{target}",
        build=build,
        kind="wrap",
        why=why,
        distribution="verl",
        versions=_VERSIONS,
        sources=(source,),
        when="named",
        removal=_REMOVAL,
        late_ok=True,
    )


SPECS = (
    _spec(
        "start",
        "__init__",
        _build_start,
        "GPU-hours begin when the GPUs are taken, minutes before the first step.",
        "697bf2eef7503bdb6bcf25d049799694fd76a0cb50767bc5a845f34d1bffd567",
    ),
    _spec(
        "load",
        "_load_checkpoint",
        _build_load,
        "The compute spent so far and the truncation alarm's window have to continue from the checkpoint; verl has no "
        "hook on load.",
        "5dc5c3d77c2619e07b9170062a1a087deed0ca42dc7f69c8806d8e427a56b5d9",
    ),
    _spec(
        "save",
        "_save_checkpoint",
        _build_save,
        "Count and alarm window must be in the folder before verl marks the checkpoint as the latest; its on_save "
        "callback comes after that, and is the user's.",
        "8b4e2c0174d5cc8f831d980f333fc08584686cb2e6074c8d465c183d54a61d45",
    ),
    _spec(
        "step",
        "step",
        _build_step,
        "verl logs a step after it has marked its checkpoint as the latest: what is known of the step has to be in the "
        "checkpoint, or a run that is killed in between never logged it.",
        "aa97fcc468f1bdae22f4e7ab2b2cbe47f1a93426b3791506b12bcce1990b761a",
    ),
    _spec(
        "validate",
        "_validate",
        _build_validate,
        "A validation, also the one before training, has to be logged with the compute that its weights had cost, and "
        "with the lengths of its responses, whose records verl deletes.",
        "103901797711b404b45a4274db77eab3162923134af7fdcee98856df66a06d5b",
    ),
    _spec(
        "samples",
        "_val_metrics_update",
        _build_samples,
        "The standard error of a pass rate needs the single generations, which verl reduces to means.",
        "b8ed6e0f320a33b5fbad78fd92e25de1e01d12b863b7a363928c1ef90c5b77e2",
    ),
    _spec(
        "log",
        "_compute_metrics",
        _build_metrics,
        "verl has no plugin hook on the metrics of a step; trackers get what is in them.",
        "c675fb5f13d31a3bb2a81c8c89ad7de99f643daddfb957374e292c8f163a2024",
    ),
)
