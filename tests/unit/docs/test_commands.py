# SPDX-License-Identifier: Apache-2.0
"""Every command in the pages is accounted for in docs/mkdocs/commands.yaml; those that take seconds are run here.

The lines are taken from the pages, not copied: what is run is what the reader sees. What is the reader's (`...`, paths
of runs) is filled in.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from recipes.ablation import sweep
from recipes.launch import launcher
from recipes.launch.command import parse_arguments
from scalerl_verl.cli import main
from scalerl_verl.config import machine_checks
from scalerl_verl.config.checks import find_problems
from scalerl_verl.planning.resolve import compose_run
from tests.paths import REPO
from tests.unit.composed import compose_config
from tests.unit.scaling.logs.conftest import make_metrics, write_jsonl

REGISTRY = yaml.safe_load((REPO / "docs" / "mkdocs" / "commands.yaml").read_text())
ENTRIES: dict[str, dict[str, Any]] = {" ".join(entry["command"].split()): entry for entry in REGISTRY}
SHORTER = {"--bootstrap 1000": "--bootstrap 20", "--budget 30000": "--budget 30"}
"""What is run smaller here, as `how` in the registry says."""


def _load_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", REPO / "docs" / "mkdocs" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = _load_pages()
SHOWN = {command: page for page in PAGES.find_pages() for command in PAGES.find_commands(page.read_text())}
"""Command -> a page that shows it."""


def shown(beginning: str, test: str) -> list[str]:
    """Commands of the pages that begin so and that the registry gives to a test of this file."""
    mine = f"tests/unit/docs/test_commands.py::{test}"
    return [c for c in SHOWN if c.startswith(beginning) and ENTRIES.get(c, {}).get("executed") == mine]


def test_blocks_are_found() -> None:
    text = "```bash\na --b \\\n  c    # why\n# only a comment\nd;  e 'f; g'\n```\n```text\nno\n```\n"
    assert list(PAGES.find_commands(text)) == ["a --b c", "d", "e 'f; g'"]


@pytest.mark.parametrize("page", PAGES.find_pages(), ids=lambda path: str(path.relative_to(REPO)))
def test_no_command_hides_in_a_block_of_another_language(page: Path) -> None:
    """Such a block is not searched for commands."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    others = [text for language, text in blocks if language not in ("bash", "sh", "shell", "console")]
    program = re.compile(r"^\s*\$? ?(scalerl|python|bash|pip|mkdocs|git) \S", re.MULTILINE)
    assert [text for text in others if program.search(text)] == []


def test_every_command_of_the_pages_is_accounted_for() -> None:
    missing = {command: page.name for command, page in SHOWN.items() if command not in ENTRIES}
    assert not missing, "add them to docs/mkdocs/commands.yaml, with the test that runs them"
    assert sorted(set(ENTRIES) - set(SHOWN)) == [], "no page shows these any more"


@pytest.mark.parametrize("command", ENTRIES)
def test_entry_says_who_runs_it_or_when_it_ran(command: str) -> None:
    entry = ENTRIES[command]
    assert set(entry) <= {"command", "executed", "how", "gpu", "by_hand"}
    assert "executed" in entry or isinstance(entry.get("gpu"), dict) or isinstance(entry.get("by_hand"), dict)
    if "executed" in entry:
        file, _, name = entry["executed"].partition("::")
        assert (REPO / file).is_file()
        if name:
            assert re.search(rf"^def {name}\(", (REPO / file).read_text(), re.MULTILINE), f"{file} has no {name}"
    for run in (entry.get("gpu"), entry.get("by_hand")):
        if run not in (None, "not yet"):
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(run["date"])) and run["result"]
            assert re.fullmatch(r"[0-9a-f]{7,40}", str(run["commit"])), run


def arguments_of(command: str, folder: Path) -> list[str]:
    """What bash makes of a command's words in ``folder``, without the program."""
    words = command.split(" ", 1)[1]
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {words}"], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the pages call runs/a, run.csv and so on."""
    folder = tmp_path_factory.mktemp("pages")
    kept = REPO / "tests" / "unit" / "scaling" / "logs" / "quickstart_ledger" / "metrics.jsonl"
    for number, name in enumerate(("runs/a", "runs/b")):
        write_jsonl(folder / name / "metrics.jsonl", make_metrics(A=0.645 - 0.05 * number, seed=number))
    (folder / "outputs" / "quickstart" / "run").mkdir(parents=True)
    shutil.copy(kept, folder / "outputs" / "quickstart" / "run")
    rows = [data for data in make_metrics().values() if "scalerl/validation/pass_rate" in data][1:]
    lines = [f"{row['scalerl/compute/gpu_hours']},{row['scalerl/validation/pass_rate']}" for row in rows]
    (folder / "run.csv").write_text("\n".join(["compute,score", *lines]) + "\n")
    curves = [f"curves/{recipe}.seed{seed}" for recipe in ("base", "new") for seed in (0, 1)]
    for name in (*curves, *(f"sizes/qwen-{size}b" for size in (0.5, 1.5, 7)), "settings/n8", "settings/n16"):
        path = folder / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(["compute,score", *lines]) + "\n")
    for number, name in enumerate(("scalerl.all_pieces", "leave_one_out.loss")):
        path = folder / "outputs" / "ablation" / "curves" / f"{name}.seed0.jsonl"
        write_jsonl(path, make_metrics(A=0.645 - 0.05 * number, seed=number))
    (command,) = (line for line in SHOWN if line.startswith("python -m benchmarks.miniature.bench --curves"))
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, *arguments_of(command, folder)], cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True
    )
    return folder


