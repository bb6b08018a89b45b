# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.faults.soak --steps 300 --out FOLDER``: a long pipeline run on the CPU under faults.

Two generators, k = 2, a checkpoint every ten steps. Every few steps one of `FAULTS` is done to it; whenever the run
ends it is started again from its last checkpoint. A killed generator is launched again, before the next fault; a
stopped one is left out and comes back. In the end every prompt has trained as often as the order of the data says, but
for what the run itself reported as given up, and that among the rows whose reward was made to fail; the log of steps
has the metrics of each step once, whichever attempt trained it; no token was older than k; and over the last
steps, which are left alone, every process' memory and files stayed flat. Writes FOLDER/soak.json; exit code 1 if one of
these does not hold.

The full disk is a real one (a tmpfs that is filled up), which takes the right to mount. The slow one is a stand-in: a
checkpoint that takes `SLOW_S` seconds longer. ``--record`` appends a row to benchmarks/results/soak.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import append_rows, run_facts
from scalerl_verl.json_lines import read_records
from scalerl_verl.scaling.logs.segments import STEPS_FILE
from tests.e2e.launching import CPU_ENVIRONMENT, NUM_PROMPTS, VerlRun, last_step, launch_verl, make_assets, title_of
from tests.e2e.pipeline_data import read_responses
from tests.e2e.test_pipeline import LONG, PRESETS

K, NUM_ROWS, SAVE_EVERY = 2, 32, 10
FAULTS = (
    "raising reward",
    "hanging reward",
    "killed generator",
    "killed run",
    "full disk",
    "poisoned reward",
    "stopped generator",
    "slow disk",
    "killed trainer",
)
DISK_MIB = 256
SLOW_S = 20.0
STOPPED_S = 90.0
"""Longer than a generator has to answer before an update, which is a minute."""
ENVIRONMENT = {
    **CPU_ENVIRONMENT, "RAY_task_events_max_num_task_in_gcs": "1000", "PROBE_SLOW_CHECKPOINT": str(SLOW_S)
}  # fmt: skip
"""Ray's own server keeps the last 100,000 tasks, and would grow over more steps than are watched here."""
LEARNING_RATE = 1e-5
"""Weights change with every version, yet responses stay long enough to see several."""
CALM, WARM = 120, 20
"""The last `CALM` steps are without faults, and after the first `WARM` of them caches and allocators are filled."""
MIN_STEPS = 25
"""Between the samples that are compared."""
GROWTH_KIB, GROWTH_FILES = 150.0, 0.1
"""A step: a leak of a batch (32 responses of 160 tokens with their log-probs, 40 KiB, in several copies) would show."""


UP_AGAIN = r"generator (\d) is up again"


@dataclass(frozen=True)
class Attempt:
    """What was sampled each second, the metrics of the steps it did, and its log."""

    samples: list[dict[str, Any]]
    metrics: dict[int, dict[str, float]]
    log: str = ""

    def count(self, pattern: str) -> int:
        """How often its log says so."""
        return len(re.findall(pattern, self.log))


