# SPDX-License-Identifier: Apache-2.0
"""What verl finds in the config of a run, and what everybody else does: our classes behind the names of the user.

verl's real trainers, managers and workers, as classes; nothing is started.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import ray
from omegaconf import DictConfig, OmegaConf
from ray import cloudpickle
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1 import trainer_separate_async as separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls, register_trainer
from verl.utils.import_utils import load_class_from_fqn

from scalerl_verl.cpu.verl_worker import CopyingWorker, DetachActorWorker
from scalerl_verl.errors import PatchError, ScaleRLConfigError
from scalerl_verl.names import AGENT_LOOP_MANAGER, PLATFORM_ENV, TRAINER_MODE, select
from scalerl_verl.verl import agent_worker, doors, startup, trainer
from tests.steps import in_front_of
from tests.unit.composed import changed

MODES = {
    "sync": "PPOTrainerSync",
    "colocate_async": "PPOTrainerColocateAsync",
    "separate_async": "PPOTrainerSeparateAsync",
    "pipeline_rl": "PPOTrainerPipelineRL",
    "ppo_off_policy": "PPOTrainerOffPolicy",
}


def pointed(mode: str, manager: str | None = None) -> DictConfig:
    config = changed("recipe", {TRAINER_MODE: mode, AGENT_LOOP_MANAGER: manager})
    doors.point_at_ours(config)
    return config


@pytest.mark.parametrize(("mode", "behind"), MODES.items())
def test_every_mode_gets_our_steps_in_front_of_its_own_trainer(mode: str, behind: str) -> None:
    found = get_trainer_cls(select(pointed(mode), TRAINER_MODE))
    names = [cls.__name__ for cls in found.__mro__]
    assert names.index("ScaleRLTrainer") < names.index(behind) < names.index("PPOTrainer")


@pytest.mark.parametrize("mode", MODES)
def test_verl_s_trainer_and_all_that_reads_the_config_later_see_the_mode_that_was_typed(mode: str) -> None:
    seen = []

    class Stub:
        def __init__(self, config: DictConfig) -> None:
            seen.append(config.trainer.v1.trainer_mode)

    class Trainer(trainer.ScaleRLTrainer, Stub):
        pass

    config = pointed(mode)
    Trainer(config)
    assert seen == [mode] and config.trainer.v1.trainer_mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_config_that_is_checked_again_is_the_same(
    mode: str, clean_environment: None, only_config_checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = mode if mode == "ppo_off_policy" else "pipeline" if mode == "pipeline_rl" else "recipe"
    config = changed(preset, {TRAINER_MODE: mode, AGENT_LOOP_MANAGER: MINE})
    monkeypatch.setattr(startup.config_checks, "find_problems", lambda config, also: [])
    startup.prepare_run(config)
    once = OmegaConf.to_container(config)
    assert startup.prepare_run(config) and OmegaConf.to_container(config) == once
    doors.restore_mode(config)
    doors.restore_manager(config)
    assert (select(config, TRAINER_MODE), select(config, AGENT_LOOP_MANAGER)) == (mode, MINE)


def test_mode_that_nobody_knows_is_verl_s_error_about_the_name_that_was_typed() -> None:
    with pytest.raises(ValueError, match=r"Unknown trainer 'snyc'\. Available trainers: .*sync"):
        get_trainer_cls(select(pointed("snyc"), TRAINER_MODE))


class Manager(AgentLoopManagerTQ):
    """A user's, with workers of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = Worker


@ray.remote(num_cpus=2)
class Worker(AgentLoopWorkerTQ.__ray_actor_class__):  # type: ignore[name-defined, misc]
    pass


class NoManager:
    pass


MINE = f"{__name__}.Manager"


