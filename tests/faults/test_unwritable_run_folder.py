# SPDX-License-Identifier: Apache-2.0
"""``trainer.default_local_dir`` that cannot be written is refused at start.

Files and errors are real: a file in place of a folder, and /dev/full, on which every write finds the disk full.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from scalerl_verl.config import run_folder
from scalerl_verl.config.machine_checks import find_problems
from scalerl_verl.curriculum.settings import complete
from scalerl_verl.names import SAMPLER_CLASS
from tests.unit.config.test_machine_checks import config, roomy_machine  # noqa: F401 - fixtures

FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cluster runs on this machine."""
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null")


def problems_with(config: DictConfig, folder: str, key: str = run_folder.KEY) -> list[str]:  # noqa: F811
    OmegaConf.update(config, key, folder, force_add=True)
    return find_problems(config)


def file_in_place(folder: Path) -> str:
    (folder / "file").write_text("")
    return str(folder / "file")


def file_above(folder: Path) -> str:
    return file_in_place(folder) + "/deeper/run"


def file_system_that_takes_nothing(folder: Path) -> str:
    return "/proc/scalerl/run"


@pytest.mark.parametrize("make", [file_in_place, file_above, file_system_that_takes_nothing])
def test_folder_that_takes_no_file_is_refused_at_start(make: Any, config: DictConfig, tmp_path: Path) -> None:  # noqa: F811
    folder = make(tmp_path)
    (problem,) = problems_with(config, folder)
    assert problem.startswith(f"trainer.default_local_dir={folder} cannot be written on this machine (")
    assert "other nodes" in problem
    OmegaConf.update(config, "data.sampler", {"class_path": SAMPLER_CLASS, "log_file": f"{folder}/x"}, force_add=True)
    (of_list,) = problems_with(config, str(tmp_path))
    assert of_list.startswith(f"data.sampler.log_file={folder}/x cannot be written on this machine (")


def test_full_disk_is_refused_at_start(
    config: DictConfig,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_folder.tempfile, "NamedTemporaryFile", lambda **_: FULL.open("wb"))
    (problem,) = problems_with(config, str(tmp_path / "run"))
    assert "No space left on device" in problem and not (tmp_path / "run").exists()


def test_url_is_refused_and_a_relative_path_is_that_of_the_driver(
    config: DictConfig,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (problem,) = problems_with(config, "hdfs://cluster/run")
    assert problem.startswith("trainer.default_local_dir=hdfs://cluster/run is a URL") and "default_hdfs_dir" in problem
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert problems_with(config, "checkpoints/a/b") == []
    (problem,) = problems_with(config, "file/a")
    assert "Not a directory" in problem
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert problems_with(config, "file/a") == [], "the trainer may run in another directory there"
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert problems_with(config, str(tmp_path / "file")) == [], "the trainer's files are not here"


def test_the_look_leaves_nothing_behind(config: DictConfig, tmp_path: Path) -> None:  # noqa: F811
    before = sorted(os.listdir(tmp_path))
    assert problems_with(config, str(tmp_path / "a" / "b")) == []
    assert sorted(os.listdir(tmp_path)) == before
    (tmp_path / "a").mkdir()
    assert problems_with(config, str(tmp_path / "a")) == [] and os.listdir(tmp_path / "a") == []


@pytest.mark.parametrize("before_training", [True, False])
def test_checkpoints_of_a_folder_that_cannot_be_written_can_be_validated(
    before_training: bool,
    config: DictConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Fault: a validation of somebody else's checkpoint was refused, though it writes nothing there."""
    folder = file_in_place(tmp_path)
    changes = {"trainer.val_only": True, "trainer.val_before_train": before_training, run_folder.KEY: folder}
    for key, value in {**changes, "data.sampler.class_path": SAMPLER_CLASS}.items():
        OmegaConf.update(config, key, value, force_add=True)
    assert len(find_problems(config)) == (not before_training), "verl trains if it does not validate before training"
    complete(config)
    assert config.data.sampler.log_file == (None if before_training else f"{folder}/curriculum.jsonl")
