# SPDX-License-Identifier: Apache-2.0
"""Launch verl's main_ppo as a user would and collect what the run left: shared by the CPU and GPU tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from recipes.launch.command import CPU_ENVIRONMENT
from recipes.launch.processes import (
    Process,
    end_processes,
    find_processes,
    find_shared_memory,
    remove_shared_memory,
    run_marks,
    see_processes,
)
from recipes.quickstart import model as quickstart_model
from scalerl_verl.json_lines import read_records
from tests.metric_names import undocumented

REPO = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).resolve().parent / "probe"
NUM_PROMPTS, GROUP_SIZE = 8, 4
FIRST_KINDS = ("1 of 4", "2 of 4", "2 of 4", "3 of 4", "pass", "equal", "1 of 4", "2 of 4")
"""Answers of the first batch of ``kinds.parquet``: six groups with a signal, one all right, one all wrong."""
INTERRUPTED = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=forced_interruption",
    # A random model opens no thinking: all it writes counts as such. Where it may end by itself, it learns to.
    "actor_rollout_ref.rollout.ignore_eos=True",
    "++algorithm.scalerl.interruption={start_marker: null, phrase: '</think>', thinking_budget: [6, 9], "
    "answer_budget: 5}",
)
"""Responses of up to 16 tokens, all of which are interrupted: 6 to 9 of thinking, the phrase of one, 5 of an answer."""
KL_AND_ENTROPY = (
    # as in most of verl's example scripts
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.entropy_coeff=0.001",
)
OVERLONG = (
    # as in most of verl's recipes: the last half of the greatest length costs up to 1
    "reward.reward_manager.name=dapo",
    "+reward.reward_kwargs={max_resp_len: 16, overlong_buffer_cfg: {enable: True, len: 8, penalty_factor: 1.0, "
    "log: False}}",
)
PATIENT = {"SCALERL_VERL_SYNC_TIMEOUT_S": "3600"}
"""Longer than a run may take: what ends one whose generator fails is the failure, not our patience with its silence."""


@dataclass
class VerlRun:
    """A finished run: exit code, folder, log, seconds."""

    folder: Path
    code: int
    seconds: float
    log: str
    leftover_processes: int
    leftover_segments: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """Step -> metrics, from verl's JSONL logger; a killed run's last line may be cut."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return {entry["step"]: entry["data"] for entry in map(json.loads, lines)}

    @property
    def processes(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in (self.folder / "processes").glob("*.json")]

    def tail(self, num_chars: int = 4000) -> str:
        return self.log[-num_chars:]


def problem(index: int, answer: str) -> dict:
    """A row of the data; ``answer`` says what responses to it earn (see `reward`)."""
    return {
        "data_source": "tests/parity",
        "prompt": [{"role": "user", "content": f"{index}+1"}],
        "ability": "test",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index},
    }


def make_assets(folder: Path) -> Path:
    """A random model with the quickstart's tokenizer, and files of 32 training problems (see `reward`).

    ``train.parquet``: the second batch of 8 has equal rewards throughout, the others go by the response. In
    ``kinds.parquet`` the first batch is `FIRST_KINDS` and what follows the second is certain to train. In
    ``mixed.parquet`` every problem is: asynchronous runs train groups in the order they complete, so which of their
    steps would be skipped for equal rewards would be a matter of timing.

    The model hardly ever ends a response by itself. ``stopping`` and ``uneven`` are the same with responses of many
    lengths: one token in eight is an end to the one, one in 40 to the other.
    """
    import pandas
    import torch

    torch.manual_seed(0)
    tokenizer = quickstart_model.build_tokenizer()
    model = quickstart_model.build_model(tokenizer)
    for name, apart in (("model", len(tokenizer)), ("stopping", 8), ("uneven", 40)):
        model.generation_config.eos_token_id = list(range(tokenizer.eos_token_id, len(tokenizer), apart))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    even, equal, half = (NUM_PROMPTS * [answer] for answer in ("even", "equal", f"2 of {GROUP_SIZE}"))
    files = {
        "train": [*even, *equal, *even, *even],
        "kinds": [*FIRST_KINDS, *equal, *half, *half],
        "mixed": [*half, *half, *half, *half],
    }
    for name, answers in files.items():
        rows = [problem(index, answer) for index, answer in enumerate(answers)]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    pandas.DataFrame([problem(100 + index, "even") for index in range(4)]).to_parquet(folder / "test.parquet")
    return folder


