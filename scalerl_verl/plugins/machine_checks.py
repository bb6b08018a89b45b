# SPDX-License-Identifier: Apache-2.0
"""What has to be there before anything heavy starts: model, data, reward, memory, shared memory, ports."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from scalerl_verl.plugins.names import select
from scalerl_verl.upstream.activation import is_cpu_platform

GIB = 2**30
MIN_CPU_MEMORY_GIB = 6.0
"""Available memory below which a CPU run is refused: its dozen processes were measured at 7 GiB with shared pages
counted once, of which Ray and page cache can give back about 1 GiB."""
_SHM_SLACK_GIB = 0.25


def find_problems(config: DictConfig) -> list[str]:
    """Every missing file, column or resource; empty if there is none."""
    problems = list(_model(config)) + list(_data(config)) + list(_reward(config)) + list(_ports(config))
    if not select(config, "ray_kwargs.ray_init.address"):
        problems += _memory(config)
    return problems


def _is_local(path: str) -> bool:
    """A path on this machine, as opposed to a hub id (org/name) or a remote URL."""
    if "://" in path:
        return False
    return path.startswith(("/", "./", "../", "~")) or os.path.exists(path)


def _model(config: DictConfig) -> Iterator[str]:
    key = "actor_rollout_ref.model.path"
    path = str(select(config, key, ""))
    if not path:
        yield f"{key} is not set: give a local directory or a model id"
    elif _is_local(path):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            yield f"{key}={path} is not a directory: correct the path"
        elif not (folder / "config.json").is_file():
            yield f"{key}={path} has no config.json: point it at a model saved by transformers"


def _files(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, (list, tuple, ListConfig)) else [str(value)]


def _data(config: DictConfig) -> Iterator[str]:
    for key in ("data.train_files", "data.val_files"):
        files = _files(select(config, key))
        if not files:
            yield f"{key} is not set: give one or more parquet files"
        for name in files:
            if "://" in name:
                continue
            path = Path(name).expanduser()
            if not path.is_file():
                yield f"{key}={name} does not exist: correct the path"
            elif path.suffix == ".parquet":
                yield from _columns(config, key, path)


def _columns(config: DictConfig, key: str, path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError) as error:
        yield f"{key}={path} cannot be read as parquet: {error}"
        return
    prompt = select(config, "data.prompt_key", "prompt")
    needed = {prompt: "data.prompt_key names another column", "data_source": "the reward function is chosen by it"}
    if not select(config, "reward.reward_model.enable", False):
        needed["reward_model"] = "it holds {'style': ..., 'ground_truth': ...} of the rule-based reward"
    for column, why in needed.items():
        if column not in columns:
            yield f"{key}={path} has no column '{column}' (found: {', '.join(columns)}): add it; {why}"


def _reward(config: DictConfig) -> Iterator[str]:
    path = select(config, "reward.custom_reward_function.path")
    if path and "://" not in str(path) and not str(path).startswith("pkg://") and not Path(path).expanduser().is_file():
        yield f"reward.custom_reward_function.path={path} does not exist: correct the path"


def _ports(config: DictConfig) -> Iterator[str]:
    dashboard = select(config, "ray_kwargs.ray_init.include_dashboard", True)
    keys = ["ray_kwargs.ray_init.dashboard_port"] if dashboard else []
    if select(config, "transfer_queue.metrics.enabled", False):
        keys.append("transfer_queue.metrics.port")
    for key in keys:
        port = select(config, key)
        if port and not _port_free(int(port)):
            yield f"{key}={port} is taken on this machine: set another port"


def _port_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _memory(config: DictConfig) -> Iterator[str]:
    if is_cpu_platform():
        available = available_memory_gib()
        if available < MIN_CPU_MEMORY_GIB:
            yield (
                f"{available:.1f} GiB of memory are available, a CPU run needs {MIN_CPU_MEMORY_GIB:g}: close other "
                "programs, or lower actor_rollout_ref.rollout.agent.num_workers and VLLM_CPU_KVCACHE_SPACE"
            )
    shm = Path("/dev/shm")
    store = select(config, "ray_kwargs.ray_init.object_store_memory")
    bucket = select(config, "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", 0)
    needed = (float(store) / GIB if store else 0.0) + _SHM_SLACK_GIB
    if is_cpu_platform():
        needed += float(bucket) / 1024
    if shm.is_dir() and shutil.disk_usage(shm).free < needed * GIB:
        free = shutil.disk_usage(shm).free / GIB
        yield (
            f"/dev/shm has {free:.2f} GiB free, this run needs {needed:.2f}: enlarge it (docker run --shm-size), or "
            "lower ray_kwargs.ray_init.object_store_memory and "
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
        )


def available_memory_gib() -> float:
    """GiB that can be used without swapping: the host's MemAvailable, within the container's limit if there is one."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, int(text) - int(used.read_text()))
    return available / GIB