class Harm:
    """Does the faults to a run, one after the other, and samples what its processes hold.

    Args:
        folder: the run's.
        disk: the file system of its checkpoints.
        every: steps between two faults.
        until_step: no fault is done from there on.
        seed: which rows and processes are hit.
    """

    def __init__(self, folder: Path, disk: Path, every: int, until_step: int, seed: int) -> None:
        self.folder, self.disk, self.every, self.until_step = folder, disk, every, until_step
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.harmed_rows: set[int] = set()
        self.next_step, self.num = every, 0
        self.samples: list[dict[str, Any]] = []
        self.until = 0.0
        self.stopped: list[int] = []
        self.num_up_again: int | None = None  # before a generator was killed that is not yet launched again

    def each_second(self, processes: set[int]) -> None:
        step = last_step(self.folder)
        self._clean_up()
        self.samples.append({"step": step, "held": {p: held for p in processes if (held := _held(p))}})
        if self.until and time.monotonic() > self.until:
            self._relieve()
        if step < self.next_step or step >= self.until_step or self.until or self._awaits_generator():
            return
        fault = FAULTS[self.num % len(FAULTS)]
        self.num, self.next_step = self.num + 1, step + self.every
        print(f"step {step}: {fault}", flush=True)
        if self._do(fault, processes):
            self.done[fault] += 1

    def _awaits_generator(self) -> bool:
        if self.num_up_again is not None and self._count_up_again() > self.num_up_again:
            self.num_up_again = None
        return self.num_up_again is not None

    def _count_up_again(self) -> int:
        logs = self.folder.glob("log-*.txt")
        return sum(len(re.findall(UP_AGAIN, log.read_text(encoding="utf-8", errors="replace"))) for log in logs)

    def _do(self, fault: str, processes: set[int]) -> bool:
        if fault.endswith("reward"):
            rows = self.random.sample(range(NUM_ROWS), 3)
            self.harmed_rows.update(rows)
            (self.folder / "weights" / "faults.json").write_text(json.dumps({fault.split()[0]: rows}))
            self.until = time.monotonic() + 8
            return True
        if fault == "full disk":
            with contextlib.suppress(OSError), (self.disk / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(1 << 20))
            self.until = time.monotonic() + 60
            return True
        if fault == "slow disk":
            (self.folder / "weights" / "slow_checkpoint").touch()
            self.until = time.monotonic() + SAVE_EVERY * 10
            return True
        server = "ray::PipelineHttpServer"
        titles = {"killed generator": server, "stopped generator": server, "killed trainer": "ray::WorkerDict"}
        hit = sorted(p for p in processes if title_of(p).startswith(titles.get(fault, "")))
        hit = hit if fault == "killed run" else hit[-1:]
        if fault == "stopped generator":
            self.stopped, self.until = hit, time.monotonic() + STOPPED_S
            for process in hit:
                os.kill(process, signal.SIGSTOP)
            return bool(hit)
        if fault == "killed generator":
            self.num_up_again = self._count_up_again()
        for process in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return bool(hit)

    def end_attempt(self) -> list[dict[str, Any]]:
        """Take back what lasts, after a run has ended; its samples."""
        self._relieve()
        samples, self.samples, self.num_up_again = self.samples, [], None
        return samples

    def _relieve(self) -> None:
        (self.disk / "filler").unlink(missing_ok=True)
        (self.folder / "weights" / "faults.json").unlink(missing_ok=True)
        (self.folder / "weights" / "slow_checkpoint").unlink(missing_ok=True)
        for process in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        self.stopped, self.until = [], 0.0

    def _clean_up(self) -> None:
        """The probe's copies of every version: nobody reads them here."""
        for kind in ("sent", "held"):
            for file in self.folder.glob(f"weights/{kind}-*.pt"):
                file.unlink(missing_ok=True)