def make_even_model(assets: Path, folder: Path, tied: bool = True) -> Path:
    """The tiny model with numbers of heads that two ranks can share, its output layer tied to the embedding or not."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(assets / "model")
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets / "model").save_pretrained(folder)
    return folder


def passed_checks(module: str, *arguments: str) -> dict[str, str]:
    """Run a module that holds a vLLM engine and checks it; check -> what was seen, of all that it reports."""
    env = {**os.environ, **CPU_ENVIRONMENT, "SCALERL_VERL_ACTIVE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=REPO)
    except subprocess.TimeoutExpired as late:
        pytest.fail(
            f"{module} did not end in {late.timeout:.0f} s; it printed\n{(late.stdout or b'').decode()[-6000:]}"
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    lines = [line.removeprefix("PASSED ") for line in done.stdout.splitlines() if line.startswith("PASSED ")]
    return dict(line.split(" | ", 1) for line in lines)


def launch_verl(
    folder: Path,
    assets: Path,
    overrides: Sequence[str],
    env: dict[str, str],
    timeout_s: float = 600,
    each_second: Callable[[set[int]], None] | None = None,
) -> VerlRun:
    """Run main_ppo on the tiny model to its end; ends and counts whatever it left behind.

    A metric of ours that the reference page does not list is an error.

    ``each_second`` is called with the ids of the run's processes, to do them harm.
    """
    probe_dir = folder / "weights"
    probe_dir.mkdir(exist_ok=True)
    run_id = uuid.uuid4().hex
    environment = {
        **os.environ,
        "HYDRA_FULL_ERROR": "1",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "SCALERL_VERL_STATUS_DIR": str(folder / "processes"),
        "PROBE_DIR": str(probe_dir),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROBE), os.environ.get("PYTHONPATH", "")])),
        **run_marks(run_id),
        **env,
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *tiny_overrides(assets, folder), *overrides]
    wall = time.monotonic()
    segments: set[str] = set()
    seen: set[Process] = set()
    log_path = folder / f"log-{run_id[:6]}.txt"
    code: int | None = None
    try:
        with log_path.open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            while (code := process.poll()) is None:
                if time.monotonic() - wall > timeout_s:
                    raise subprocess.TimeoutExpired(command, timeout_s)
                segments |= find_shared_memory(run_id)
                for _ in range(2):
                    seen |= see_processes(run_id)
                    if each_second is not None:
                        each_second({process.pid, *find_processes(run_id)})
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(1)
    finally:
        seconds = time.monotonic() - wall
        # One that did not end has no leftovers: nobody waits for it.
        leftover = 0 if code is None else count_leftover(run_id)
        end_processes(run_id, known=seen)
        removed = remove_shared_memory(segments)
    run = VerlRun(folder, code, seconds, log_path.read_text(errors="replace"), leftover, removed)
    if (folder / "metrics.jsonl").exists():
        logged = {name for metrics in run.metrics.values() for name in metrics}
        assert undocumented(logged) == [], "describe these in scalerl_verl/metrics.py"
    return run


def count_leftover(run_id: str, grace_s: float = 120.0) -> int:
    """Processes of the run that are still there ``grace_s`` seconds after its driver ended (daemons need a moment)."""
    deadline = time.monotonic() + grace_s
    while (count := len(find_processes(run_id))) and time.monotonic() < deadline:
        time.sleep(0.5)
    return count


def set_back(run: VerlRun, saved: int) -> Path:
    """Make the run's folder that of one which died after its checkpoint; what it wrote is kept beside."""
    folder = run.folder
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(saved))
    (folder / "metrics.jsonl").rename(folder / "metrics.first.jsonl")
    (folder / "first-events.jsonl").write_text((folder / "checkpoints" / "curriculum.jsonl").read_text())
    return folder


def first_metrics(run: VerlRun) -> dict[int, dict[str, float]]:
    """Step -> metrics of a run's first attempt, also when another one was resumed in its folder."""
    path = run.folder / "metrics.first.jsonl"
    lines = read_records(path if path.exists() else run.folder / "metrics.jsonl")
    return {entry["step"]: entry["data"] for entry in lines}


def check_failed_load(run: VerlRun, weights: Path) -> None:
    """The run ended by itself, with the planted fault as its cause: verl would wait for ever."""
    assert run.code not in (0, None)
    # In the error that ends the run, not only somewhere in the engine's own log.
    wanted = r"WeightSyncError: the generator failed to load the trainer's weights: .*planted fault"
    assert re.search(wanted, run.log), run.tail()
    assert (weights / "planted").exists()
    assert run.leftover_processes == 0


def last_step(folder: Path) -> int:
    """The last step whose metrics a run has written, which may be writing the next; 0 before the first."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself in between
        os.kill(process, signal.SIGKILL)


def title_of(process: int) -> str:
    """What a process calls itself (``ray::`` and its class, for an actor); empty if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    return ""


def tiny_overrides(assets: Path, folder: Path) -> list[str]:
    """Sizes and paths of a run that takes seconds a step."""
    return [
        f"data.train_files={assets}/train.parquet",
        f"data.val_files={assets}/test.parquet",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "data.shuffle=False",
        f"actor_rollout_ref.model.path={assets}/model",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        f"actor_rollout_ref.rollout.n={GROUP_SIZE}",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.max_model_len=64",
        "actor_rollout_ref.rollout.max_num_batched_tokens=512",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        f"reward.custom_reward_function.path={Path(__file__).parent / 'reward.py'}",
        "trainer.project_name=tests",
        "trainer.experiment_name=tiny",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.total_epochs=100",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
    ]
