# SPDX-License-Identifier: Apache-2.0
"""A run of verl for a benchmark: started, watched step by step, ended with all its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from benchmarks.rows import REPO
from recipes.launch.command import CPU_ENVIRONMENT
from recipes.launch.processes import RUN_ID_ENV, end_processes, run_marks

MAIN_PPO = "verl.trainer.main_ppo"
TRAINED = "training/global_step"
"""A metric of every step: verl's fully_async_policy writes other lines beside the steps' own."""
ON_GPU = (
    "+ray_kwargs.ray_init.include_dashboard=False",
    "data.dataloader_num_workers=0",
    "reward.num_workers=2",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
    "actor_rollout_ref.model.use_remove_padding=True",
    "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config={mode:0,cudagraph_mode:FULL_DECODE_ONLY}",
)
"""Of every run on GPUs: FSDP2 with flash-attn and packed sequences, engines of one device with CUDA graphs."""
ONLY_STEPS = (
    "trainer.project_name=bench",
    "trainer.logger=[console,file]",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "trainer.total_epochs=1",
)
"""No validation, no checkpoint: what is measured is steps."""


@dataclass(frozen=True)
class Step:
    """A step, the moments it began and ended, and verl's metrics of it."""

    number: int
    began: float
    ended: float
    metrics: dict[str, float]


def environment(folder: Path, run_id: str, gpus: Sequence[int], python_path: Sequence[Path] = ()) -> dict[str, str]:
    """Of the run's processes, all of which inherit it; without ``gpus`` the run is on the CPU."""
    extra = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else CPU_ENVIRONMENT
    places = [*map(str, python_path), str(REPO), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "HYDRA_FULL_ERROR": "1",
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": f"/tmp/lane{run_id[:6]}",  # Ray's socket paths have to be short
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        **run_marks(run_id),
        **extra,
    }


def run_verl(
    overrides: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    num_steps: int,
    seconds: float,
    gate: str = "",
    entry: str = MAIN_PPO,
) -> int | None:
    """Run to the last step, or for ``seconds``; the exit code, or None if it was ended.

    ``steps.jsonl`` in ``folder`` notes, as it goes, when the metrics of each step were written.

    Args:
        overrides: the command line.
        env: `environment` and what the benchmark adds.
        folder: of the run's files.
        num_steps: after which the run is ended, too.
        seconds: from the start.
        gate: a file for which the run waits before its first request: seconds count from there.
        entry: module with the entry point.
    """
    Path(env["RAY_TMPDIR"]).mkdir(exist_ok=True)
    command = [sys.executable, "-m", entry, *overrides]
    started, seen = time.time(), 0
    with (
        (folder / "log.txt").open("w", encoding="utf-8") as log,
        (folder / "steps.jsonl").open("w", encoding="utf-8") as steps,
    ):
        steps.write(json.dumps({"step": 0, "t": started}) + "\n")
        process = subprocess.Popen(command, env=dict(env), stdout=log, stderr=log, start_new_session=True)
        waiting = bool(gate)
        try:
            while (code := process.poll()) is None and seen < num_steps:
                if waiting and Path(gate).exists():
                    waiting, started = False, time.time()
                if not waiting and time.time() - started > seconds:
                    break
                seen = _note_steps(folder, steps, seen)
                time.sleep(0.05)
            return 0 if seen == num_steps else code
        finally:
            end_processes(env[RUN_ID_ENV])


def new_run_id() -> str:
    """By which the processes of a run are found."""
    return uuid.uuid4().hex


def log_tail(folder: Path) -> str:
    """The last lines of the run's log."""
    return "\n".join((folder / "log.txt").read_text(errors="replace", encoding="utf-8").splitlines()[-60:])


def read_steps(folder: Path) -> list[Step]:
    """All steps whose metrics were written; the end of one is the beginning of the next."""
    times = {entry["step"]: entry["t"] for entry in map(json.loads, whole_lines(folder / "steps.jsonl"))}
    metrics = {entry["step"]: entry["data"] for entry in _trained(folder)}
    return [
        Step(number, times[number - 1], times[number], metrics[number])
        for number in sorted(times)
        if number in metrics and number - 1 in times
    ]


def whole_lines(path: Path) -> list[str]:
    """Without the last one, if it was cut."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _trained(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics that steps wrote."""
    entries = map(json.loads, whole_lines(folder / "metrics.jsonl"))
    return [entry for entry in entries if TRAINED in entry["data"]]


def _note_steps(folder: Path, steps: TextIO, seen: int) -> int:
    num = len(_trained(folder))
    for step in range(seen + 1, num + 1):
        steps.write(json.dumps({"step": step, "t": time.time()}) + "\n")
        steps.flush()
        print(f"{folder.name}: step {step}", flush=True)
    return num
