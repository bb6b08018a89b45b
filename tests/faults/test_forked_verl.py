# SPDX-License-Identifier: Apache-2.0
"""A fork of verl differs where we look or patch: runs without our names go on, runs with them are refused at start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl_verl.upstream.spec import source_hash, text_hash
from scalerl_verl.upstream.static_source import read_source

GUARDED = ("trainer/ppo/rollout_corr_helper.py", "def apply_bypass_mode(")
STARTING = ("utils/config.py", "def validate_config(")
PATCHED = ("trainer/ppo/v1/trainer_base.py", "    def _update_actor(")
UNNAMED = """
import sys
sys.argv = ["main_ppo.py", *sys.argv[1:]]
import verl.trainer.ppo.rollout_corr_helper, verl.trainer.main_ppo
from verl.utils.config import validate_config
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=sys.argv[1:])
from scalerl_verl.verl.startup import prepare_run
print("ASKED", prepare_run(config), "RAY", "ray" in sys.modules and sys.modules["ray"].is_initialized())
"""


def make_fork(folder: Path, *places: tuple[str, str]) -> Path:
    """Links to the installed verl, but for files of which one function has one comment more."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations is not None
    installed = Path(next(iter(spec.submodule_search_locations)))
    for name, definition in places:
        parts = Path(name).parts
        for depth in range(len(parts)):
            mine, theirs = folder.joinpath("verl", *parts[:depth]), installed.joinpath(*parts[:depth])
            if mine.is_symlink():
                mine.unlink()
            mine.mkdir(parents=True, exist_ok=True)
            for path in theirs.iterdir():
                link = mine / path.name
                if path.name != "__pycache__" and not link.exists():
                    link.symlink_to(path)
        file, text = folder / "verl" / name, (installed / name).read_text()
        assert text.count(definition) == 1
        end = text.index(":\n", text.index(definition)) + 2
        file.unlink()
        indent = " " * (len(definition) - len(definition.lstrip()) + 4)
        file.write_text(f"{text[:end]}{indent}# a fork\n{text[end:]}")
    return folder


def run_in(fork: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(fork), os.environ.get("PYTHONPATH", str(Path.cwd()))])
    )
    return subprocess.run(
        [sys.executable, "-c", UNNAMED, *overrides], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fork(tmp_path_factory.mktemp("fork"), GUARDED, STARTING, PATCHED)


def test_run_without_our_names_goes_on_with_one_warning(fork: Path) -> None:
    done = run_in(fork, "algorithm.adv_estimator=grpo")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ASKED {} RAY False" in done.stdout
    warnings = [line for line in done.stderr.splitlines() if line.startswith("[scalerl_verl]")]
    assert len(warnings) == 1, done.stderr
    assert "changed in verl" in warnings[0] and "others go on" in warnings[0]


def test_run_with_our_names_is_refused_in_the_driver_with_every_symbol_that_changed(fork: Path) -> None:
    done = run_in(fork, "algorithm.adv_estimator=scalerl")
    assert done.returncode != 0
    assert "ASKED" not in done.stdout
    last = done.stderr[done.stderr.rindex("refuses to start this run") :]
    for symbol in ("apply_bypass_mode", "validate_config", "PPOTrainer._update_actor"):
        assert last.count(f"{symbol} changed in verl") == 1, last
    assert "scalerl doctor" in last and "SCALERL_VERL_ALLOW_UNKNOWN_SOURCE=1" in last


def test_changed_comment_where_we_only_patch_does_not_concern_a_run_without_our_names(tmp_path: Path) -> None:
    done = run_in(make_fork(tmp_path, PATCHED), "algorithm.adv_estimator=grpo")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[scalerl_verl]" not in done.stderr


def test_source_read_from_the_file_is_that_of_the_imported_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stub_package").mkdir()
    (tmp_path / "stub_package" / "__init__.py").write_text("from .inner import renamed as known\nvalue = 3\n")
    (tmp_path / "stub_package" / "inner.py").write_text(
        "import functools\n\n\ndef deco(f):\n    return f\n\n\n@deco\n@functools.cache\ndef renamed(\n    x=1,\n):\n"
        "    # first\n    return x\n    # last\n\n\nclass A:\n    if True:\n\n        @property\n        def p(self):\n"
        "            return 1\n\n    def run(self):\n        return 2\n\n\nclass B(A):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    inner = importlib.import_module("stub_package.inner")
    for target, value in (("A.run", inner.A.run), ("A", inner.A), ("renamed", inner.renamed)):
        text = read_source("stub_package.inner", target)
        assert text is not None and text_hash(text) == source_hash(value), target
    followed = read_source("stub_package", "known")
    assert followed is not None and text_hash(followed) == source_hash(inner.renamed)
    assert read_source("stub_package", "value") is None
    assert read_source("stub_package.inner", "B.run") is None, "inherited: only an import can tell"
    with pytest.raises(AttributeError):
        read_source("stub_package", "absent")
    with pytest.raises(ModuleNotFoundError):
        read_source("stub_package.absent", "x")
