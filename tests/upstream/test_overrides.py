# SPDX-License-Identifier: Apache-2.0
"""Every method of verl that a class of ours overrides is bound by its source, or is a hook that verl leaves empty."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from verl.trainer.ppo.v1 import AgentLoopWorkerTQ  # noqa: E402

from scalerl_verl.cpu.verl_worker import CopyingWorker  # noqa: E402
from scalerl_verl.generator.server import ScaleRLHttpServer, ScaleRLReplica  # noqa: E402
from scalerl_verl.generator.worker import ScaleRLWorkerExtension  # noqa: E402
from scalerl_verl.pipeline.balancer import PipelineBalancer  # noqa: E402
from scalerl_verl.pipeline.buffer import PipelineReplayBuffer  # noqa: E402
from scalerl_verl.pipeline.client import PipelineClient  # noqa: E402
from scalerl_verl.pipeline.sending import SendingWorker  # noqa: E402
from scalerl_verl.pipeline.server import PipelineHttpServer, PipelineReplica  # noqa: E402
from scalerl_verl.pipeline.weights import WeightUpdater  # noqa: E402
from scalerl_verl.verl import agent_worker, trainer  # noqa: E402
from scalerl_verl.verl.patches import SYMBOLS  # noqa: E402

CLASSES = (
    trainer.ScaleRLSync,
    trainer.ScaleRLColocateAsync,
    trainer.ScaleRLSeparateAsync,
    trainer.ScaleRLPipeline,
    trainer.ScaleRLOffPolicy,
    agent_worker.AgentLoopManager,
    agent_worker.with_our_pieces(AgentLoopWorkerTQ).__ray_actor_class__,
    PipelineReplayBuffer,
    PipelineBalancer,
    PipelineClient,
    WeightUpdater,
    SendingWorker,
    CopyingWorker,
    ScaleRLHttpServer,
    PipelineHttpServer,
    ScaleRLReplica,
    PipelineReplica,
    ScaleRLWorkerExtension,
)
BOUND = {(spec.module, spec.target) for spec in SYMBOLS if spec.kind == "override"}


def is_hook(name: str) -> bool:
    """verl's trainers are made to be extended there."""
    return name.startswith("on_")


def overridden(cls: type) -> Iterator[tuple[str, str]]:
    """Module and path of what a method or property of ours has behind it in verl."""
    for index, ours in enumerate(cls.__mro__):
        for name, value in vars(ours).items() if ours.__module__.startswith("scalerl_verl") else ():
            theirs = [
                base for base in cls.__mro__[index + 1 :] if name in vars(base) and base.__module__.startswith("verl.")
            ]
            if (inspect.isfunction(value) or isinstance(value, property)) and theirs and not is_hook(name):
                yield theirs[0].__module__, f"{theirs[0].__qualname__}.{name}"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_overridden_method_is_in_the_table(cls: type) -> None:
    """Fault: verl changes a method that a subclass of ours overrides, and the old behaviour stays in its place."""
    found = set(overridden(cls))
    assert found, "nothing to look at"
    assert found <= BOUND
