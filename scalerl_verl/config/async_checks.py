# SPDX-License-Identifier: Apache-2.0
"""What verl's ``separate_async`` asserts once Ray runs, a thing at a time."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from scalerl_verl import names
from scalerl_verl.names import ACTOR, CHECKPOINT_BACKEND, ROLLOUT, TRAINER_MODE, V1, select
from scalerl_verl.names.asking import trainer_mode
from scalerl_verl.names.numbers import number
from scalerl_verl.names.rules import Row, Rule, under

MODE = "separate_async"
_SYNC_STEP = f"{V1}.{MODE}.parameter_sync_step"
_POOL = "reward.reward_model.enable_resource_pool"


def _parts(config: DictConfig) -> Iterator[str]:
    keys = ("data.train_batch_size", _SYNC_STEP, f"{ACTOR}.ppo_mini_batch_size")
    batch, steps, mini = (number(config, key) for key in keys)
    if batch != steps * mini:
        wanted = f"{_SYNC_STEP}={batch // mini}" if batch % mini == 0 else f"train_batch_size={steps * mini}"
        yield (
            f"data.train_batch_size={batch}, {keys[2]}={mini}, {_SYNC_STEP}={steps} with {TRAINER_MODE}={MODE}: a "
            f"batch has to be parameter_sync_step mini-batches; set {wanted}"
        )


def _devices(config: DictConfig) -> Iterator[str]:
    for key in ("nnodes", "n_gpus_per_node"):
        if number(config, f"{ROLLOUT}.{key}") < 1:
            yield (
                f"{ROLLOUT}.{key}={select(config, f'{ROLLOUT}.{key}')} with {TRAINER_MODE}={MODE}: generators have "
                "devices of their own; set it to 1 or more"
            )
    if select(config, CHECKPOINT_BACKEND, "naive") == "naive":
        yield (
            f"{CHECKPOINT_BACKEND}=naive with {TRAINER_MODE}={MODE}: it reaches no generator on other devices; set it "
            f"to nccl, or another engine of verl ({names.GLOO} with {names.PLATFORM_ENV}=cpu)"
        )
    if select(config, "reward.reward_model.enable", False):
        text = (
            f": a reward model needs devices of its own with {TRAINER_MODE}={MODE}; set it True, with "
            "reward.reward_model.nnodes and .n_gpus_per_node"
        )
        yield from Row(_POOL, (True,), text, default=False)(config)


RULES: tuple[Rule, ...] = (under(lambda config: trainer_mode(config) == MODE, _parts, _devices),)
