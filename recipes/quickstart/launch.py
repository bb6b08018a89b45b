# SPDX-License-Identifier: Apache-2.0
"""Launch verl's main_ppo with ``+scalerl=quickstart``, show its progress, clean up, and write the report.

run.sh calls this; it needs nothing beyond the prepared environment and data.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scalerl_verl.platform.reap import (
    RUN_ID_ENV,
    end_processes,
    find_shared_memory,
    remove_shared_memory,
    resident_gib,
)

HERE = Path(__file__).resolve().parent
STAGES = (
    ("Started a local Ray instance", "Ray is up; starting the trainer (about 20 s)"),
    ("After FSDP", "the trainer holds the model; starting vLLM (about 30 s)"),
    ("(AgentLoopWorker", "vLLM is up; measuring the start level"),
)
"""What verl prints at a stage -> what it means to a reader who waits."""


@dataclass(frozen=True)
class Paths:
    """Where a run keeps its files."""

    out: Path

    @property
    def run(self) -> Path:
        return self.out / "run"

    @property
    def log(self) -> Path:
        return self.run / "train.log"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def finished(self) -> Path:
        return self.run / "finished"

    @property
    def settings(self) -> Path:
        """What the run was started with: marks the folder as ours, and a resumed run must match it."""
        return self.run / "settings.json"

    @property
    def run_id(self) -> Path:
        """Id of the processes of the latest attempt."""
        return self.out / ".run-id"

    @property
    def latest_checkpoint(self) -> Path:
        return self.run / "checkpoints" / "latest_checkpointed_iteration.txt"


class LaunchError(ValueError):
    """The run cannot start; the message says what to change."""


def quote(value: object) -> str:
    """``value`` as a quoted string of Hydra's override grammar: paths may hold any character."""
    # Backslashes are literal, except in front of a quote, where each is doubled.
    text = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", str(value))
    trailing = len(text) - len(text.rstrip("\\"))
    return f"'{text}{text[len(text) - trailing :]}'"


def build_command(arguments: argparse.Namespace, paths: Paths) -> list[str]:
    """The launch line: verl's own entry point, our preset, and this run's files."""
    data = arguments.data
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        "+scalerl=quickstart",
        f"data.train_files={quote(data / 'train.parquet')}",
        f"data.val_files={quote(data / 'test.parquet')}",
        f"data.seed={arguments.seed}",
        f"actor_rollout_ref.model.path={quote(data / 'model')}",
        f"actor_rollout_ref.rollout.seed={arguments.seed}",
        f"actor_rollout_ref.actor.fsdp_config.seed={arguments.seed}",
        f"reward.custom_reward_function.path={quote(HERE / 'reward.py')}",
        f"trainer.default_local_dir={quote(paths.run / 'checkpoints')}",
        f"trainer.validation_data_dir={quote(paths.run / 'validation')}",
        "trainer.resume_mode=auto",
        # A cluster of this run's own, whatever else runs on this machine.
        "+ray_kwargs.ray_init.address=local",
        f"hydra.run.dir={quote(paths.run / 'hydra')}",
    ]
    if arguments.steps is not None:
        command.append(f"trainer.total_training_steps={arguments.steps}")
    return command + arguments.overrides