@pytest.mark.parametrize("command", shown("scalerl ", "test_curve_command_runs"))
def test_curve_command_runs(
    command: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    code = main(arguments_of(command, runs))
    out = capsys.readouterr()
    assert code in (0, 3), out.err
    if "--json" in command:
        json.loads(out.out)
    if "curves.html" in command:
        assert "<svg" in (runs / "curves.html").read_text()


@pytest.mark.parametrize("command", shown("scalerl plan", "test_plan_command_runs"))
def test_plan_command_runs(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(REPO)
    command = command.replace("model.path=...", "model.path=Qwen/Qwen3-8B-Base").replace(" ... ", " ")
    code = main(arguments_of(command, REPO))
    out = capsys.readouterr()
    assert code in (0, 3), out.err
    assert "8.19B parameters" in out.out or json.loads(out.out)


@pytest.mark.parametrize(
    "command", shown("python -m verl.trainer.main_ppo", "test_launch_line_composes_and_contradicts_nothing")
)
def test_launch_line_composes_and_contradicts_nothing(command: str) -> None:
    words = [word for word in arguments_of(command, REPO)[2:] if not word.endswith("...")]
    assert find_problems(compose_config(*words)) == []


@pytest.mark.parametrize("command", shown("bash recipes/", "test_recipe_prints_a_launch_line_that_composes"))
def test_recipe_prints_a_launch_line_that_composes(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *options = arguments_of(command, REPO)
    recipe = REPO / Path(script).parent
    assert (REPO / script).resolve() == REPO / "recipes" / "launch" / "run.sh"
    assert launcher.main([str(recipe), *options, "--print"]) == 0
    if "--cpu" in options:
        monkeypatch.setenv("VERL_PLATFORM", "cpu")  # as the launcher does
    _, *line = arguments_of(f"x {capsys.readouterr().out.strip()}", REPO)
    assert line[:2] == ["-m", "verl.trainer.main_ppo"] and line[2] == "--config-dir"
    config = compose_run([f"hydra.searchpath=['file://{line[3]}']", *line[4:]])
    assert find_problems(config) == []


def test_sweep_takes_the_options_of_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = shown("python recipes/ablation/sweep.py", "test_sweep_takes_the_options_of_the_pages")
    assert len(commands) == 3
    for command in commands:
        options = arguments_of(command, REPO)[1:]
        extra = [] if {"--list", "--collect"} & set(options) else ["--print"]
        assert sweep.main([*options, *extra, "--out", str(tmp_path)]) == 0
        assert capsys.readouterr().out.strip()


STUB_PYTHON = """#!/bin/sh
printf '%s\\n' "$VERL_PLATFORM" "$RAY_ADDRESS" "$@" > "$(dirname "$0")/../../called"
"""


def test_quickstart_takes_the_options_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.sh as it is, with an environment that only notes the last call."""
    (command,) = shown("bash recipes/quickstart/run.sh", "test_quickstart_takes_the_options_of_the_pages")
    folder, python = tmp_path / "recipes" / "quickstart", tmp_path / ".venv" / "bin" / "python"
    folder.mkdir(parents=True)
    python.parent.mkdir(parents=True)
    shutil.copy(REPO / "recipes" / "quickstart" / "run.sh", folder)
    (folder / "env.sh").write_text("check_platform() { :; }\nensure_env() { :; }\n")
    python.write_text(STUB_PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    subprocess.run(["bash", *arguments_of(command, REPO)], cwd=tmp_path, check=True)
    platform, address, script, *given = (tmp_path / "called").read_text().splitlines()
    assert (platform, address) == ("cpu", "")
    assert Path(script).relative_to(tmp_path) == Path("recipes/launch/run.py")
    arguments = parse_arguments(given)
    assert arguments.recipe == folder and arguments.steps == 60 and arguments.again
    assert arguments.out == tmp_path / "outputs" / "quickstart"
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    config = compose_config("+scalerl=quickstart", *arguments.overrides)
    assert config.actor_rollout_ref.actor.policy_loss.eps_max == 4 and find_problems(config) == []


def test_doctor_reads_the_folder_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCALERL_VERL_STATUS_DIR", str(tmp_path))
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "auto")
    monkeypatch.setattr(machine_checks, "available_memory_gib", lambda: 100.0)  # whatever else runs here
    (tmp_path / "1.json").write_text(json.dumps({"pid": 4711, "title": "driver", "loaded_by": ["verl"], "patches": {}}))
    (command,) = shown("scalerl doctor", "test_doctor_reads_the_folder_of_a_run")
    assert main([*arguments_of(command, tmp_path), "--no-processes"]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert out.startswith("All is well: ") and "4711 driver" in out