def _held(process: int) -> tuple[str, int, int] | None:
    """(title, resident KiB, open files) of a process, or None if it is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        files = len(os.listdir(f"/proc/{process}/fd"))
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return None
    return title_of(process), kib, files


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def growth(samples: list[dict[str, Any]], begin: int) -> list[dict[str, Any]]:
    """Of each process: KiB and files a step, between the medians of the second and the last quarter of its samples.

    Samples before step ``begin`` are left out.
    """
    found: dict[int, list[tuple[int, str, int, int]]] = {}
    for sample in samples:
        for process, (title, kib, files) in sample["held"].items() if sample["step"] >= begin else ():
            found.setdefault(process, []).append((sample["step"], title, kib, files))
    rows = []
    for history in found.values():
        quarter = len(history) // 4
        early, late = history[quarter : 2 * quarter], history[3 * quarter :]
        if not early or not late or (steps := _median(late, 0) - _median(early, 0)) < MIN_STEPS:
            continue
        kib, files = ((_median(late, column) - _median(early, column)) / steps for column in (2, 3))
        rows.append({"process": history[-1][1], "steps": steps, "kib_a_step": kib, "files_a_step": files})
    return rows


def _median(history: list[tuple[int, str, int, int]], column: int) -> float:
    values = sorted(entry[column] for entry in history)  # type: ignore[type-var]
    return float(values[len(values) // 2])


def judge(
    folder: Path, steps: int, harm: Harm, attempts: list[Attempt], rows: list[dict[str, Any]], calm_steps: int = CALM
) -> tuple[dict[str, Any], list[str]]:
    """(what was seen, what should not have been); ``rows`` are those of the run's log of steps."""
    responses = read_responses(folder / "weights")
    rows_of_groups = {
        response.group: int(json.loads(response.content)[0]["content"].split("+")[0]) for response in responses
    }
    ages = Counter(r.step - 1 - version for r in responses for version, count in r.runs for _ in range(count))
    calm = attempts[-1]
    grown = growth(calm.samples, max(steps - calm_steps, min(calm.metrics)) + WARM)
    logged = [row["step"] for row in rows if row["step"] > 0]
    given_up = _total(rows, "scalerl/pipeline/groups_given_up_sum")
    lost = find_lost(Counter(rows_of_groups.values()), steps * NUM_PROMPTS + given_up)
    seen = {
        "steps": len({r.step for r in responses}), "prompts": len(rows_of_groups), "given_up": given_up,
        "reissued": _total(rows, "scalerl/pipeline/groups_reissued_sum"),
        "tokens_by_age": dict(sorted(ages.items())), "versions_in_a_response": max(len(r.runs) for r in responses),
        "launched_again": sum(attempt.count(UP_AGAIN) for attempt in attempts),
        "came_back": sum(count_returned(attempt.log) for attempt in attempts),
        "attempts": len(attempts), "worst_growth": max(grown, key=lambda row: row["kib_a_step"], default=None),
        "most_files_a_step": max((row["files_a_step"] for row in grown), default=None),
    }  # fmt: skip
    problems = [f"never done: {fault}" for fault in FAULTS if not harm.done[fault]]
    if not seen["launched_again"]:
        problems.append("no killed generator was launched again")
    if not seen["came_back"]:
        problems.append("no stopped generator came back")
    if seen["steps"] != steps or len(rows_of_groups) != steps * NUM_PROMPTS:
        problems.append(f"{seen['steps']} steps with {len(rows_of_groups)} prompts were trained instead of {steps}")
    if logged != list(range(1, steps + 1)):
        problems.append(f"the log of steps has {len(logged)} rows of {len(set(logged))} steps, in this order: {logged}")
    if min(lost.values(), default=0) < 0:
        problems.append(f"prompts were trained twice: {lost}")
    if sum(lost.values()) != given_up or not set(lost) <= harm.harmed_rows:
        problems.append(f"prompts were lost, {given_up} reported as given up: {lost}")
    if max(ages) > K or min(ages) < 0:
        problems.append(f"a token was more than {K} versions old")
    problems += [] if grown else ["no process was watched for long enough to say whether it grows"]
    problems += [f"grows: {row}" for row in grown if row["kib_a_step"] > GROWTH_KIB]
    problems += [f"keeps files open: {row}" for row in grown if row["files_a_step"] > GROWTH_FILES]
    return seen, problems


def count_returned(log: str) -> int:
    """Generators that were stopped and took part again: those that were launched again are back, too."""
    launched, num = set(), 0
    for line in re.finditer(rf"{UP_AGAIN}|generators ([\d, ]+) are back", log):
        if line[1]:
            launched.add(line[1])
            continue
        back = set(line[2].split(", "))
        num += len(back - launched)
        launched -= back
    return num


def _total(rows: list[dict[str, Any]], name: str) -> int:
    return sum(int(row["data"].get(name, 0)) for row in rows)


