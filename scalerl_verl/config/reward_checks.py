# SPDX-License-Identifier: Apache-2.0
"""Checks of the reward: managers that verl's V1 trainer lacks, shaping without effect, reward models without GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from scalerl_verl.names import FILTER_GROUPS, PIPELINE_RL, select
from scalerl_verl.names.asking import trainer_mode
from scalerl_verl.names.kinds import is_number
from scalerl_verl.names.rules import or_null

MODEL = "reward.reward_model"
POOL = f"{MODEL}.enable_resource_pool"
_PARALLEL = ("tensor_model", "data", "pipeline_model")
MANAGER = "reward.reward_manager.name"
TAKES_PLACE = {"prime": "naive", "batch": "naive"}
"""Manager of verl's old reward loop that its V1 trainer does not know -> the one that calls the same function."""
_DAPO = "dapo"
_KWARGS = "reward.reward_kwargs"
_OVERLONG, _MAX_LENGTH = f"{_KWARGS}.overlong_buffer_cfg", f"{_KWARGS}.max_resp_len"


def _registered(config: DictConfig) -> str | None:
    """The manager that is looked up by name; None where a user's own is imported."""
    if select(config, "reward.reward_manager.source", "register") != "register":
        return None
    return str(select(config, MANAGER, "naive"))


def _manager(config: DictConfig) -> Iterator[str]:
    name = _registered(config)
    if name in TAKES_PLACE:
        yield (
            f"{MANAGER}={name} is not known to verl's V1 trainer, whose reward workers would fail: set "
            f"{MANAGER}={TAKES_PLACE[name]}. It takes the same reward function, asynchronous or not, calls it for one "
            "response at a time, and has reward.num_workers workers"
        )


def _overlong(config: DictConfig) -> Iterator[str]:
    if not select(config, f"{_OVERLONG}.enable", False):
        return
    name, buffer, longest = _registered(config), select(config, f"{_OVERLONG}.len"), select(config, _MAX_LENGTH)
    if name is not None and name != _DAPO:
        yield (
            f"{_OVERLONG}.enable=True is read by {MANAGER}={_DAPO} only, but {MANAGER}={name}: set {MANAGER}={_DAPO}, "
            f"or {_OVERLONG}.enable=False"
        )
    elif name == _DAPO and not (is_number(buffer) and is_number(longest) and 0 < buffer <= longest):
        yield (
            f"{_OVERLONG}.len={or_null(buffer)}, {_MAX_LENGTH}={or_null(longest)}: the penalty begins len tokens below "
            f"max_resp_len; give both, len above 0 and at most max_resp_len (++{_MAX_LENGTH}="
            "'${data.max_response_length}')"
        )


def _reward_model(config: DictConfig) -> Iterator[str]:
    """What verl finds out once Ray runs, or when the model is to be started."""
    if not select(config, f"{MODEL}.enable", False):
        return
    for key in ("model_path", "rollout.name"):
        if select(config, f"{MODEL}.{key}") is None:
            yield f"{MODEL}.{key} is not set with {MODEL}.enable=True: verl needs it to start the reward model"
    if not select(config, POOL, False):
        if select(config, FILTER_GROUPS, False) and trainer_mode(config) != PIPELINE_RL:
            yield (
                f"{FILTER_GROUPS}=True with a reward model that shares the trainer's devices: it grades after groups "
                f"are chosen; set {POOL}=True, with {MODEL}.nnodes and .n_gpus_per_node"
            )
        return
    nodes, gpus = (select(config, f"{MODEL}.{key}", 0) for key in ("nnodes", "n_gpus_per_node"))
    if not all(is_number(value) and value >= 1 for value in (nodes, gpus)):
        yield (
            f"{MODEL}.nnodes={or_null(nodes)}, {MODEL}.n_gpus_per_node={or_null(gpus)} with {POOL}=True: the reward "
            "model's own devices; set both to 1 or more"
        )
        return
    sizes = [select(config, f"{MODEL}.rollout.{key}_parallel_size", 1) for key in _PARALLEL]
    if all(map(is_number, sizes)) and nodes * gpus < math.prod(sizes):
        yield (
            f"{MODEL}.nnodes x n_gpus_per_node = {nodes * gpus}, but one replica of the reward model takes "
            f"{math.prod(sizes)}: lower {MODEL}.rollout.tensor_model_parallel_size, or give it more devices"
        )


RULES = (_manager, _overlong, _reward_model)
