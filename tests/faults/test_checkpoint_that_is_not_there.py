# SPDX-License-Identifier: Apache-2.0
"""A checkpoint to resume that does not exist was found after all engines had started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from scalerl_verl.config.machine_checks import find_problems
from tests.unit.config.test_machine_checks import config, roomy_machine  # noqa: F401 - fixtures


def problems_of(config: DictConfig, mode: Any, path: Any) -> list[str]:  # noqa: F811
    OmegaConf.update(config, "trainer.resume_mode", mode, force_add=True)
    OmegaConf.update(config, "trainer.resume_from_path", path, force_add=True)
    return find_problems(config)


@pytest.mark.parametrize("name", [None, "", "run", "global_step_x", "global_step_5/actor", "global_step_5/"])
@pytest.mark.parametrize("address", ["", "10.0.0.1:6379"])
def test_path_that_names_no_step_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    config: DictConfig,  # noqa: F811
    tmp_path: Path,
    name: str | None,
    address: str,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    (problem,) = problems_of(config, "resume_path", name and f"{tmp_path}/{name}")
    assert "trainer.resume_from_path=" in problem and "global_step_N" in problem


def test_path_must_exist_where_the_run_s_own_ray_reads_it(
    monkeypatch: pytest.MonkeyPatch,
    config: DictConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    folder = tmp_path / "global_step_5"
    (problem,) = problems_of(config, "resume_path", str(folder))
    assert "is not a directory" in problem
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert problems_of(config, "resume_path", str(folder)) == []
    monkeypatch.setenv("RAY_ADDRESS", "")
    folder.mkdir()
    assert problems_of(config, "resume_path", str(folder)) == []


@pytest.mark.parametrize(("mode", "fits"), [("auto", True), ("disable", True), ("latest", False), ("resume", False)])
def test_modes_that_verl_does_not_know_are_refused(
    config: DictConfig,  # noqa: F811
    mode: str,
    fits: bool,
) -> None:
    problems = problems_of(config, mode, None)
    assert len(problems) == int(not fits) and all("auto, disable, resume_path" in problem for problem in problems)