def find_lost(trained: Counter[int], num_started: int) -> dict[int, int]:
    """Row -> times it was not trained, of those that ``num_started`` groups in the order of the data would have had."""
    times = {row: num_started // NUM_ROWS + (row < num_started % NUM_ROWS) for row in range(NUM_ROWS)}
    return {row: times[row] - trained[row] for row in times if times[row] != trained[row]}


def soak(folder: Path, steps: int, every: int, seed: int, calm: int, record: bool) -> int:
    assets = make_assets(folder)
    attempts: list[Attempt] = []
    began = time.monotonic()
    with small_disk(folder / "checkpoints") as disk:
        harm = Harm(folder, disk, every, steps - calm, seed)
        overrides = [
            *PRESETS, *LONG, f"data.train_files={assets}/mixed.parquet", "trainer.resume_mode=auto",
            f"trainer.v1.pipeline_rl.max_staleness={K}", "trainer.v1.pipeline_rl.request_timeout_s=10",
            "trainer.v1.pipeline_rl.max_strikes=1", "trainer.v1.pipeline_rl.max_relaunches=100",
            f"trainer.save_freq={SAVE_EVERY}", "trainer.max_actor_ckpt_to_keep=2",
            f"trainer.total_training_steps={steps}", "actor_rollout_ref.rollout.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=3", f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
            "reward.custom_reward_function.name=faulty_score",
        ]  # fmt: skip
        run: VerlRun | None = None
        while run is None or run.code != 0:
            (folder / "metrics.jsonl").unlink(missing_ok=True)
            run = launch_verl(folder, assets, overrides, dict(ENVIRONMENT), 3600, harm.each_second)
            samples = harm.end_attempt()
            metrics = run.metrics if (folder / "metrics.jsonl").exists() else {}
            attempts.append(Attempt(samples, metrics, run.log))
            (folder / f"samples-{len(attempts)}.json").write_text(json.dumps(samples))
            print(f"attempt {len(attempts)}: exit code {run.code} after step {max(metrics, default=None)}", flush=True)
            if len(attempts) > 4 + 2 * steps // every:
                print(run.tail())
                return 1
        seen, problems = judge(folder, steps, harm, attempts, read_records(disk / STEPS_FILE), calm)
    minutes = (time.monotonic() - began) / 60
    result = {
        **run_facts("soak"),
        **seen,
        "faults": dict(harm.done),
        "minutes": minutes,
        "problems": problems,
    }
    (folder / "soak.json").write_text(json.dumps(result, indent=1))
    if record:
        append_rows("soak", [make_row(result, every, calm)])
    print(json.dumps(result, indent=1))
    return int(bool(problems))


def make_row(result: dict[str, Any], every: int, calm: int) -> dict[str, Any]:
    """What benchmarks/results keeps of a run."""
    facts = run_facts("soak")
    counts = ("prompts", "given_up", "reissued", "launched_again", "came_back", "attempts", "faults", "problems")
    case = {"k": K, "generators": 2, "every": every, "calm": calm, **{name: result[name] for name in counts}}
    row = {"bench": "soak", "case": case, "impl": "pipeline_rl", "metric": "steps", "p50": result["steps"]}
    return {**facts, "run_id": f"soak-{int(time.time())}", **row, "unit": "steps", "minutes": result["minutes"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=12, help="steps between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calm", type=int, default=CALM, help="last steps, which are without faults")
    parser.add_argument("--record", action="store_true", help="append a row to benchmarks/results/soak.jsonl")
    arguments = parser.parse_args()
    least = arguments.calm + (len(FAULTS) + 1) * arguments.every
    if arguments.steps < least:
        parser.error(
            f"--steps {arguments.steps} leaves no time for each of {len(FAULTS)} faults before the last "
            f"{arguments.calm} steps, which have none: at least {least}"
        )
    arguments.out.mkdir(parents=True)
    out = arguments.out.resolve()
    return soak(out, arguments.steps, arguments.every, arguments.seed, arguments.calm, arguments.record)


if __name__ == "__main__":
    sys.exit(main())
