# SPDX-License-Identifier: Apache-2.0
"""The launch scripts of recipes/qwen3: composed, past the start-up checks, planned, and refused on a smaller cluster.

Each script is run with stand-ins of `scalerl` and `python3` that say what they were called with.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scalerl_verl.cli import main
from scalerl_verl.config import machine_checks
from scalerl_verl.config.checks import find_problems
from scalerl_verl.planning.resolve import compose_run
from tests.paths import RECIPES

GPUS = {
    "run_qwen3_0.6b_fsdp.sh": 1,
    "run_qwen3_1.7b_fsdp.sh": 2,
    "run_qwen3_8b_fsdp.sh": 8,
    "run_qwen3_8b_fsdp_80gpus.sh": 80,
}
README = (RECIPES / "qwen3" / "README.md").read_text()
SAY = '#!/bin/sh\nprintf \'%s\\0\' "$VERL_FILE_LOGGER_PATH" "$@" > "$(dirname "$0")/called"\n'


def called_with(folder: Path, script: str, *options: str, **environment: str) -> list[str]:
    """What a script calls `main_ppo` or `scalerl` with: the file of metrics, then the arguments."""
    for name in ("scalerl", "python3"):
        (folder / name).write_text(SAY)
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "HOME": str(folder), "DATA_DIR": str(folder), **environment}
    subprocess.run(["bash", str(RECIPES / "qwen3" / script), *options], env=settings, cwd=folder, check=True)
    return (folder / "called").read_text().split("\0")[:-1]


def overrides_of(folder: Path, script: str, *options: str, **environment: str) -> list[str]:
    _, *arguments = called_with(folder, script, *options, **environment)
    assert arguments[:2] == ["-m", "verl.trainer.main_ppo"]
    return arguments[2:]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_script_is_tested() -> None:
    assert {path.name for path in (RECIPES / "qwen3").glob("*.sh")} == set(GPUS)


@pytest.mark.parametrize("script", GPUS)
def test_script_fits_with_the_best_split_and_is_refused_on_a_smaller_cluster(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, gpus = overrides_of(tmp_path, script), GPUS[script]
    _, command, *planned = called_with(tmp_path, script, "--plan")
    assert (command, planned) == ("plan", overrides), "what is planned is what runs"
    config = compose_run(overrides)
    assert find_problems(config) == []
    assert Path(config.reward.custom_reward_function.path).resolve() == RECIPES / "common" / "reward.py"
    code, found = plan(capsys, *overrides, "--gpus", str(gpus))
    assert code == 0 and found["problems"] == []
    split, best = found["balance"]["this_split"], found["balance"]["best_split"]
    if best is not None:
        assert split == best and split["trainers"] + split["generators"] == gpus
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{script}` |")]
    assert row.endswith(f"| {split['training_s']:.3g} | {split['generation_s']:.3g} |")
    if gpus > 1:
        code, found = plan(capsys, *overrides, "--gpus", str(gpus - 1))
        assert code == 3 and any(f"the cluster has {gpus - 1}" in problem for problem in found["problems"])
    monkeypatch.setattr(machine_checks, "count_gpus", lambda: gpus - 1)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (said,) = [text for text in machine_checks.find_problems(config) if "GPUs" in text]
    assert f"needs {gpus} GPUs" in said and f"this machine has {gpus - 1}" in said


def test_settings_of_the_block_reach_the_run(tmp_path: Path) -> None:
    script = "run_qwen3_8b_fsdp.sh"
    settings = {"MODEL_PATH": "my/model", "MAX_RESPONSE": "512", "THINKING_BUDGET": "[100,200]", "STEPS": "7"}
    overrides = overrides_of(tmp_path, script, "trainer.save_freq=9", OUT_DIR="mine", TRAIN_NODES="2", **settings)
    config = compose_run(overrides)
    assert config.actor_rollout_ref.model.path == "my/model" and config.data.max_response_length == 512
    assert config.algorithm.scalerl.interruption.thinking_budget == [100, 200]
    assert (config.trainer.total_training_steps, config.trainer.save_freq, config.trainer.nnodes) == (7, 9, 2)
    assert (tmp_path / "mine").is_dir() and called_with(tmp_path, script)[0].endswith("/metrics.jsonl")


@pytest.mark.parametrize("script", GPUS)
def test_every_setting_of_the_block_is_used(script: str) -> None:
    block, _, rest = (RECIPES / "qwen3" / script).read_text().partition("\nargs=(")
    names = re.findall(r"([A-Z_]+)=\$\{\1:-", block)
    assert len(names) > 10 and [name for name in names if f"${name}" not in rest and f"({name}" not in rest] == []
