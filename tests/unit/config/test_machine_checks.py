# SPDX-License-Identifier: Apache-2.0
"""What a run needs on this machine: each missing thing is named with its key before anything starts."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf

from scalerl_verl.config import machine_checks
from scalerl_verl.config.machine_checks import GIB, MIN_CPU_MEMORY_GIB, find_problems
from scalerl_verl.upstream.activation import PLATFORM_ENV

MODEL = "actor_rollout_ref.model.path"
REWARD = "reward.custom_reward_function.path"
REAL_AVAILABLE_MEMORY_GIB = machine_checks.available_memory_gib


def write_parquet(path: Path, *columns: str) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({column: ["x"] for column in columns}), path)
    return path


@pytest.fixture(autouse=True)
def roomy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU platform, eight GPUs and plenty of memory whatever else runs here."""
    monkeypatch.setenv(PLATFORM_ENV, "")
    monkeypatch.setattr(machine_checks, "count_gpus", lambda: 8)
    set_memory(monkeypatch, 100.0)
    set_shm(monkeypatch, 100.0)


def set_memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(machine_checks, "available_memory_gib", lambda: gib)


def set_shm(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(
        machine_checks.shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=gib * GIB) if str(path) == "/dev/shm" else real(path),
    )


@pytest.fixture
def config(tmp_path: Path) -> DictConfig:
    """A config whose every file exists."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    reward = tmp_path / "reward.py"
    reward.write_text("")
    data = write_parquet(tmp_path / "train.parquet", "prompt", "data_source", "reward_model")
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"model": {"path": str(model)}, "rollout": {"name": "vllm", "checkpoint_engine": {}}},
            "data": {"train_files": str(data), "val_files": [str(data)], "prompt_key": "prompt"},
            "reward": {"custom_reward_function": {"path": str(reward)}, "reward_model": {"enable": False}},
            "ray_kwargs": {"ray_init": {}},
            "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
            "transfer_queue": {"metrics": {"enabled": False}},
        }
    )


def problem_of(config: DictConfig, path: str, value: Any) -> str:
    """The one problem of the config with one value changed."""
    OmegaConf.update(config, path, value)
    (problem,) = find_problems(config)
    return problem


def test_complete_machine_has_no_problem(config: DictConfig) -> None:
    assert find_problems(config) == []


def test_missing_model_directory(config: DictConfig, tmp_path: Path) -> None:
    problem = problem_of(config, MODEL, str(tmp_path / "absent"))
    assert f"{MODEL}={tmp_path}/absent is not a directory" in problem


def test_model_directory_without_a_config(config: DictConfig, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    (problem,) = find_problems(config)
    assert f"{MODEL}={tmp_path}/model has no config.json" in problem


def test_generator_that_is_not_set(config: DictConfig) -> None:
    """verl has no default; its first worker said so after Ray had started."""
    assert "rollout.name is not set: set it to vllm" in problem_of(config, "actor_rollout_ref.rollout.name", None)


def test_model_that_is_not_set(config: DictConfig) -> None:
    assert f"{MODEL} is not set" in problem_of(config, MODEL, None)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "hdfs://cluster/model"])
def test_model_on_the_hub_or_in_remote_storage_is_not_looked_for_here(config: DictConfig, name: str) -> None:
    OmegaConf.update(config, MODEL, name)
    assert find_problems(config) == []


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_missing_data_file(config: DictConfig, key: str, tmp_path: Path) -> None:
    problem = problem_of(config, key, [str(tmp_path / "train.parquet"), str(tmp_path / "absent.parquet")])
    assert f"{key}={tmp_path}/absent.parquet does not exist" in problem


@pytest.mark.parametrize("value", [None, []])
def test_data_that_is_not_set(config: DictConfig, value: Any) -> None:
    assert "data.train_files is not set" in problem_of(config, "data.train_files", value)


def test_remote_data_is_not_looked_for_here(config: DictConfig) -> None:
    OmegaConf.update(config, "data.train_files", "hdfs://cluster/train.parquet")
    assert find_problems(config) == []


@pytest.mark.parametrize("content", [b"", b"this is no parquet file at all, but it is long enough to be one"])
def test_broken_parquet(config: DictConfig, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.parquet"
    path.write_bytes(content)
    assert f"data.train_files={path} cannot be read as .parquet" in problem_of(config, "data.train_files", str(path))


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_missing_column_is_named_with_the_key_and_the_columns_found(
    config: DictConfig, tmp_path: Path, column: str
) -> None:
    present = [name for name in ("prompt", "data_source", "reward_model") if name != column]
    path = write_parquet(tmp_path / "short.parquet", *present)
    problem = problem_of(config, "data.val_files", str(path))
    assert f"data.val_files={path} has no column '{column}' (found: {', '.join(present)})" in problem


def test_prompt_column_follows_its_key(config: DictConfig, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "other.parquet", "question", "data_source", "reward_model")
    OmegaConf.update(config, "data.prompt_key", "question")
    OmegaConf.update(config, "data.train_files", str(path))
    (problem,) = find_problems(config)
    assert problem.startswith("data.val_files=") and "no column 'question'" in problem
    assert "data.prompt_key" in problem


def test_reward_column_is_not_needed_with_a_reward_model(config: DictConfig, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "short.parquet", "prompt", "data_source")
    OmegaConf.update(config, "data.train_files", str(path))
    OmegaConf.update(config, "reward.reward_model.enable", True)
    assert find_problems(config) == []


def test_missing_reward_file(config: DictConfig, tmp_path: Path) -> None:
    problem = problem_of(config, REWARD, str(tmp_path / "absent.py"))
    assert f"{REWARD}={tmp_path}/absent.py does not exist" in problem


@pytest.mark.parametrize("path", [None, "pkg://my.rewards", "hdfs://cluster/reward.py"])
def test_reward_that_is_no_local_file_is_not_looked_for_here(config: DictConfig, path: str | None) -> None:
    OmegaConf.update(config, REWARD, path)
    assert find_problems(config) == []


@pytest.mark.parametrize("key", ["ray_kwargs.ray_init.dashboard_port", "transfer_queue.metrics.port"])
def test_taken_port_is_named_with_its_key(config: DictConfig, key: str) -> None:
    OmegaConf.update(config, "transfer_queue.metrics.enabled", True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"{key}={port} is taken" in problem_of(config, key, port)
        OmegaConf.update(config, "transfer_queue.metrics.enabled", False)
        OmegaConf.update(config, "ray_kwargs.ray_init.include_dashboard", False)
        assert find_problems(config) == [], "a port that the run does not open may be taken"
    OmegaConf.update(config, "transfer_queue.metrics.enabled", True)
    OmegaConf.update(config, "ray_kwargs.ray_init.include_dashboard", True)
    assert find_problems(config) == []


def test_too_little_memory_on_the_cpu(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    set_memory(monkeypatch, MIN_CPU_MEMORY_GIB - 0.5)
    assert find_problems(config) == [], "on GPUs the host's memory is not what limits"
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    (problem,) = find_problems(config)
    assert f"{MIN_CPU_MEMORY_GIB - 0.5:.1f} GiB of memory are available" in problem
    assert "actor_rollout_ref.rollout.agent.num_workers" in problem


def test_too_little_shared_memory_for_object_store_and_buckets(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 GiB of store, 0.25 GiB of slack; on the CPU, where weights travel through it, 0.5 GiB of bucket too."""
    OmegaConf.update(config, "ray_kwargs.ray_init.object_store_memory", GIB)
    OmegaConf.update(config, "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", 512)
    set_shm(monkeypatch, 1.26)
    assert find_problems(config) == []
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    (problem,) = find_problems(config)
    assert "/dev/shm has 1.26 GiB free, this run needs 1.75" in problem
    assert "--shm-size" in problem and "ray_kwargs.ray_init.object_store_memory" in problem
    set_shm(monkeypatch, 1.76)
    assert find_problems(config) == []


