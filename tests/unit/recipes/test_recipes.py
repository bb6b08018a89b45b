# SPDX-License-Identifier: Apache-2.0
"""Every recipe: composed with verl, past our start-up checks, planned, pinned; its README says what the plan says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from recipes.common import to_parquet
from recipes.launch import launcher
from recipes.launch.command import CPU_CONFIG, build_command, build_environment, parse_arguments
from recipes.launch.folder import Paths
from recipes.quickstart import model as quickstart_model
from scalerl_verl.cli import main
from scalerl_verl.config.checks import find_problems
from scalerl_verl.json_lines import read_records
from scalerl_verl.planning.resolve import compose_run, find_recipe
from tests.paths import RECIPES

CONFIGS = {"tiny-gpu": ("config", "two"), "scalerl-8b-math": ("config",)}
CONFIGS |= {name: ("config",) for name in ("scalerl-moe", "math-and-code")}
CONFIGS |= {"smollm2-reasoning": ("config", "grpo", "dapo", "gspo", "cpu")}
ALL = [(recipe, config) for recipe, configs in CONFIGS.items() for config in configs]
LAUNCHABLE = sorted(set(path.parent.name for path in RECIPES.glob("*/config.yaml")) - {"quickstart"})
PLAN = re.compile(r"<!-- plan:(\S+) ?(.*?) ?-->\n(.*?)<!-- end:plan -->", re.DOTALL)


def compose_recipe(recipe: str, config: str = "config", *overrides: str) -> DictConfig:
    return compose_run([*find_recipe(str(RECIPES / recipe / f"{config}.yaml")).overrides, *overrides])


def test_every_recipe_is_tested() -> None:
    assert set(CONFIGS) == set(LAUNCHABLE)


@pytest.mark.parametrize(("recipe", "config"), ALL)
def test_recipe_composes_and_contradicts_nothing(recipe: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if config == CPU_CONFIG:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")  # as the launcher does
    composed = compose_recipe(recipe, config)
    assert find_problems(composed) == []
    reward = Path(str(composed.reward.custom_reward_function.path))
    assert (RECIPES.parent / reward).is_file()


@pytest.mark.parametrize("recipe", LAUNCHABLE)
def test_readme_shows_the_plan_of_today(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`UPDATE_GOLDEN=1` writes it anew."""
    readme = RECIPES / recipe / "README.md"
    text = readme.read_text()
    (block,) = PLAN.findall(text)
    config, options, shown = block
    assert main(["plan", f"recipe={RECIPES / recipe / config}.yaml", *shlex.split(options)]) == 0
    plan = f"```text\n{capsys.readouterr().out}```\n"
    if os.environ.get("UPDATE_GOLDEN"):
        readme.write_text(text.replace(f"-->\n{shown}<!-- end:plan", f"-->\n{plan}<!-- end:plan"))
    else:
        assert shown == plan


