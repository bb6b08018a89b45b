# SPDX-License-Identifier: Apache-2.0
"""A bucket of 64 MB ended CPU runs of models with a real vocabulary in an assertion, a minute after the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scalerl_verl.cli import main
from scalerl_verl.config import checks, machine_checks, transfer_checks
from scalerl_verl.names import BUCKET, PLATFORM_ENV
from scalerl_verl.pipeline.transfer import MIB
from tests.unit.composed import compose_config

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
UNCOUNTED = {"model_type": "gemma3", "text_config": {"vocab_size": 262144, "hidden_size": 640}}
MASTER = "actor_rollout_ref.actor.fsdp_config.model_dtype"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
PIPELINE = "+scalerl=[recipe,pipeline,cpu]"

SEND = """
import asyncio, json, sys, threading
import torch, verl
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

weight = torch.arange(300_000, dtype=torch.float32)

def send(megabytes):
    socket, got = f"ipc://{sys.argv[1]}-{megabytes}", []
    receiver = BucketedWeightReceiver(socket, torch.device("cpu"), use_shm=True)
    collect = lambda weights, last: got.extend((name, w.clone()) for name, w in weights)
    threading.Thread(target=receiver.receive_weights, args=(collect,), daemon=True).start()
    sender = BucketedWeightSender(socket, bucket_size_mb=megabytes, use_shm=True)
    asyncio.run(sender.async_send_weights(iter([("norm", torch.ones(3)), ("embedding", weight)])))
    print("GOT", [name for name, _ in got], torch.equal(got[-1][1], weight), flush=True)

send(2)
send(1)
"""


@pytest.fixture(autouse=True)
def cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Writes the config.json of a model; returns the override that names it."""

    def write(content: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return f"actor_rollout_ref.model.path={tmp_path}"

    return write


def problems(*overrides: str) -> list[str]:
    config = compose_config(*overrides)
    found = [problem for problem in machine_checks.find_problems(config) if BUCKET in problem]
    return [problem for problem in found if "/dev/shm" not in problem]


def test_bucket_of_64_mb_is_refused_for_a_real_vocabulary_with_the_number_to_set(model: Any) -> None:
    (problem,) = problems("+scalerl=cpu", model(SMOLLM2), f"{BUCKET}=64")
    assert f"{BUCKET}=64" in problem and "108.0 MiB" in problem and "set it to 108 or more" in problem
    assert problems("+scalerl=cpu", model(SMOLLM2), f"{BUCKET}=108") == []
    assert len(problems("+scalerl=cpu", model(SMOLLM2), f"{BUCKET}=107")) == 1


@pytest.mark.parametrize("content", [SMOLLM2, QWEN3], ids=["SmolLM2-135M", "Qwen3-0.6B"])
def test_preset_holds_the_small_models_that_people_take(model: Any, content: dict[str, Any]) -> None:
    assert problems("+scalerl=cpu", model(content)) == []


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["+scalerl=cpu"], True),
        (["+scalerl=cpu", "trainer.v1.trainer_mode=separate_async"], True),
        ([PIPELINE], False),
        ([PIPELINE, "trainer.v1.pipeline_rl.staging=none"], True),
        (["+scalerl=cpu", f"{MASTER}=bf16"], False),
    ],
    ids=["sync", "separate_async", "pipeline_rl stages", "pipeline_rl without staging", "bf16 weights"],
)
def test_only_ways_that_need_the_room_are_refused(model: Any, overrides: list[str], refused: bool) -> None:
    assert bool(problems(*overrides, model(SMOLLM2), f"{BUCKET}=64")) is refused


def test_gpus_send_a_large_weight_by_itself(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "")
    assert problems("+scalerl=recipe", model(SMOLLM2), f"{BUCKET}=64") == []
    separate = "trainer.v1.trainer_mode=separate_async"
    assert problems("+scalerl=recipe", separate, f"{BACKEND}=nccl", model(SMOLLM2), f"{BUCKET}=64") == []
    assert len(problems("+scalerl=recipe", separate, f"{BACKEND}=mooncake", model(SMOLLM2), f"{BUCKET}=64")) == 1


def test_architecture_that_is_not_counted_is_checked_by_its_embedding(model: Any) -> None:
    (problem,) = problems("+scalerl=cpu", model(UNCOUNTED), f"{BUCKET}=64")
    assert "640.0 MiB" in problem
    assert problems("+scalerl=cpu", model({"model_type": "unheard_of"}), f"{BUCKET}=64") == []


@pytest.mark.parametrize("value", ["64MB", 0, -1, 1.5, True])
def test_size_that_is_none_is_refused(value: Any) -> None:
    config = compose_config("+scalerl=cpu")
    config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes = value
    (problem,) = checks.find_problems(config, also=lambda readable: [*transfer_checks.find_model_problems(readable)])
    assert f"{BUCKET}={value!r}: give a whole number of 1 or more" in problem


def test_plan_says_it_too(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["+scalerl=[recipe,cpu]", model(SMOLLM2), "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    lengths = ["data.max_prompt_length=1024", "data.max_response_length=7168", f"{BUCKET}=64"]
    assert main(["plan", *run, *lengths]) == 3
    assert "set it to 108 or more" in capsys.readouterr().out


def test_no_more_shared_memory_is_asked_for_than_the_model_has(model: Any) -> None:
    config = compose_config("+scalerl=cpu", model({**SMOLLM2, "vocab_size": 512, "num_hidden_layers": 1}))
    assert transfer_checks.shared_memory_bytes(config) < 20 * MIB
    assert transfer_checks.shared_memory_bytes(compose_config("+scalerl=cpu", model(QWEN3))) == 640 * MIB
    assert transfer_checks.shared_memory_bytes(compose_config(PIPELINE, model(QWEN3))) == 0


def test_verl_s_own_sender_agrees(tmp_path: Path) -> None:
    """A weight of 1.14 MiB: the number that the check would name is enough, at 1 MB an assertion ends the process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    command = [sys.executable, "-c", SEND, str(tmp_path / "socket")]
    done = subprocess.run(
        command, env={**environment, PLATFORM_ENV: "cpu"}, capture_output=True, text=True, timeout=200
    )
    assert "GOT ['norm', 'embedding'] True" in done.stdout, done.stderr[-2000:]
    assert "is too large to fit in the bucket" in done.stderr, done.stderr[-2000:]
    assert done.stdout.count("GOT") == 1 and done.returncode != 0
