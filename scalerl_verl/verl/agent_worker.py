# SPDX-License-Identifier: Apache-2.0
"""Our pieces in verl's agent loops: what a loop is told of its response, and what the trainer is told of failures.

verl takes the class of the manager from the config (see `doors`); the manager makes its Ray workers of a class that it
holds. Both of ours are put in front of verl's, or of the user's.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopManager as VerlManager
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.import_utils import load_class_from_fqn

from scalerl_verl.advantage.passing import judge, reward_infos
from scalerl_verl.errors import RewardError, ScaleRLConfigError
from scalerl_verl.interruption.verl import current_context, response_context
from scalerl_verl.names import AGENT_LOOP_MANAGER, PIPELINE_RL, TRAINER_MODE
from scalerl_verl.pipeline.failures import note_failure
from scalerl_verl.pipeline.turns import collecting_calls, note_versions
from scalerl_verl.verl.doors import AROUND, restore_manager, typed_class
from scalerl_verl.verl.trainer import require_our_trainer

_Behind: Any = object
"""verl's class, or the user's, which a class made below has behind one of ours."""


class AgentWorkerMixin(_Behind):
    """In front of a worker: its loops know their response's context, and its rewards are numbers."""

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, *args: Any, **kwargs: Any) -> Any:
        with response_context(self, trajectory), collecting_calls():
            try:
                return await super()._run_agent_loop(sampling_params, trajectory, *args, **kwargs)
            except Exception as error:
                await note_failure(self.config, trajectory, kwargs.get("uid"), error)
                raise

    async def _compute_score(self, outputs: Any, kwargs: Any) -> None:
        if trains_in_pipeline(self.config):
            note_versions(outputs)
        await super()._compute_score(outputs, kwargs)
        require_finite_reward(self.config, outputs[-1], is_scored=self.reward_loop_worker_handles is not None)


class AgentManagerMixin(_Behind):
    """In front of a manager: its workers have our pieces in front, whichever class they are of."""

    agent_loop_workers_class: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        require_our_trainer(config)
        restore_manager(config)
        super().__init__(config, *args, **kwargs)

    async def _init_agent_loop_workers(self) -> None:
        self.agent_loop_workers_class = with_our_pieces(self.agent_loop_workers_class)
        await super()._init_agent_loop_workers()


class AgentLoopManager(AgentManagerMixin, AgentLoopManagerTQ):
    """verl's manager, for a run that names none."""


def with_our_pieces(worker_class: Any) -> Any:
    """The Ray actor class of a manager's workers with `AgentWorkerMixin` in front, under the same name and options.

    Raises:
        ScaleRLConfigError: it is no Ray actor class of verl's worker.
    """
    plain = getattr(worker_class, "__ray_actor_class__", None)
    if plain is None or not issubclass(plain, AgentLoopWorker):
        raise ScaleRLConfigError(
            [
                f"{AGENT_LOOP_MANAGER} makes its workers of {worker_class!r}, and not of a subclass of verl's "
                "AgentLoopWorker with ray.remote: derive them from it, or remove our names from the run"
            ]
        )
    # Made on the spot, it goes to the workers by value: they need no module of ours to find it.
    ours = type(plain.__name__, (AgentWorkerMixin, plain), {})
    options = worker_class._default_options
    return ray.remote(**options)(ours) if options else ray.remote(ours)


def _around(path: str) -> type:
    """A manager of the user's with our workers.

    Raises:
        ScaleRLConfigError: it is no subclass of verl's, whose workers ours derive from.
    """
    theirs = load_class_from_fqn(path, "AgentLoopManager")
    if not (isinstance(theirs, type) and issubclass(theirs, VerlManager)):
        raise ScaleRLConfigError(
            [
                f"{AGENT_LOOP_MANAGER}={path} is no subclass of verl's AgentLoopManager: its agent loops would run "
                "without our pieces; derive it from verl.trainer.ppo.v1.AgentLoopManagerTQ, set the key to null, or "
                "remove our names from the run"
            ]
        )
    return type(theirs.__name__, (AgentManagerMixin, theirs), {})


def __getattr__(name: str) -> type:
    """``around:package:module:Class``: how verl, which looks a class up by its name, gets one made on the spot."""
    if name.startswith(AROUND):
        return _around(typed_class(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def trains_in_pipeline(config: Any) -> bool:
    """Whether the response under way is for the training of a pipeline run."""
    context = current_context()
    # Other trainers may use verl's worker with a config of their own.
    return context is not None and not context.validation and OmegaConf.select(config, TRAINER_MODE) == PIPELINE_RL


def require_finite_reward(config: Any, output: AgentLoopOutput, is_scored: bool) -> None:
    """Refuse a reward that is no finite number or cannot be judged, in the training of a pipeline run.

    Its group counts as failed: it can be tried again, or given up, as one whose reward function raises.

    Args:
        config: the run's config.
        output: the last of a response, which has its reward; not checked against a type when it was put there.
        is_scored: responses are scored one by one; if not, None stands for a reward that is still to come.

    Raises:
        RewardError: the reward is NaN, infinite or no number at all, or what comes with it neither passes nor fails.
    """
    if not trains_in_pipeline(config):
        return
    reward: Any = output.reward_score
    if reward is None and not is_scored:
        return
    try:
        is_finite = math.isfinite(reward)
    except (TypeError, OverflowError):
        is_finite = False
    if not is_finite:
        raise RewardError(
            f"the reward of a response is {reprlib.repr(reward)}; a reward function must return finite numbers "
            "(reward.custom_reward_function, or the one of the prompt's data_source)"
        )
    judge(config, [reward], reward_infos([output.extra_fields]))