def prepare_arguments(folder: Path) -> list[str]:
    """What a recipe's prepare.sh calls its program with."""
    command = ["bash", str(folder / "prepare.sh"), "DATA", "0"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": "echo"}, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("recipe", LAUNCHABLE)
def test_recipe_is_pinned_and_launched_by_the_one_launcher(recipe: str) -> None:
    folder = RECIPES / recipe
    pins = (folder / "PINS.txt").read_text()
    assert pins.startswith("-r ../common/pins-gpu.txt\n")
    assert (folder / "run.sh").resolve() == RECIPES / "launch" / "run.sh"
    assert (folder / "prepare.sh").is_file()
    model = str(compose_recipe(recipe).actor_rollout_ref.model.path)
    if not (folder / "model.json").is_file():
        assert f"# model {model}\n" in pins
    if not (folder / "model.json").is_file() and not (folder / "requirements.txt").is_file():
        sources = to_parquet.SOURCES
        used = sources.keys() & set(prepare_arguments(folder))
        assert used and all(sources[name].dataset in pins for name in used)


def test_the_stack_is_the_one_of_the_recorded_results() -> None:
    versions = read_records(RECIPES.parent / "benchmarks" / "results" / "fp32_head.jsonl")[-1]["versions"]
    pins = dict(
        line.split("==") for line in (RECIPES / "common" / "pins-gpu.txt").read_text().split("\n") if "==" in line
    )
    assert {name: pins[name] for name in versions} == versions


def test_8b_math_is_the_paper_s_set_up() -> None:
    config = compose_recipe("scalerl-8b-math")
    expected: dict[str, Any] = {
        "data.train_batch_size": 48,
        "actor_rollout_ref.rollout.n": 16,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 48,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 12288 + 2048,
        "algorithm.scalerl.interruption.thinking_budget": [10000, 12000],
        "algorithm.scalerl.adv_norm": "batch",
        "algorithm.scalerl.zero_variance": "drop",
        "data.sampler.threshold": 0.9,
        "trainer.v1.trainer_mode": "pipeline_rl",
        "trainer.v1.pipeline_rl.max_staleness": 8,
        "trainer.test_freq": 100,
        "actor_rollout_ref.rollout.val_kwargs.n": 16,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "scalerl_cispo",
        "actor_rollout_ref.actor.loss_agg_mode": "prompt-mean",
        "actor_rollout_ref.actor.optim.lr": 5e-7,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 100,
        "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "actor_rollout_ref.actor.optim.override_optimizer_config.eps": 1e-15,
        "actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.head_dtype": "float32",
    }
    assert {path: OmegaConf.select(config, path) for path in expected} == expected
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    assert (trainer.nnodes * trainer.n_gpus_per_node, rollout.nnodes * rollout.n_gpus_per_node) == (16, 64)


def test_stored_shape_of_tiny_gpu_is_that_of_its_model() -> None:
    stored = json.loads((RECIPES / "tiny-gpu" / "model.json").read_text())
    built = quickstart_model.build_model(quickstart_model.build_tokenizer()).config.to_dict()
    assert {key: built[key] for key in stored} == stored


def test_tiny_gpu_thinks_as_the_quickstart_does() -> None:
    quickstart = compose_run(["+scalerl=quickstart"]).algorithm.scalerl.interruption
    assert compose_recipe("tiny-gpu").algorithm.scalerl.interruption == quickstart


def test_launch_line_composes_to_the_recipe_and_its_files(tmp_path: Path) -> None:
    out, data = tmp_path / "it's out", tmp_path / "data"
    (data / "model").mkdir(parents=True)
    (data / "model" / "config.json").write_text("{}")
    arguments = parse_arguments(
        [
            str(RECIPES / "tiny-gpu"),
            "--config",
            "two",
            "--data",
            str(data),
            "--seed",
            "3",
            "--",
            "data.train_batch_size=16",
        ]
    )
    paths = Paths(out)
    command = build_command(arguments, paths)
    assert command[1:4] == ["-m", "verl.trainer.main_ppo", "--config-dir"] and command[4] == str(RECIPES)
    config = compose_run([f"hydra.searchpath=['file://{command[4]}']", *command[5:]])
    assert config.trainer.v1.trainer_mode == "pipeline_rl" and config.data.train_batch_size == 16
    assert config.actor_rollout_ref.model.path == str(data / "model")
    assert config.trainer.default_local_dir == str(out / "run" / "checkpoints")
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 3
    assert find_problems(config) == []


def test_presets_come_in_front_of_the_config(tmp_path: Path) -> None:
    options = ["--preset", "grpo", "--preset", "tiny", "--config", "gpu", "--data", str(tmp_path)]
    arguments = parse_arguments([str(RECIPES / "tiny-gpu"), *options])
    command = build_command(arguments, Paths(tmp_path))
    config = compose_run([f"hydra.searchpath=['file://{RECIPES}']", *command[5:]])
    assert config.algorithm.adv_estimator == "grpo" and config.data.train_batch_size == 32
    assert config.actor_rollout_ref.actor.optim.lr == 5e-4, "sizes stand after the baseline's set-up"


def test_cpu_takes_its_config_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    arguments = parse_arguments([str(RECIPES / "smollm2-reasoning"), "--cpu"])
    assert arguments.config == "cpu" and arguments.data.name.endswith("-cpu")
    environment = build_environment(Paths(tmp_path), "id", cpu=True)
    assert environment["VERL_PLATFORM"] == "cpu" and environment["OMP_NUM_THREADS"] == "3"
    assert parse_arguments([str(RECIPES / "smollm2-reasoning")]).config == "config"
    assert "VERL_PLATFORM" not in build_environment(Paths(tmp_path), "id")


@pytest.mark.parametrize("config", ["config", "grpo"])
def test_smollm2_reasoning_takes_another_model(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "Qwen/Qwen3-0.6B")
    composed = compose_recipe("smollm2-reasoning", config)
    assert composed.actor_rollout_ref.model.path == "Qwen/Qwen3-0.6B"
    assert find_problems(composed) == []
    recipe = RECIPES / "smollm2-reasoning" / f"{config}.yaml"
    assert main(["plan", f"recipe={recipe}", "--gpu-memory-gib", "140"]) == 0


def test_finished_run_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = Paths(tmp_path)
    paths.run.mkdir()
    paths.finished.touch()
    assert launcher.main([str(RECIPES / "tiny-gpu"), "--out", str(tmp_path), "--data", str(tmp_path / "none")]) == 0
    assert "holds a finished run" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_unknown_config_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main([str(RECIPES / "tiny-gpu"), "--config", "ten", "--out", str(tmp_path)]) == 1
    assert "has no ten.yaml" in capsys.readouterr().err
