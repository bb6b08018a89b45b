# SPDX-License-Identifier: Apache-2.0
"""``RAY_ADDRESS`` sends a run to a cluster that runs already: what this host has does not matter."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from scalerl_verl.plugins import machine_checks
from scalerl_verl.plugins.machine_checks import cluster_address, find_problems
from tests.unit.plugins.test_machine_checks import config, roomy_machine, set_shm  # noqa: F401 - fixtures

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
    assert cluster_address(OmegaConf.create({"ray_kwargs": {"ray_init": {"address": given}}})) == expected


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
    OmegaConf.update(config, "ray_kwargs.ray_init.num_gpus", 2, force_add=True)
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert find_problems(config) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (problem,) = find_problems(config)
    for part in ("ray_kwargs.ray_init.num_gpus=2", "10.0.0.1:6379 (RAY_ADDRESS)", "+ray_kwargs.ray_init.address=local"):
        assert part in problem
