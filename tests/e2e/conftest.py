# SPDX-License-Identifier: Apache-2.0
"""Real runs of verl's main_ppo with vLLM and Ray on the CPU, each shared by several checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.launching import CPU_ENVIRONMENT, VerlRun, launch_verl, make_assets

RunVerl = Callable[..., VerlRun]
NAMED = ("+scalerl=[recipe,cpu]", "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05")
UNNAMED = ("+scalerl=cpu",)


@pytest.fixture(scope="session")
def tiny_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a random model and two data files (see `make_assets`)."""
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="session")
def run_verl(tmp_path_factory: pytest.TempPathFactory, tiny_assets: Path) -> RunVerl:
    """``run_verl(name, *overrides, env=..., folder=..., timeout_s=..., ...)`` launches main_ppo and waits.

    ``named=False`` takes the CPU settings only: a run that uses no name of our algorithm; ``presets`` replaces both.
    ``each_second`` is that of `launch_verl`.
    """

    def run(
        name: str,
        *overrides: str,
        env: dict[str, str] | None = None,
        folder: Path | None = None,
        timeout_s: float = 600,
        named: bool = True,
        presets: Sequence[str] = (),
        each_second: Callable[[set[int]], None] | None = None,
    ) -> VerlRun:
        folder = folder or tmp_path_factory.mktemp(name)
        lines = [*(presets or (NAMED if named else UNNAMED)), *overrides]
        return launch_verl(folder, tiny_assets, lines, {**CPU_ENVIRONMENT, **(env or {})}, timeout_s, each_second)

    return run
