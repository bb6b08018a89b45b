# SPDX-License-Identifier: Apache-2.0
"""``RAY_ADDRESS`` or ``ray start`` sends a run to a cluster that runs already: what this host has does not matter."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from scalerl_verl.config import machine_checks
from scalerl_verl.config.machine_checks import cluster_address, find_problems
from tests.unit.config.test_machine_checks import config, roomy_machine, set_shm  # noqa: F401 - fixtures

ADDRESS = "ray_kwargs.ray_init.address"


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, "", "local"),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        (None, "ray://h:10001", "ray://h:10001"),
        (None, "local", "local"),
        ("local", "10.0.0.1:6379", "local"),
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", "", "auto"),
        ("10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
    ],
)
def test_address_is_the_one_that_ray_takes(
    monkeypatch: pytest.MonkeyPatch, given: str | None, environment: str, expected: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", environment)
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null")
    assert cluster_address(OmegaConf.create({"ray_kwargs": {"ray_init": {"address": given}}})) == expected


@pytest.mark.parametrize("given", [None, "auto"])
@pytest.mark.parametrize("by_config", [False, True])
def test_a_run_joins_the_cluster_that_ray_start_left_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, by_config: bool
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    folder = tmp_path / "ray"
    folder.mkdir()
    ray_init = {"address": given, **({"_temp_dir": str(folder)} if by_config else {})}
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null" if by_config else str(tmp_path))
    (folder / "ray_current_cluster").write_text("10.0.0.3:6379\n")
    assert cluster_address(OmegaConf.create({"ray_kwargs": {"ray_init": ray_init}})) == "10.0.0.3:6379"
    assert cluster_address(OmegaConf.create({"ray_kwargs": {"ray_init": ray_init | {"address": "local"}}})) == "local"


@pytest.mark.parametrize(
    ("mode", "found", "given", "nodes", "fits"),
    [
        ("sync", 8, None, 1, True),
        ("sync", 0, None, 1, False),
        ("sync", 8, None, 2, False),
        ("sync", 0, 8, 1, True),
        ("sync", 8, 4, 1, False),
        ("pipeline_rl", 8, None, 1, False),
        ("pipeline_rl", 12, None, 1, True),
        ("sync", None, None, 1, True),
    ],
)
def test_gpus_that_nobody_has_are_refused_where_ray_would_wait_for_ever(
    config: DictConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    found: int | None,
    given: int | None,
    nodes: int,
    fits: bool,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(machine_checks, "count_gpus", lambda: found)
    changes = {"trainer.v1.trainer_mode": mode, "trainer.nnodes": nodes, "ray_kwargs.ray_init.num_gpus": given}
    rollout = {"actor_rollout_ref.rollout.nnodes": 1, "actor_rollout_ref.rollout.n_gpus_per_node": 4}
    for key, value in (changes | rollout).items():
        OmegaConf.update(config, key, value, force_add=True)
    problems = find_problems(config)
    assert len(problems) == int(not fits)
    if not fits:
        assert "trainer.n_gpus_per_node" in problems[0] and "VERL_PLATFORM=cpu" in problems[0]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    OmegaConf.update(config, "ray_kwargs.ray_init.num_gpus", None)
    assert find_problems(config) == []


def test_shared_memory_and_ports_of_this_host_are_checked_for_a_ray_of_the_run_s_own_only(
    config: DictConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_shm(monkeypatch, 0.01)
    monkeypatch.setattr(machine_checks, "_port_free", lambda port: False)
    OmegaConf.update(config, "ray_kwargs.ray_init.dashboard_port", 8265, force_add=True)
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert len(find_problems(config)) == 2
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_problems(config) == []


def test_files_of_this_host_are_not_looked_for_where_a_ray_client_sends_the_run_elsewhere(
    config: DictConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    OmegaConf.update(config, "data.train_files", "/on/the/cluster/train.parquet")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert len(find_problems(config)) == 1
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert find_problems(config) == []


def test_sizes_that_ray_would_refuse_for_a_running_cluster_are_refused_at_start(
    config: DictConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    OmegaConf.update(config, "ray_kwargs.ray_init.num_gpus", 8, force_add=True)
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert find_problems(config) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (problem,) = find_problems(config)
    for part in (
        "ray_kwargs.ray_init.num_gpus=8",
        "10.0.0.1:6379 (from RAY_ADDRESS, or ray start)",
        "+ray_kwargs.ray_init.address=local",
    ):
        assert part in problem
