# SPDX-License-Identifier: Apache-2.0
"""The package is installed, but the run uses none of its names: verl and vLLM must be as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from scalerl_verl.upstream.spec import is_importable
from scalerl_verl.verl.patches import SYMBOLS

RUN_WITHOUT_OUR_NAMES = """
import importlib, inspect, json, os
from scalerl_verl.cpu.vllm_alias import install_vllm_alias
from scalerl_verl.upstream.spec import is_importable, resolve
from scalerl_verl.verl.patches import SYMBOLS

install_vllm_alias()
import verl
from scalerl_verl.verl import vllm_entry
vllm_entry.register()

targets = {}
for spec in filter(is_importable, SYMBOLS):
    _, _, value = resolve(importlib.import_module(spec.module), spec.target)
    targets[spec.name] = {
        "wrapped": hasattr(value, "__wrapped__") or (callable(value) and inspect.unwrap(value) is not value),
        "file": getattr(getattr(value, "__code__", None), "co_filename", None),
        "inner_file": getattr(getattr(inspect.unwrap(value), "__code__", None), "co_filename", None),
    }

from verl.workers.engine import EngineRegistry

engines = [engine for model in EngineRegistry._engines.values() for keys in model.values() for engine in keys.items()]

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from scalerl_verl.verl.startup import prepare_run
from scalerl_verl.upstream.registry import states

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=["algorithm.adv_estimator=grpo"])
before = OmegaConf.to_yaml(config)
asked = prepare_run(config)
print("UNTOUCHED " + json.dumps({
    "engines": [[key, engine.__module__] for key, engine in engines],
    "targets": targets,
    "states": {name: state.status for name, state in states().items()},
    "asked": asked,
    "same_config": OmegaConf.to_yaml(config) == before,
    "active_env": os.environ.get("SCALERL_VERL_ACTIVE"),
}))
"""


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """What a process of such a run found, after importing every module we could patch."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_OUR_NAMES], env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.split("\n") if line.startswith("UNTOUCHED ")]
    assert lines, done.stderr[-2000:]
    assert "[scalerl_verl] active" not in done.stderr
    return json.loads(lines[-1].removeprefix("UNTOUCHED "))


def test_every_patch_but_the_start_up_check_is_dormant(plain: dict[str, Any]) -> None:
    # Nothing imports a module that stands on a package which is not there.
    dormant = {spec.name: "dormant" if is_importable(spec) else "waiting" for spec in SYMBOLS if spec.when != "always"}
    assert plain["states"] == {spec.name: "applied" for spec in SYMBOLS} | dormant


@pytest.mark.parametrize(
    "spec", [spec for spec in SYMBOLS if spec.when != "always" and is_importable(spec)], ids=lambda spec: spec.name
)
def test_target_is_the_original_object(plain: dict[str, Any], spec: Any) -> None:
    target = plain["targets"][spec.name]
    # What ours only override or call may be wrapped by verl itself.
    assert target["wrapped"] is False or not spec.changes_upstream
    if target["file"] is not None:
        # verl's own decorators may come from elsewhere (contextlib), ours from here.
        assert f"/{spec.distribution}/" in target["inner_file"] and "scalerl_verl" not in target["file"]


def test_check_above_tells_a_wrapped_function_from_an_original(plain: dict[str, Any]) -> None:
    """The start-up check is applied in every run, so it must look wrapped here."""
    target = plain["targets"]["verl.startup_check"]
    assert target["wrapped"] is True
    assert "scalerl_verl" in target["file"]


def test_engines_are_verl_s_own(plain: dict[str, Any]) -> None:
    assert plain["engines"], "verl's registry has another layout: read it another way"
    assert {key for key, _ in plain["engines"]} <= {"cuda", "npu"}
    assert all(module.startswith("verl.workers.engine.") for _, module in plain["engines"])


def test_start_up_check_changes_neither_config_nor_environment(plain: dict[str, Any]) -> None:
    assert plain["asked"] == {}
    assert plain["same_config"] is True
    assert plain["active_env"] is None
