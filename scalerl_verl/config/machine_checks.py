# SPDX-License-Identifier: Apache-2.0
"""What has to be there before anything heavy starts: model, data, reward, the run's folder, memory, ports."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig

from scalerl_verl import engine_context
from scalerl_verl.advantage import group_size_checks
from scalerl_verl.config import model_checks, run_folder, transfer_checks
from scalerl_verl.config.cluster import cluster_address, has_own_ray, num_devices
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.interruption import settings as interruption_settings
from scalerl_verl.names import BUCKET, MODEL, PLUGIN, RAY, ROLLOUT, select, select_list
from scalerl_verl.names.rules import broken, under
from scalerl_verl.shapes import find_config
from scalerl_verl.upstream.activation import is_cpu_platform, sync_timeout_s

GIB = 2**30
MIN_CPU_MEMORY_GIB = 6.0
"""Available memory below which a CPU run is refused: its dozen processes were measured at 7 GiB with shared pages
counted once, of which Ray and page cache can give back about 1 GiB."""
_SHM_SLACK_GIB = 0.25
CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(path).names


def _json_columns(path: Path) -> list[str]:
    """Keys of the first record: of JSON lines, of objects over several lines, or of a list of them.

    verl reads all of these, also behind a byte order mark and blank lines.

    Raises:
        ValueError: there is no record, or it is no object.
    """
    with path.open(encoding="utf-8-sig", newline="\n") as stream:
        first = next((line for line in stream if line.strip()), "").lstrip()
        try:
            value = json.loads(first) if first else []
        except ValueError:  # it goes on in the next line
            value, _ = json.JSONDecoder().raw_decode(first + stream.read())
    records = value if isinstance(value, list) else [value]
    if not records or not isinstance(records[0], dict):
        raise ValueError('it needs objects such as {"prompt": ...}' if records else "it holds no record")
    return list(records[0])


_READERS: dict[str, Callable[[Path], list[str]]] = {
    ".parquet": _parquet_columns,
    ".json": _json_columns,
    ".jsonl": _json_columns,
}
"""File types of verl's data set -> how to list the columns."""


def find_problems(config: DictConfig) -> list[str]:
    """Every missing file, column or resource; empty if there is none."""
    return list(broken(RULES, config))


def count_gpus() -> int | None:
    """GPUs of this machine that Ray would find; None if it has accelerators of another kind."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return torch.cuda.device_count() if accelerator is None or accelerator.type == "cuda" else None


def _devices(config: DictConfig) -> Iterator[str]:
    """Ray waits for devices that nobody has, without a word and without an end."""
    if is_cpu_platform():
        return  # Ray's GPUs are logical slots there
    needed, given = num_devices(config), select(config, f"{RAY}.num_gpus")
    found = count_gpus() if given is None else int(given)
    if found is not None and found < needed:
        has = f"this machine has {found}" if given is None else f"{RAY}.num_gpus={found}"
        yield (
            f"the run needs {needed} GPUs (trainer.nnodes x trainer.n_gpus_per_node, and those of rollout in "
            f"asynchronous modes), but {has}, and the run starts a Ray of its own here: lower these keys, or start a "
            "Ray cluster that has as many (ray start on each node) before the run; without a GPU set VERL_PLATFORM=cpu "
            "and add the preset cpu"
        )


def _cluster(config: DictConfig) -> Iterator[str]:
    """Ray starts a cluster with these sizes and refuses them for one that runs."""
    address = cluster_address(config)
    given = [
        key for key in ("num_cpus", "num_gpus", "object_store_memory") if select(config, f"{RAY}.{key}") is not None
    ]
    if given and address != "local":
        shown = ", ".join(f"{RAY}.{key}={select(config, f'{RAY}.{key}')}" for key in given)
        source = "" if select(config, f"{RAY}.address") else " (from RAY_ADDRESS, or ray start)"
        yield (
            f"{shown}: sizes of a Ray that the run starts itself, but this run joins the cluster at "
            f"{address}{source}: set +{RAY}.address=local, or set {'these' if len(given) > 1 else 'this'} to null"
        )


def _environment(_: DictConfig) -> Iterator[str]:
    try:
        sync_timeout_s()
    except ValueError as error:
        yield str(error)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and is_cpu_platform() and PLUGIN not in {name.strip() for name in plugins.split(",")}:
        yield f"VLLM_PLUGINS={plugins} keeps vLLM from loading scalerl, which a CPU run needs: add scalerl or unset it"


def _is_local(path: str) -> bool:
    """A path on this machine, as opposed to a hub id (org/name) or a remote URL."""
    if "://" in path:
        return False
    return path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or os.path.exists(path)


def _model(config: DictConfig) -> Iterator[str]:
    key = f"{MODEL}.path"
    path = str(select(config, key, ""))
    if not path:
        yield f"{key} is not set: give a local directory or a model id"
    elif _is_local(path):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            yield f"{key}={path} is not a directory: correct the path"
        elif not select(config, f"{MODEL}.hf_config_path"):
            yield from _model_config(key, path)


def _model_config(key: str, path: str) -> Iterator[str]:
    try:
        if find_config(path) is None:
            yield f"{key}={path} has no config.json: point it at a model saved by transformers"
    except ScaleRLConfigError as error:
        yield from (f"{key}={path}: {problem}" for problem in error.problems)


def _generator(config: DictConfig) -> Iterator[str]:
    """verl has no default, and fails in its first worker."""
    section = select(config, ROLLOUT)
    if section is not None and select(section, "name") is None:
        yield f"{ROLLOUT}.name is not set: set it to vllm, or another engine of verl"


def _data(config: DictConfig) -> Iterator[str]:
    if select(config, "data.custom_cls.path"):
        return  # the class decides what a file is
    for key in ("data.train_files", "data.val_files"):
        files = select_list(config, key)
        if not files:
            yield f"{key} is not set: give one or more parquet files"
        sound = []
        for name in files:
            if "://" in name:
                continue
            path = Path(name).expanduser()
            if not path.is_file():
                yield f"{key}={name} does not exist: correct the path"
            elif path.suffix not in _READERS:
                yield f"{key}={name}: verl reads {', '.join(_READERS)} files only; convert it"
            elif wrong := list(_columns(config, key, path)):
                yield from wrong
            elif path.suffix == ".parquet":
                sound.append(path)
        yield from group_size_checks.find_problems(config, key, sound)


def _columns(config: DictConfig, key: str, path: Path) -> Iterator[str]:
    try:
        columns = _READERS[path.suffix](path)
    except (ValueError, OSError, RecursionError) as error:  # pyarrow's errors are ValueErrors or OSErrors
        yield f"{key}={path} cannot be read as {path.suffix}: {error}"
        return
    needed = {select(config, "data.prompt_key", "prompt"): "or let data.prompt_key name the column with the prompts"}
    if _rule_based_reward(config):
        needed["data_source"] = "the reward function is chosen by it"
        needed["reward_model"] = "it holds {'style': ..., 'ground_truth': ...} of the rule-based reward"
    for column, why in needed.items():
        if column not in columns:
            yield f"{key}={path} has no column '{column}' (found: {', '.join(columns)}): add it; {why}"


def _rule_based_reward(config: DictConfig) -> bool:
    """verl's own reward manager grades by a function; others read what they like."""
    if select(config, "reward.reward_model.enable", False):
        return False
    source = select(config, "reward.reward_manager.source", "register")
    return source == "register" and select(config, "reward.reward_manager.name", "naive") == "naive"


