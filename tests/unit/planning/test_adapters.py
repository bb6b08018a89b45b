# SPDX-License-Identifier: Apache-2.0
"""Plans of runs that train adapters: against verl's engine, autograd, and by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from scalerl_verl.cli import main
from scalerl_verl.planning.adapters import PROJECTIONS, Adapters
from scalerl_verl.planning.balance import Assumptions, attention_flops, training_flops
from scalerl_verl.planning.trainer import TrainerSetup, layer_activation_bytes, trainer_memory
from scalerl_verl.shapes import find_shape, from_config
from tests.unit.planning.test_command import SYNC
from tests.unit.planning.test_trainer import kept_bytes
from tests.unit.test_shapes import CONFIGS, build_on_meta

MODEL = "actor_rollout_ref.model"
RUN = ("plan", "recipe=recipes/scalerl-8b-math", f"{MODEL}.lora_rank=32")
MERGED = (*RUN, f"{MODEL}.lora.merge=True")
RANK = 4
"""Of `make_engine`."""


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj", "down_proj"]], ids=str)
def test_state_is_that_of_verl_s_engine(tmp_path: Path, targets: Any) -> None:
    """Every byte of weights, gradients and AdamW's states on one rank, of a tied and grouped-query model in FP32."""
    config = CONFIGS["qwen3, wide heads"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "model")
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "tests.unit.planning.adapter_engine", str(tmp_path), json.dumps(targets)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    adapters = Adapters(RANK, frozenset(PROJECTIONS if targets == "all-linear" else targets))
    shape = from_config(config, "model")
    memory = trainer_memory(shape, TrainerSetup(num_shards=1, tokens=8, adapters=adapters))
    assert seen.pop("trained") == adapters.num_params(shape)
    assert seen == {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}


@pytest.mark.parametrize("name", ["llama", "qwen3, wide heads"])
def test_adapters_are_those_of_peft(name: str) -> None:
    """``all-linear`` leaves out the output layer."""
    model = get_peft_model(
        build_on_meta(CONFIGS[name]), LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert Adapters(8).num_params(from_config(CONFIGS[name], name)) == trained > 0


@pytest.mark.parametrize("name", ["llama", "qwen3, wide heads"])
def test_activations_of_a_layer_are_those_that_autograd_keeps(name: str) -> None:
    counted = layer_activation_bytes(from_config(CONFIGS[name], name), False, 2, Adapters(RANK))
    assert counted == pytest.approx(kept_bytes(CONFIGS[name], tokens=256, rank=RANK), abs=1)


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    """8B over 16 GPUs in FP32: weights stay, the rest of the state is that of 87 million numbers."""
    shape, adapters = find_shape("Qwen/Qwen3-8B-Base"), Adapters(32)
    whole = trainer_memory(shape, setup := TrainerSetup(num_shards=16, tokens=16384))
    memory = trainer_memory(shape, replace(setup, adapters=adapters))
    assert adapters.num_params(shape) == 36 * 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert memory.weights == whole.weights + memory.gradients and memory.optimizer == 2 * memory.gradients
    assert memory.gradients == 4 * adapters.num_params(shape) / 16
    assert memory.moments["weight update"] == whole.moments["weight update"]
    assert memory.head == whole.head - 4 * shape.vocab * shape.hidden
    assert memory.peak < whole.peak


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    shape, mean = find_shape("Qwen/Qwen3-8B-Base"), Assumptions(mean_prompt=100, mean_response=900)
    number = Adapters(32).num_params(shape)
    matrices, trained = 2 * 1000 * shape.active_params, 2 * 1000 * number
    by_hand = 3 * matrices + 4 * (trained + attention_flops(shape, 1000))
    assert training_flops(shape, 1, mean, num_forwards=2, adapter_params=number) == pytest.approx(by_hand)


def test_plan_of_a_run_sends_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    plans = {}
    for name, arguments in (("whole", ("plan", RUN[1])), ("adapters", MERGED)):
        main([*arguments, "--json"])
        plans[name] = json.loads(capsys.readouterr().out)
    assert plans["adapters"]["update"] == plans["whole"]["update"]
    main(list(MERGED))
    assert "0.09B parameters of adapters train; an update sends the whole model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (RUN, "set actor_rollout_ref.model.lora.merge=True"),
        (("plan", *SYNC, f"{MODEL}.lora_rank=8"), "plan counts adapters that are merged before they are sent"),
        ((*MERGED, f"{MODEL}.lora_adapter_path=adapter"), "set actor_rollout_ref.model.lora_rank and target_modules"),
        ((*MERGED, f"{MODEL}.target_modules=.*proj"), "plan counts all-linear, or a list of q_proj"),
        ((*MERGED, f"{MODEL}.target_modules=[wq]"), "plan counts all-linear, or a list of q_proj"),
        ((*MERGED, f"{MODEL}.exclude_modules=all-linear"), "leaves no matrix"),
        ((*MERGED, f"+{MODEL}.target_parameters=[experts]"), "name them in actor_rollout_ref.model.target_modules"),
        (("plan", "recipe=recipes/scalerl-moe", *MERGED[2:]), "plan counts adapters of dense models only"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[-1].rpartition(".")[2],
)
def test_other_adapters_are_refused(capsys: pytest.CaptureFixture[str], arguments: Any, said: str) -> None:
    assert main(list(arguments)) == 1
    assert said in capsys.readouterr().err