def test_memory_of_an_existing_cluster_is_not_ours_to_judge(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    set_memory(monkeypatch, 0.1)
    set_shm(monkeypatch, 0.1)
    assert len(find_problems(config)) == 2
    OmegaConf.update(config, "ray_kwargs.ray_init.address", "10.0.0.1:6379", force_add=True)
    assert find_problems(config) == []


def test_several_problems_are_listed_together(config: DictConfig, tmp_path: Path) -> None:
    for path in (MODEL, "data.train_files", REWARD):
        OmegaConf.update(config, path, f"{tmp_path}/absent")
    assert [problem.split("=")[0] for problem in find_problems(config)] == [MODEL, "data.train_files", REWARD]


@pytest.mark.parametrize(
    ("limit", "used_gib", "expected_gib"),
    [("max", 1, 8.0), (str(4 * GIB), 1, 3.0), (str(64 * GIB), 1, 8.0), (None, 0, 8.0)],
)
def test_available_memory_is_the_host_s_within_the_container_s_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, used_gib: int, expected_gib: float
) -> None:
    """A host with 8 GiB available; the container's files stand under a folder of this test."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used_gib * GIB}\n")
    monkeypatch.setattr(machine_checks, "CGROUP", tmp_path)
    monkeypatch.setattr(machine_checks, "Path", lambda path: tmp_path / str(path).rsplit("/", 1)[1])
    assert REAL_AVAILABLE_MEMORY_GIB() == pytest.approx(expected_gib)


def test_page_cache_of_a_container_counts_as_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """12 GiB allowed, 8.5 used, 7.5 of which the kernel gives back: 11 are available, not 3.5."""
    monkeypatch.setattr(machine_checks, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(str(12 * GIB))
    (tmp_path / "memory.current").write_text(str(int(8.5 * GIB)))
    (tmp_path / "memory.stat").write_text(f"anon {GIB}\ninactive_file {7 * GIB}\nactive_file {GIB // 2}\n")
    (tmp_path / "meminfo").write_text(f"MemAvailable: {20 * 2**20} kB\n")
    monkeypatch.setattr(machine_checks, "Path", lambda path: tmp_path / str(path).rsplit("/", 1)[1])
    assert REAL_AVAILABLE_MEMORY_GIB() == pytest.approx(11.0)


def test_container_limit_of_the_older_kind_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_checks, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(4 * GIB))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(str(3 * GIB))
    (tmp_path / "memory" / "memory.stat").write_text(f"total_inactive_file {GIB}\ninactive_file 5\n")
    (tmp_path / "meminfo").write_text(f"MemAvailable: {20 * 2**20} kB\n")
    monkeypatch.setattr(machine_checks, "Path", lambda path: tmp_path / str(path).rsplit("/", 1)[1])
    assert REAL_AVAILABLE_MEMORY_GIB() == pytest.approx(2.0)


@pytest.mark.parametrize("changes", [{"data.custom_cls.path": "mine.py"}, {"ray_kwargs.ray_init.address": "ray://h:1"}])
def test_files_that_are_not_ours_to_find_are_not_looked_for(config: DictConfig, changes: dict[str, str]) -> None:
    OmegaConf.update(config, "data.train_files", "/absent.parquet")
    for path, value in changes.items():
        OmegaConf.update(config, path, value, force_add=True)
    assert not [problem for problem in find_problems(config) if "data.train_files" in problem]


def test_other_reward_managers_need_no_columns_of_ours(config: DictConfig, tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"prompt": "x"}\n')
    OmegaConf.update(config, "data.train_files", str(path))
    assert [problem.split("'")[1] for problem in find_problems(config)] == ["data_source", "reward_model"]
    OmegaConf.update(config, "reward.reward_manager.source", "importlib")
    assert not [problem for problem in find_problems(config) if "data.train_files" in problem]


def test_file_type_that_verl_cannot_read(config: DictConfig, tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("prompt\n")
    assert ".parquet, .json, .jsonl" in problem_of(config, "data.train_files", str(path))


def test_path_with_several_slashes_is_no_hub_id(config: DictConfig) -> None:
    OmegaConf.update(config, MODEL, "outputs/models/absent")
    assert [problem.split("=")[0] for problem in find_problems(config)] == [MODEL]


def test_bad_sync_timeout_is_refused(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALERL_VERL_SYNC_TIMEOUT_S", "ten")
    assert [problem for problem in find_problems(config) if "SCALERL_VERL_SYNC_TIMEOUT_S='ten'" in problem]


@pytest.mark.works_with("vision", "FP32 head", "PipelineRL-k", refused=True)
def test_model_that_sees_is_refused_by_each_piece_that_takes_text_alone(config: DictConfig) -> None:
    """Before, workers said so minutes after the start, one piece at a time."""
    folder = Path(config.actor_rollout_ref.model.path)
    OmegaConf.update(config, "actor_rollout_ref.model.fused_kernel_options.impl_backend", "fp32", force_add=True)
    OmegaConf.update(config, "trainer.v1.trainer_mode", "pipeline_rl", force_add=True)
    assert find_problems(config) == []
    # Another name: what was read of a folder is kept.
    seeing = folder.rename(folder.with_name("seeing"))
    config.actor_rollout_ref.model.path = str(seeing)
    (seeing / "config.json").write_text(json.dumps({"vision_config": {}}))
    head, pipeline = find_problems(config)
    assert "impl_backend=fp32" in head and "~actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides" in head
    assert "trainer_mode=pipeline_rl" in pipeline
    config.actor_rollout_ref.model.fused_kernel_options.impl_backend = "torch"
    config.trainer.v1.trainer_mode = "sync"
    assert find_problems(config) == []


@pytest.mark.fault("vLLM on a CPU: updated weights of experts are read in the order of packed ones")
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_mixture_of_experts_is_refused_on_the_cpu_alone(
    config: DictConfig, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    folder = Path(config.actor_rollout_ref.model.path)
    mixture = folder.rename(folder.with_name(key))
    (mixture / "config.json").write_text(json.dumps({key: 8}))
    config.actor_rollout_ref.model.path = str(mixture)
    assert find_problems(config) == []
    monkeypatch.setenv(PLATFORM_ENV, "cpu")
    (problem,) = find_problems(config)
    assert f"path={mixture} with {PLATFORM_ENV}=cpu" in problem and "dense model" in problem
