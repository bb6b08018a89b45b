# SPDX-License-Identifier: Apache-2.0
"""Every method of verl that a class of ours overrides is bound by its source, or is a hook that verl leaves empty."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from verl.trainer.ppo.v1 import AgentLoopWorkerTQ

from scalerl_verl.cpu.verl_worker import CopyingWorker
from scalerl_verl.pipeline.buffer import PipelineReplayBuffer
from scalerl_verl.verl import agent_worker, trainer
from scalerl_verl.verl.patches import SYMBOLS

CLASSES = (
    trainer.ScaleRLSync,
    trainer.ScaleRLColocateAsync,
    trainer.ScaleRLSeparateAsync,
    trainer.ScaleRLPipeline,
    trainer.ScaleRLOffPolicy,
    agent_worker.AgentLoopManager,
    agent_worker.with_our_pieces(AgentLoopWorkerTQ).__ray_actor_class__,
    PipelineReplayBuffer,
    CopyingWorker,
)
BOUND = {(spec.module, spec.target) for spec in SYMBOLS}


def is_hook(name: str) -> bool:
    """verl's trainers are made to be extended there."""
    return name.startswith("on_")


def overridden(cls: type) -> Iterator[tuple[str, str]]:
    """Module and path of what verl's base class has where a class of ours has a method."""
    for index, ours in enumerate(cls.__mro__):
        for name, value in vars(ours).items() if ours.__module__.startswith("scalerl_verl") else ():
            theirs = [
                base for base in cls.__mro__[index + 1 :] if name in vars(base) and base.__module__.startswith("verl.")
            ]
            if (inspect.isfunction(value) or isinstance(value, property)) and theirs and not is_hook(name):
                yield theirs[-1].__module__, f"{theirs[-1].__qualname__}.{name}"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_overridden_method_is_in_the_table(cls: type) -> None:
    found = set(overridden(cls))
    assert found, "nothing to look at"
    assert found <= BOUND