def make_manager(config: DictConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As verl's TaskRunner does after its trainer was made, up to the workers, which would be Ray's."""
    monkeypatch.setattr(ray, "nodes", list)
    config.actor_rollout_ref.rollout.agent.num_workers = 0
    doors.restore_mode(config)
    cls = load_class_from_fqn(select(config, AGENT_LOOP_MANAGER), "AgentLoopManager")
    manager = cls(config=config, llm_client=None, teacher_client=None, reward_loop_worker_handles=None)
    asyncio.run(manager._init_agent_loop_workers())
    return manager


@pytest.mark.parametrize(("typed", "worker"), [(None, AgentLoopWorkerTQ), (MINE, Worker)])
def test_workers_have_our_pieces_in_front_whoever_made_their_manager(
    typed: str | None, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pointed("sync", typed)
    manager = make_manager(config, monkeypatch)
    assert isinstance(manager, AgentLoopManagerTQ if typed is None else Manager)
    assert select(config, AGENT_LOOP_MANAGER) == typed, "the workers' and the trackers' config has what was typed"
    made = manager.agent_loop_workers_class
    ours, theirs = made.__ray_actor_class__, worker.__ray_actor_class__
    assert ours.__mro__[1:3] == (agent_worker.AgentWorkerMixin, theirs)
    assert ours.__name__ == theirs.__name__, "Ray prints it before each line of its log"
    assert made._default_options == worker._default_options
    sent = cloudpickle.loads(cloudpickle.dumps(made.__ray_metadata__.modified_class))
    assert issubclass(sent, agent_worker.AgentWorkerMixin) and issubclass(sent, AgentLoopWorker)


def test_manager_that_is_none_of_verl_s_is_refused_with_its_key() -> None:
    config = pointed("sync", f"{__name__}.NoManager")
    with pytest.raises(ScaleRLConfigError, match=r"agent\.agent_loop_manager_class=.*NoManager is no subclass"):
        load_class_from_fqn(select(config, AGENT_LOOP_MANAGER), "AgentLoopManager")


@pytest.mark.parametrize("worker", [AgentLoopWorker, ray.remote(NoManager), None])
def test_workers_that_are_none_of_verl_s_are_refused_with_the_key(worker: Any) -> None:
    with pytest.raises(ScaleRLConfigError, match=r"agent\.agent_loop_manager_class makes its workers of"):
        agent_worker.with_our_pieces(worker)


def test_trainer_without_our_steps_is_refused_before_anything_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that makes a trainer of its own under the mode of ours, and a registered mode of the user's."""
    with pytest.raises(PatchError, match="lacks the steps of scalerl_verl"):
        trainer.require_our_trainer(pointed("sync"))
    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_base.TRAINER_REGISTRY", registry := {})
    monkeypatch.setattr(trainer, "TRAINER_REGISTRY", registry)

    @register_trainer("mine")
    class Mine(PPOTrainer):
        pass

    with pytest.raises(
        PatchError, match=r"\(Mine\) lacks the steps of scalerl_verl: make .*ScaleRLTrainer the first base class"
    ):
        make_manager(pointed("mine"), monkeypatch)

    @register_trainer("with_ours")
    class WithOurs(trainer.ScaleRLTrainer, PPOTrainer):
        pass

    make_manager(pointed("with_ours"), monkeypatch)


@pytest.mark.parametrize(("kwargs", "interval"), [({}, 2.0), (None, 2.0), ({"poll_interval_s": 0.25}, 0.25)])
def test_buffer_polls_as_often_as_it_is_told(kwargs: Any, interval: float) -> None:
    """verl's buffer takes 2 s, the step time of a small model, and the key means nothing to it."""

    class Stub:
        config = OmegaConf.create({"trainer": {"v1": {"sampler": {"sampler_kwargs": kwargs}}}})

        def _build_replay_buffer(self) -> ReplayBuffer:
            return ReplayBuffer("sync", {}, None, "wait", self.config.trainer.v1.sampler.sampler_kwargs)

    assert in_front_of(Stub)()._build_replay_buffer().poll_interval == interval


def test_separate_generators_start_where_verl_s_log_line_would_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault of verl 0.9.1: `flush` is no argument of a logger's."""

    def setup(self: Any) -> None:
        separate_async.logger.info("only without hybrid replicas", flush=True)

    monkeypatch.setattr(separate_async.PPOTrainerSeparateAsync, "_setup", setup)
    made: Any = object.__new__(trainer.ScaleRLSeparateAsync)
    made._enable_hybrid_replicas = False
    with caplog.at_level(logging.INFO, logger=separate_async.__name__):
        with pytest.raises(TypeError, match="flush"):
            setup(made)
        made._setup()
        assert separate_async.logger.level == logging.INFO
    assert "hybrid replicas disabled" in caplog.text


@pytest.mark.parametrize("platform", ["cpu", ""])
def test_old_policy_is_a_copy_also_where_the_trainer_s_memory_is_the_host_s(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles of verl's worker that keeps weights; the critic has another."""

    def of_verl(self: Any) -> None:
        self.role_worker_mapping = {"actor": ray.remote(DetachActorWorker), "critic": ray.remote(NoManager)}

    monkeypatch.setattr(separate_async.PPOTrainerSeparateAsync, "_init_resource_pool_mgr", of_verl)
    monkeypatch.setenv(PLATFORM_ENV, platform)
    made: Any = object.__new__(trainer.ScaleRLSeparateAsync)
    made._init_resource_pool_mgr()
    workers = [worker.__ray_actor_class__ for worker in made.role_worker_mapping.values()]
    assert workers == [CopyingWorker if platform else DetachActorWorker, NoManager]


def test_head_is_compared_on_the_first_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(trainer, "probe_sides", lambda made: made.global_steps)
    monkeypatch.setattr(trainer, "probe_first_batch", lambda *args: asked.append(args[-1]))

    class Stub:
        config, global_steps = OmegaConf.create({"actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean"}}}), 7

        def init(self) -> None:
            pass

        def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
            return batch

    made = in_front_of(Stub)()
    made.init()
    assert [made._compute_old_log_prob(batch, {}) for batch in "abc"] == ["a", "b", "c"]
    assert asked == [7, None, None]
