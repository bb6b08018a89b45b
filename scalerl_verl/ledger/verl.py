# SPDX-License-Identifier: Apache-2.0
"""The compute ledger in verl's V1 trainers: what is counted when, where it is kept, what is logged."""

from __future__ import annotations

import inspect
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from scalerl_verl.advantage.passing import judge, read_pass_rule
from scalerl_verl.advantage.step import AdvantageStep
from scalerl_verl.bookkeeping import bookkeeping
from scalerl_verl.errors import PatchError, RewardError
from scalerl_verl.json_lines import append_line, replace_file, split_lines
from scalerl_verl.ledger.compute import ComputeLedger, Totals, ValidationPoint
from scalerl_verl.ledger.forecast import describe_forecast, fit_validations
from scalerl_verl.ledger.live import LIVE_FILE, write_live_page
from scalerl_verl.ledger.step_log import StepLog
from scalerl_verl.ledger.validation import measure_pass_rate
from scalerl_verl.ledger.validation_prompts import ValidationPrompts
from scalerl_verl.names import ACTOR, PLATFORM_ENV, PPO_OFF_POLICY, ROLLOUT, select
from scalerl_verl.names.asking import asked_names, is_bypassed, only_validates, trainer_mode
from scalerl_verl.scaling.logs.segments import COMPUTE_FILE

STATE_FILE = "scalerl_compute.json"
LOG_FILE = COMPUTE_FILE
TERA = 1e12
FORWARD_SHARE = 1 / 3
"""Of the FLOPs of a training pass (forward and backward), which is what verl's counter estimates."""

logger = logging.getLogger(__name__)


