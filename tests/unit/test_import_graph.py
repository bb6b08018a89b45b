# SPDX-License-Identifier: Apache-2.0
"""What the package may import where, so that it stays light to load and its algorithms can be lifted out."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scalerl_verl
from scalerl_verl.upstream.activation import FORWARDED_ENV

PACKAGE = Path(scalerl_verl.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = (
    ("errors", "terminal", "json_lines", "bookkeeping"),
    ("names",),
    ("metrics", "columns"),
    ("upstream", "shapes", "engine_context"),
    ("generator",),
    ("pipeline", "loss"),
    ("interruption",),
    ("advantage",),
    ("curriculum", "head"),
    ("config",),
    ("planning", "cpu", "scaling"),
    ("ledger",),
    ("verl",),
    ("doctor",),
    ("cli",),
)
"""Rooms of the package, the lowest first: one may import what stands in a line above its own, and no other room."""
ALGORITHMS = ("loss", "advantage", "curriculum", "head", "interruption", "scaling")
ALLOWED = {"numpy", "scipy", "torch", "omegaconf", "transformers", "tensordict", "transfer_queue", "ray", "pyarrow"}
ALLOWED |= {"matplotlib", "plotly", "rich"}  # of the curve commands
DOORS = ("verl", "vllm")
"""Beginnings of the names of those files of an algorithm's room that may import verl and vLLM."""
KERNELS = {"head/rows_triton.py": {"triton"}}
"""Modules that are written in another language's package, imported only where they run."""
MAX_LINES = 600
HEAVY = ("torch", "verl", "vllm", "ray", "numpy", "transformers", "hydra", "omegaconf")


def module_id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def is_algorithm(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] in ALGORITHMS


def imports_of(path: Path) -> set[str]:
    """Absolute names of everything a module imports anywhere, those inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: relative imports hide what is imported"
            whole = node.module == "scalerl_verl"
            found.update(f"scalerl_verl.{alias.name}" for alias in node.names) if whole else found.add(
                node.module or ""
            )
    return found


@pytest.mark.parametrize("module", ["scalerl_verl", "scalerl_verl.verl.patches", "scalerl_verl.cli"])
def test_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_run_without_our_names_loads_no_room_that_does_something() -> None:
    """verl's driver has the names of our losses and estimator; what they need comes with their first call."""
    code = (
        "import sys, verl.trainer.main_ppo; from verl.trainer.ppo import core_algos; "
        "print('scalerl_cispo' in core_algos.POLICY_LOSS_REGISTRY, 'scalerl' in core_algos.ADV_ESTIMATOR_REGISTRY); "
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('scalerl_verl.')})"
    )
    environment = {name: value for name, value in os.environ.items() if name not in FORWARDED_ENV}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    registered, rooms = run.stdout.splitlines()[-2:]
    assert registered == "True True"
    # Of cpu, head and pipeline what is bound of vLLM; bookkeeping and json_lines write down what was found at start.
    lists = {"cpu", "head", "pipeline"}
    assert set(rooms.split()) <= {"names", "upstream", "verl", "errors", "bookkeeping", "json_lines", *lists}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def level_of(room: str) -> int:
    return next(number for number, rooms in enumerate(ROOMS) if room in rooms)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent != PACKAGE or path.stem != "__init__"], ids=module_id
)
def test_arrows_between_rooms_run_down(path: Path) -> None:
    room = room_of(path)
    for name in imports_of(path):
        top, *rest = name.split(".")
        if top == "scalerl_verl" and rest and rest[0] not in (room, "__version__"):
            assert level_of(rest[0]) < level_of(room), f"{module_id(path)} imports {name}"


def test_every_room_is_in_the_table_once() -> None:
    rooms = {room_of(path) for path in MODULES} - {"__init__", "configs"}
    assert sorted(name for line in ROOMS for name in line) == sorted(rooms)


@pytest.mark.parametrize("path", [path for path in MODULES if is_algorithm(path)], ids=module_id)
def test_arithmetic_does_without_verl_and_vllm(path: Path) -> None:
    allowed = ALLOWED | KERNELS.get(module_id(path), set())
    if path.name.startswith(DOORS):
        allowed |= {"verl", "vllm", "megatron"}  # which verl's Megatron engine stands on
    for name in imports_of(path):
        top = name.split(".")[0]
        assert top in {"scalerl_verl", *allowed} or top in sys.stdlib_module_names, f"{module_id(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_is_short_enough_to_be_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_module_starts_with_its_licence(path: Path) -> None:
    assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