def build_environment(paths: Paths, run_id: str) -> dict[str, str]:
    """The environment of the run: CPU platform, one thread a process, metrics file."""
    cpu = {
        "VERL_PLATFORM": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    run = {
        RUN_ID_ENV: run_id,
        "VERL_FILE_LOGGER_PATH": str(paths.metrics),
        "SCALERL_VERL_STATUS_DIR": str(paths.run / "processes"),
        "VERL_LOGGING_LEVEL": "WARN",
        "PYTHONUNBUFFERED": "1",
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**inherited, **cpu, **run}


def start_files(paths: Paths, fresh: bool, settings: dict[str, object]) -> str:
    """Decide between resuming and starting anew, and lay the run's folder out; returns what was decided.

    Args:
        paths: files of the run.
        fresh: start anew even if there is something to resume.
        settings: seed, steps and overrides; an interrupted run is resumed with the same only.

    Raises:
        LaunchError: the run's folder is not ours, or was started with other settings.
    """
    if paths.run.exists():
        if paths.run.is_symlink() or (any(paths.run.iterdir()) and not paths.settings.is_file()):
            raise LaunchError(f"{paths.run} was not made by the quickstart: move it away, or choose another --out")
        resumable = not fresh and not paths.finished.exists() and choose_checkpoint(paths)
        if not resumable:
            shutil.rmtree(paths.run)
        elif (started_with := json.loads(paths.settings.read_text())) != settings:
            raise LaunchError(
                f"the interrupted run in {paths.run} was started with {started_with}, not with {settings}: give the "
                "same, or --fresh to start anew"
            )
    resuming = paths.run.exists()
    if not resuming:
        # The result of an earlier run must not pass for this one's.
        for name in ("summary.json", "learning_curve.png"):
            if (paths.out / name).exists():
                (paths.out / name).replace(paths.out / f"previous-{name}")
    paths.run.mkdir(parents=True, exist_ok=True)
    paths.settings.write_text(json.dumps(settings))
    if resuming and paths.metrics.exists():
        # verl truncates its metrics file when it starts: keep what the interrupted attempt wrote.
        attempt = sum(1 for _ in paths.run.glob("metrics.*.jsonl"))
        paths.metrics.rename(paths.run / f"metrics.{attempt:03d}.jsonl")
    return "resuming the interrupted run from its last checkpoint" if resuming else "starting anew"


def choose_checkpoint(paths: Paths) -> bool:
    """Point verl at the newest checkpoint whose steps were all logged; False if there is none.

    verl saves a checkpoint before it validates and logs that step: a run that was ended in between would resume after
    a step that no report ever sees.
    """
    if not paths.latest_checkpoint.exists():
        return False
    latest = int(paths.latest_checkpoint.read_text())
    logged = {0}
    for path in sorted(paths.run.glob("metrics*.jsonl")):
        lines = path.read_text().split("\n")[:-1]
        logged.update(json.loads(line)["step"] for line in lines)
    folders = paths.latest_checkpoint.parent.glob("global_step_*")
    steps = sorted(int(folder.name.rpartition("_")[2]) for folder in folders)
    usable = [step for step in steps if step <= latest and logged.issuperset(range(1, step + 1))]
    if usable:
        paths.latest_checkpoint.write_text(str(usable[-1]))
    return bool(usable)


def merge_attempts(paths: Paths) -> None:
    """Put the metrics of interrupted attempts in front of the last one's, so that the report sees every step."""
    earlier = sorted(paths.run.glob("metrics.[0-9][0-9][0-9].jsonl"))
    if not paths.metrics.exists():
        raise LaunchError(f"verl ended well but wrote no {paths.metrics}: keep `file` in trainer.logger")
    # An attempt that was killed may end in half a line.
    texts = [path.read_text() for path in (*earlier, paths.metrics)]
    paths.metrics.write_text("".join(text[: text.rfind("\n") + 1] for text in texts))
    for path in earlier:
        path.unlink()


class RunWatch(threading.Thread):
    """Samples the run's memory and shared-memory segments; that walks every page table, so not too often."""

    interval_s = 10.0

    def __init__(self, run_id: str) -> None:
        super().__init__(daemon=True)
        self._run_id = run_id
        self._stop_requested = threading.Event()
        self.peak_gib = 0.0
        self.segments: set[str] = set()

    def sample(self) -> None:
        self.peak_gib = max(self.peak_gib, resident_gib(self._run_id))
        self.segments |= find_shared_memory(self._run_id)

    def run(self) -> None:
        while not self._stop_requested.wait(self.interval_s):
            self.sample()

    def finish(self) -> None:
        self._stop_requested.set()
        if self.ident is not None:
            self.join()


class Progress:
    """Turns verl's log and metrics into a line a person can follow."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._started = time.monotonic()
        # A resumed run appends to the log of the attempt before.
        self._log_offset = paths.log.stat().st_size if paths.log.exists() else 0
        self._metric_lines = 0
        self._stage = -1

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:5.0f} s] {text}", flush=True)

    def poll(self) -> None:
        self._poll_log()
        if not self._paths.metrics.exists():
            return
        lines = self._paths.metrics.read_text().split("\n")[:-1]
        for line in lines[self._metric_lines :]:
            self._show(json.loads(line))
        self._metric_lines = len(lines)

    def _poll_log(self) -> None:
        if not self._paths.log.exists() or self._stage + 1 >= len(STAGES):
            return
        with self._paths.log.open(errors="replace") as stream:
            stream.seek(self._log_offset)
            text = stream.read()
            self._log_offset = stream.tell()
        for index, (mark, meaning) in enumerate(STAGES):
            if index > self._stage and mark in text:
                self._stage = index
                self.say(meaning)

    def _show(self, entry: dict) -> None:
        data = entry["data"]
        parts = [f"step {entry['step']:3d}"]
        if "critic/score/mean" in data:
            parts.append(f"training pass rate {(data['critic/score/mean'] + 1) / 2:.2f}")
            parts.append(f"{data['response_length/mean']:.1f} tokens a response")
            parts.append(f"{data['timing_s/step']:.1f} s")
        held_out = [value for key, value in data.items() if key.startswith("val-core/") and "/acc/" in key]
        if held_out:
            parts.append(f"HELD-OUT pass rate {held_out[0]:.3f}")
        self.say(", ".join(parts))


def run_training(arguments: argparse.Namespace, paths: Paths, lock: IO[str]) -> tuple[int, float]:
    """Run main_ppo to its end and leave no process and no shared memory; returns (exit code, peak GiB)."""
    if paths.run_id.exists():
        # Of an attempt whose launcher was killed.
        end_processes(paths.run_id.read_text())
    run_id = uuid.uuid4().hex
    paths.run_id.write_text(run_id)
    watch = RunWatch(run_id)
    progress = Progress(paths)
    code = 1
    # A closed terminal or a supervisor gets the same clean-up as a user who presses ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with paths.log.open("a") as log:
            process = subprocess.Popen(
                build_command(arguments, paths),
                env=build_environment(paths, run_id),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The run keeps the folder locked even if this launcher is killed.
                pass_fds=[lock.fileno()],
            )
        watch.start()
        progress.say(f"verl is starting; its full log is {paths.log}")
        while process.poll() is None:
            progress.poll()
            time.sleep(0.5)
        progress.poll()
        code = process.returncode
    except KeyboardInterrupt:
        code = 130
    finally:
        # Another signal in here would leave what the first one was meant to remove.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        watch.finish()
        watch.sample()
        num_ended = end_processes(run_id)
        removed = remove_shared_memory(watch.segments)
        paths.run_id.unlink(missing_ok=True)
    if code == 130:
        print("\ninterrupted", flush=True)
    if code != 0:
        print(f"ended {num_ended} processes, removed {len(removed)} shared-memory segments", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    return code, watch.peak_gib


def explain_failure(paths: Paths) -> None:
    """Print the part of the log that says why."""
    lines = paths.log.read_text(errors="replace").splitlines()
    refusal = [index for index, line in enumerate(lines) if "scalerl_verl refuses to start" in line]
    marks = refusal or [index for index, line in enumerate(lines) if "Error" in line]
    start = max(marks[-1] - 12, 0) if marks and not refusal else (marks[-1] if marks else max(len(lines) - 15, 0))
    print(f"\nThe run failed. From {paths.log}:\n" + "\n".join(line[:300] for line in lines[start : start + 25]))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line; everything after ``--`` goes to main_ppo."""
    parser = argparse.ArgumentParser(prog="launch.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder made by prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="where summary.json and learning_curve.png go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps (default: the preset's)")
    parser.add_argument("--fresh", action="store_true", help="start anew even if an interrupted run could be resumed")
    parser.add_argument("--started-at", type=float, default=time.time(), help="Unix time the user began to wait")
    parser.add_argument("overrides", nargs="*", help="further Hydra overrides")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    arguments.data, arguments.out = arguments.data.resolve(), arguments.out.resolve()
    paths = Paths(arguments.out)
    try:
        paths.out.mkdir(parents=True, exist_ok=True)
        lock = (paths.out / ".lock").open("w")
    except OSError as error:
        print(f"error: --out {paths.out} cannot be written: {error}")
        return 1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"error: another quickstart runs in {paths.out}: wait for it, or choose another folder with --out")
        return 1
    settings = {"seed": arguments.seed, "steps": arguments.steps, "overrides": arguments.overrides}
    try:
        print(f"quickstart: {start_files(paths, arguments.fresh, settings)}", flush=True)
    except LaunchError as error:
        print(f"error: {error}")
        return 1
    code, peak_gib = run_training(arguments, paths, lock)
    if code != 0:
        if code == 130:
            if choose_checkpoint(paths):
                print("re-run to resume from the last checkpoint, or with --fresh to start anew")
            else:
                print("no checkpoint was saved yet: a re-run starts anew")
        else:
            explain_failure(paths)
        return code
    try:
        merge_attempts(paths)
    except LaunchError as error:
        print(f"error: {error}")
        return 1
    paths.finished.touch()
    wall_s = time.time() - arguments.started_at
    report = [sys.executable, str(HERE / "report.py"), "--run-dir", str(paths.run), "--out", str(paths.out)]
    report += ["--wall-seconds", f"{wall_s:.1f}", "--peak-gib", f"{peak_gib:.2f}", "--seed", str(arguments.seed)]
    return subprocess.run(report, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
