# SPDX-License-Identifier: Apache-2.0
"""Real runs of verl's main_ppo with vLLM and Ray on the CPU, each shared by several checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e import interrupting, prompts_ahead, synchronous
from tests.e2e.launching import CPU_ENVIRONMENT, PATIENT, VerlRun, launch_verl, make_assets, set_back
from tests.e2e.toggles import all_toggles

RunVerl = Callable[..., VerlRun]
NAMED = (
    "+scalerl=[recipe,cpu]",
    "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
    # Responses of 16 characters have no room for the paper's phrase; test_interruption.py has its own lengths.
    "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
)
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


@pytest.fixture(scope="session")
def sync_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synchronous.make_data(tmp_path_factory.mktemp("sync-data"))


@pytest.fixture(scope="session")
def sync_run(
    run_verl: RunVerl, tiny_assets: Path, sync_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> VerlRun:
    """The recipe in verl's synchronous trainer, with a checkpoint and validations; toggles after the first step.

    Where `sync_resumed` has run, too, its metrics are those of `first_metrics`.
    """
    folder = tmp_path_factory.mktemp("sync")
    toggles = folder / "toggles.json"
    toggles.write_text(json.dumps(all_toggles()))
    return run_verl(
        "sync",
        *synchronous.overrides(tiny_assets, sync_data, folder / "rollouts"),
        f"trainer.total_training_steps={synchronous.STEPS}",
        "trainer.val_before_train=True",
        "trainer.logger=[console,file,tensorboard,wandb]",
        env={"PROBE_TOGGLES": str(toggles)},
        folder=folder,
    )


@pytest.fixture(scope="session")
def sync_resumed(sync_run: VerlRun, run_verl: RunVerl, tiny_assets: Path, sync_data: Path) -> VerlRun:
    """The same folder, continued from the checkpoint; the generator cannot load the weights of one step more."""
    assert sync_run.code == 0, sync_run.tail()
    folder = set_back(sync_run, synchronous.SAVED)
    weights = folder / "weights-resumed"
    weights.mkdir()
    num_loads = 1 + synchronous.STEPS - synchronous.SAVED
    return run_verl(
        "resumed",
        *synchronous.overrides(tiny_assets, sync_data, folder / "rollouts-resumed"),
        f"trainer.total_training_steps={synchronous.STEPS + 1}",
        folder=folder,
        env={
            "PROBE_DIR": str(weights),
            "SCALERL_VERL_STATUS_DIR": str(folder / "processes-resumed"),
            "PROBE_FAIL_LOAD": str(num_loads),
            **PATIENT,
        },
    )


@pytest.fixture(scope="session")
def interrupting_run(run_verl: RunVerl, tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Forced interruption in verl's colocate_async trainer (see `interrupting`)."""
    folder = tmp_path_factory.mktemp("interrupting")
    lines = interrupting.make_inputs(tiny_assets, folder)
    return run_verl("interrupting", *lines, folder=folder, env=interrupting.PROBES)


@pytest.fixture(scope="session")
def curriculum_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompts_ahead.make_data(tmp_path_factory.mktemp("curriculum-data"))


@pytest.fixture(scope="session")
def asynchronous_run(run_verl: RunVerl, curriculum_data: Path, tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    """Disaggregated, two trainer ranks, forced interruption, no-positive-resampling (see `prompts_ahead`)."""
    folder = tmp_path_factory.mktemp("asynchronous")
    lines = prompts_ahead.asynchronous_overrides(curriculum_data, folder / "rollouts")
    # The 'flush' fault of verl shows up only when INFO is enabled.
    probe = {"PROBE_PROMPTS": "1", "PROBE_GATE_STEP": str(prompts_ahead.SAVED), "VERL_LOGGING_LEVEL": "INFO"}
    return run_verl("asynchronous", *lines, folder=folder, env=probe)