def _reward(config: DictConfig) -> Iterator[str]:
    path = str(select(config, "reward.custom_reward_function.path", ""))
    if path and "://" not in path and not Path(path).expanduser().is_file():
        yield f"reward.custom_reward_function.path={path} does not exist: correct the path"


def _ports(config: DictConfig) -> Iterator[str]:
    dashboard = select(config, f"{RAY}.include_dashboard", True)
    keys = [f"{RAY}.dashboard_port"] if dashboard else []
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
                f"programs, or lower {ROLLOUT}.agent.num_workers and VLLM_CPU_KVCACHE_SPACE"
            )
    shm = Path("/dev/shm")
    store = select(config, f"{RAY}.object_store_memory")
    needed = (float(store) / GIB if store else 0.0) + _SHM_SLACK_GIB
    if is_cpu_platform():
        needed += transfer_checks.shared_memory_bytes(config) / GIB
    if select(config, f"{RAY}._plasma_directory"):
        needed -= float(store) / GIB if store else 0.0
    if shm.is_dir() and shutil.disk_usage(shm).free < needed * GIB:
        free = shutil.disk_usage(shm).free / GIB
        yield (
            f"/dev/shm has {free:.2f} GiB free, this run needs {needed:.2f}: enlarge it (docker run --shm-size), or "
            f"lower {RAY}.object_store_memory and {BUCKET}"
        )


def available_memory_gib() -> float:
    """GiB that can be used without swapping: the host's MemAvailable, within the container's limit if there is one."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_name, used_name in (("memory.max", "memory.current"), _CGROUP_V1):
        limit, used = CGROUP / limit_name, CGROUP / used_name
        if limit.is_file() and used.is_file() and limit.read_text(encoding="utf-8").strip() != "max":
            free = (
                int(limit.read_text(encoding="utf-8"))
                - int(used.read_text(encoding="utf-8"))
                + _page_cache(limit.with_name("memory.stat"))
            )
            available = min(available, free)
    return available / GIB


def _page_cache(stat: Path) -> int:
    """Bytes of file pages that a container's limit counts as used and the kernel gives back when asked."""
    if not stat.is_file():
        return 0
    fields = dict(line.split(maxsplit=1) for line in stat.read_text(encoding="utf-8").splitlines())
    prefix = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


RULES = (
    _environment,
    _cluster,
    under(  # with a Ray client everything but this driver, files included, is on the cluster
        lambda config: not cluster_address(config).startswith("ray://"),
        _model,
        _generator,
        _data,
        _reward,
        interruption_settings.find_model_problems,
        engine_context.find_model_problems,
        model_checks.find_model_problems,
        transfer_checks.find_model_problems,
        run_folder.find_problems,
        run_folder.find_resume_problems,
    ),
    under(has_own_ray, _devices, _ports, _memory),
)
"""Every rule that looks at this machine, in the order in which problems are listed."""