class RunLedger:
    """A trainer's ledger with its files.

    The state lies in every checkpoint's folder (`scalerl_compute.json`), and the state at the end of every step in
    `<trainer.default_local_dir>/scalerl_compute.jsonl`, so that a run that died between checkpoints still knows what it
    had spent. Beside it `StepLog` keeps the metrics of each step.
    """

    def __init__(self, config: DictConfig, num_gpus: int) -> None:
        self.config = config
        self.counts = ComputeLedger(num_gpus)
        self.counts.tick(time.monotonic())
        self.before_validation: dict[str, float] | None = None
        self.prompts = ValidationPrompts()
        self.steps = StepLog(self.log_path.parent)
        self.only_validates = only_validates(config)  # its logs stay as they are
        self.step_metrics: dict[str, Any] = {}
        self.samples: tuple[list[str], list[str], list[float]] | None = None
        self.num_failed = 0
        self._flops: Any = None
        self._flops_known: bool | None = None

    @property
    def log_path(self) -> Path:
        """The log of all steps of all attempts."""
        return Path(self.config.trainer.default_local_dir).absolute() / LOG_FILE

    @property
    def live_path(self) -> Path:
        """The page that shows the run so far."""
        return self.log_path.with_name(LIVE_FILE)

    def restore(self, checkpoint_folder: str | None, step: int = 0) -> None:
        """Continue from the checkpoint folder of a step, or start from nothing (None)."""
        self.counts.tick(time.monotonic())
        log: list[dict[str, Any]] = []
        if not self.only_validates:
            self.steps.restore(checkpoint_folder, step)
            if self.config.trainer.resume_mode == "disable":
                with bookkeeping(LOG_FILE, "It still holds steps of an earlier run"):
                    # A new run in an old folder: its steps are not attempts at this one.
                    self.log_path.unlink(missing_ok=True)
                return
            log = read_log(self.log_path)
        state = None
        if checkpoint_folder is not None:
            path = Path(checkpoint_folder) / STATE_FILE
            if path.exists():
                state = _read_state(path)
            else:
                logger.warning(
                    "%s has no %s: it was saved without scalerl_verl. scalerl/compute/ counts from here and lacks what "
                    "these weights had cost before.",
                    checkpoint_folder,
                    STATE_FILE,
                )
                log = []
        self.counts.restore(state, log)

    @bookkeeping(STATE_FILE, "A run that resumes there counts compute from zero")
    def save(self, folder: str) -> None:
        """Write the state into a checkpoint's folder, whole or not at all."""
        self.counts.tick(time.monotonic())
        replace_file(Path(folder) / STATE_FILE, json.dumps(self.counts.state_dict()).encode())

    def keep_step(self, folder: str, step: int) -> None:
        """Keep what is known of a step in its checkpoint's folder, until `log_step` has written its row."""
        self.counts.add(steps=step)
        self.steps.keep(folder, step, {**self.step_metrics, **self.counts.metrics()})

    @bookkeeping(LOG_FILE, "The next line that can be written holds what this one would have")
    def end_step(self) -> None:
        """Append the state to the log."""
        self.counts.tick(time.monotonic())
        append_line(self.log_path, json.dumps(self.counts.state_dict()).encode())

    def estimate_flops(self, seqlens: Sequence[int]) -> float | None:
        """FLOPs of one training pass (forward and backward) over sequences of these lengths; None if unknown."""
        if self._flops_known is None:
            self._flops = find_flops_counter(self.config)
            self._flops_known = self._flops is not None
        return self._flops(list(seqlens)) if self._flops_known else None


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        Totals.from_dict(state["totals"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no count of compute ({type(error).__name__}: {error}): restore the file, or delete it to "
            "count from this checkpoint on"
        ) from error
    return state


def read_log(path: Path) -> list[dict[str, Any]]:
    """Every whole line of the log; a run that died while writing leaves a torn last one, which is dropped."""
    if not path.exists():
        return []
    lines = split_lines(path.read_text(encoding="utf-8"))
    states = []
    for number, line in enumerate(lines, 1):
        try:
            states.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not JSON ({error}); restore or delete the file") from error
            # Rewritten, or the next line would be appended to the torn one.
            replace_file(path, "".join(f"{json.dumps(state)}\n" for state in states).encode())
    return states


def find_flops_counter(config: DictConfig) -> Any:
    """`seqlens -> FLOPs` by verl's counter, or None if it does not know the architecture.

    verl's FlopsCounter also asks the device for its peak, which the trainer process need not have; so its table of
    estimates is used directly.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.flops_counter import ESTIMATE_FUNC

    hf_config = omega_conf_to_dataclass(config.actor_rollout_ref.model).hf_config
    estimate = ESTIMATE_FUNC.get(hf_config.model_type)
    if estimate is None:
        logger.warning("verl counts no FLOPs for %s: scalerl/compute/model_flops is left out", hf_config.model_type)
        return None
    takes_more = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(estimate).parameters.values())
    extra: dict[str, Any] = {"images_seqlens": None} if takes_more else {}
    return lambda seqlens: TERA * float(estimate(hf_config, sum(seqlens), seqlens, 1.0, **extra))


def start_ledger(config: Any) -> RunLedger | None:
    """The ledger of a run, its clock started.

    None in a run that uses none of our names: the CPU platform alone is none.
    """
    return RunLedger(config, count_gpus(config)) if set(asked_names(config)) - {PLATFORM_ENV} else None


def count_gpus(config: DictConfig) -> int:
    """GPUs of trainer, generators, reward and teacher models: everything the run holds."""
    pools = [config.trainer]
    rollout = select(config, ROLLOUT)
    # Generators of their own: verl's separate_async and pipeline_rl; the others generate on the devices that train.
    if trainer_mode(config) not in ("sync", "colocate_async", PPO_OFF_POLICY) and int(select(rollout, "nnodes", 0)) > 0:
        pools.append(rollout)
    if select(config, "reward.reward_model.enable_resource_pool", False):
        pools.append(config.reward.reward_model)
    if select(config, "distillation.enabled", False):
        pools.append(config.distillation)
    return sum(int(pool.nnodes) * int(pool.n_gpus_per_node) for pool in pools)


def count_batch(ledger: RunLedger | None, trainer: Any, batch: Any, step: AdvantageStep) -> None:
    """Count a sampled batch: its tokens, and the passes that generated and scored it."""
    if ledger is None or step.num_tokens_B is None:
        return
    passes = 1  # generation reads and writes every token once
    passes += (not is_bypassed(ledger.config)) + bool(getattr(trainer, "use_reference_policy", False))
    flops = ledger.estimate_flops(read_seqlens(batch))
    ledger.counts.add(
        generated_tokens=int(step.num_tokens_B.sum()),
        model_flops=None if flops is None else FORWARD_SHARE * passes * flops,
        steps=int(trainer.global_steps),
    )


def count_update(ledger: RunLedger | None, batch: Any, step: AdvantageStep | None) -> None:
    """Count an optimizer update over a batch."""
    if ledger is None or step is None or step.num_tokens_B is None:
        return
    kept_B = np.ones(len(step.num_tokens_B), dtype=bool) if step.kept_B is None else step.kept_B
    epochs = int(select(ledger.config, f"{ACTOR}.ppo_epochs", 1))
    flops = ledger.estimate_flops(read_seqlens(batch))
    ledger.counts.add(
        trained_tokens=epochs * int(step.num_tokens_B[kept_B].sum()),
        model_flops=None if flops is None else epochs * flops,
    )


def read_seqlens(batch: Any) -> list[int]:
    """Lengths of prompt + response of the rows that are no padding."""
    return [int(tag["seq_len"]) for tag in batch.tags if not tag.get("is_padding", False)]


def begin_validation(ledger: RunLedger, global_steps: int) -> None:
    """What the weights to be validated have cost: before the validation itself adds to it."""
    ledger.counts.tick(time.monotonic())
    ledger.counts.add(steps=global_steps)
    ledger.before_validation = ledger.counts.metrics()
    ledger.samples = None


def note_samples(
    ledger: RunLedger,
    data_sources: Sequence[str],
    uids: Sequence[str],
    extra: dict[str, list[Any]],
    expected: Mapping[tuple[str, str], int] | None = None,
) -> None:
    """Keep source, prompt and pass of every generation of the validation.

    Args:
        ledger: gets them.
        data_sources: of each generation that there is.
        uids: verl's id of its prompt.
        extra: verl's lists by key.
        expected: (source, uid) -> generations that were asked for. One that failed did not pass, as verl counts it:
            else weights under which the hardest prompts fail would look better.

    Raises:
        RewardError: as `judge`, or the reward function's results hold what verl calls its own.
    """
    if len(extra["reward"]) != len(uids):
        raise RewardError(
            "the reward function returns a key 'reward', under which verl's validation collects the rewards "
            "themselves: it would take one for the other; return it under another name (the reward itself is 'score')"
        )
    infos = _rows_of(extra, len(uids), read_pass_rule(ledger.config).keys)
    passes = judge(ledger.config, extra["reward"], infos).astype(float).tolist()
    sampled = [(str(source), str(uid)) for source, uid in zip(data_sources, uids, strict=True)]
    failed = list((Counter(expected or {}) - Counter(sampled)).elements())
    ledger.num_failed = len(failed)
    sources, all_uids = zip(*sampled, *failed, strict=True) if sampled or failed else ((), ())
    ledger.samples = list(sources), ledger.prompts.of(all_uids), passes + [0.0] * len(failed)


def _rows_of(extra: dict[str, list[Any]], size: int, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Some of verl's lists by key, which it fills up with None, as a dict a row."""
    lists = {key: extra[key] for key in keys if key in extra}
    for key, values in lists.items():
        if len(values) != size:
            raise PatchError(
                f"a validation has {size} responses and {len(values)} values of {key}: verl's validation is not one "
                "that is known here. Install a version that 'scalerl doctor' lists"
            )
    return [{key: values[row] for key, values in lists.items()} for row in range(size)]


def end_validation(ledger: RunLedger, total_steps: int) -> dict[str, float]:
    """Metrics of the validation: compute, pass rate with standard error and counts, forecast."""
    metrics = dict(ledger.before_validation or {})
    if ledger.samples is None:
        return metrics
    sources, prompts, passes = ledger.samples
    measured = measure_pass_rate(prompts, passes)
    metrics.update(_describe("scalerl/validation", measured))
    metrics["scalerl/validation/num_failed"] = float(ledger.num_failed)
    if len(set(sources)) > 1:
        for source in sorted(set(sources)):
            rows = [i for i, value in enumerate(sources) if value == source]
            part = measure_pass_rate([prompts[i] for i in rows], [passes[i] for i in rows])
            metrics.update(_describe(f"scalerl/validation/{source}", part))
    point = ValidationPoint(
        ledger.counts.totals, measured.pass_rate, measured.stderr, measured.num_prompts, measured.num_generations
    )
    ledger.counts.note_validation(point)
    ledger.samples = None
    points = ledger.counts.points
    fit = fit_validations(points)
    if not ledger.only_validates:
        write_live_page(ledger.live_path, _name_run(ledger.config), points, fit, total_steps)
    return metrics | describe_forecast(points, total_steps, fit)


def _name_run(config: DictConfig) -> str:
    names = [select(config, f"trainer.{key}") for key in ("project_name", "experiment_name")]
    return " / ".join(str(name) for name in names if name) or "run"


def _describe(prefix: str, measured: Any) -> dict[str, float]:
    names = ("pass_rate", "stderr", "num_prompts", "num_generations")
    return {f"{prefix}/{name}": float(getattr(measured, name)) for name in names}


def log_step(ledger: RunLedger, metrics: dict[str, Any], global_steps: int) -> None:
    """Add the ledger to a step's metrics, and write both logs.

    In a step with a validation the metrics hold the compute that the validated weights had cost; it stays.
    """
    ledger.counts.add(steps=global_steps)
    ledger.end_step()
    if ledger.before_validation is None:
        metrics.update(ledger.counts.metrics())
    ledger.before_validation = None
    ledger.steps.write(global_steps, metrics)


def resumed_folder(trainer: Any) -> str | None:
    """Folder of the checkpoint that verl has just loaded; None if it started from nothing."""
    if trainer.global_steps == 0:
        return None
    trainer_config = trainer.config.trainer
    if trainer_config.resume_mode == "resume_path":
        return os.path.abspath(trainer_config.resume_from_path)
    return os.path.join(os.path.abspath(trainer_config.default_local_dir), f"global_step_{trainer.global_steps}")
