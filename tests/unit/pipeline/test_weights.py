# SPDX-License-Identifier: Apache-2.0
"""Who is paused when, how often a process group is built, and what happens when a generator is dead.

Generators and trainer are stubs that record their calls: the end-to-end runs have real ones.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()
import scalerl_verl.cpu.gloo_checkpoint  # noqa: E402,F401
from scalerl_verl.errors import GeneratorsLostError, WeightSyncError  # noqa: E402
from scalerl_verl.pipeline import failures, weights  # noqa: E402
from scalerl_verl.pipeline.settings import PipelineSettings  # noqa: E402
from scalerl_verl.pipeline.weights import WeightUpdater  # noqa: E402

UPDATE = {
    "pause_s": 0.1, "swap_s": 0.05, "kept_requests": 3, "recomputed_tokens": 0, "tokens_lost": 0, "idle_s": 1.0,
    "wall_s": 4.0, "generated_tokens": 7, "continued_tokens": 8, "continued_recomputed_tokens": 2,
}  # fmt: skip


HANG = object()
"""Answer of a stub that hangs in a collective, as NCCL does when a peer is gone."""


class Stub:
    """An actor: every method records (owner, method) and returns what ``answers`` says, or raises it."""

    def __init__(self, name: str, log: list[tuple[str, str]], answers: dict[str, Any] | None = None) -> None:
        self.name, self.log, self.answers = name, log, answers or {}

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.log.append((self.name, method))
            answer = self.answers.get(method)
            if isinstance(answer, list):
                answer = answer.pop(0) if answer else None
            if isinstance(answer, BaseException):
                raise answer
            if answer is HANG:
                await asyncio.Event().wait()
            return answer

        return SimpleNamespace(remote=call)


class StubGroup:
    """verl's worker group over ``members``."""

    world_size = 1

    def __init__(self, members: list[Stub]) -> None:
        self.members = members

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            name = args[0][0] if method == "execute_checkpoint_engine" else method
            return [getattr(member, name).remote() for member in self.members]

        return call


class Replica(SimpleNamespace):
    """What the updater knows of a generator."""

    __hash__ = object.__hash__  # verl puts replicas into a set


class Absent:
    """In place of LeftOut, which asks Ray actors (tests/faults/test_generator_strikes.py): says what a test says."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.back: list[Any] = []
        self.num_asked = 0

    def add(self, replicas: list[Any]) -> None:
        self.asked += replicas

    def find_returned(self) -> list[Any]:
        back, self.back = self.back, []
        return back


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, num: int = 2, **settings: Any) -> None:
        self.log: list[tuple[str, str]] = []
        self.lost: list[Any] = []
        trainer = StubGroup([Stub("trainer", self.log, {"update_weights": [{"sent": 1.0}] * 9})])
        self.replicas = [self.replica(i) for i in range(num)]
        config = SimpleNamespace(backend="gloo", custom_backend_module=None)
        self.updater = WeightUpdater(
            config, trainer, self.replicas, PipelineSettings(**settings), self.lost.extend,  # type: ignore[arg-type]
            on_returned=lambda replicas: self.returned.append((list(replicas), len(self.log))),
        )  # fmt: skip
        self.absent = self.updater._left_out = Absent()  # type: ignore[assignment]
        self.returned: list[tuple[list[Any], int]] = []
        monkeypatch.setattr(self.updater, "_build_group", self.build)
        self.num_built = 0

    def replica(self, number: int) -> Any:
        server = Stub(
            f"server-{number}", self.log, {name: [dict(UPDATE) for _ in range(9)] for name in ("swap", "finish_update")}
        )
        worker = Stub(
            f"worker-{number}", self.log, {"stage_weights": [(f"layout-{number}", b"where") for _ in range(9)]}
        )
        return Replica(replica_rank=number, servers=[server], workers=[worker], server_address=f"address-{number}")

    async def build(self) -> None:
        self.num_built += 1
        self.updater._rollout = StubGroup([worker for r in self.updater.replicas for worker in r.workers])

    def calls(self, name: str) -> list[str]:
        asked = ("check_alive", "get_replica_rank")
        return [method for owner, method in self.log if owner == name and method not in asked]


def test_weights_are_staged_while_generators_go_on_and_swapped_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    metrics = world.updater.update_weights(1)
    assert world.calls("server-0") == world.calls("server-1") == ["swap"], "one call, while nothing is generated"
    assert world.calls("worker-0") == ["stage_weights"]
    order = [method for _, method in world.log]
    assert order.index("swap") > max(i for i, method in enumerate(order) if method == "stage_weights")
    assert metrics["sent"] == 1.0 and metrics["scalerl/pipeline/kept_requests"] == 6
    assert metrics["scalerl/pipeline/generator_idle_fraction"] == 0.25
    assert metrics["scalerl/pipeline/replicas"] == 2


def test_ranks_that_keep_no_weights_load_from_the_memory_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num=1)
    (replica,) = world.replicas
    replica.workers += [Stub("worker-1", world.log, {"stage_weights": [("", b""), ("", b"")]})]
    replica.workers[0].answers["stage_weights"] = [("layout-0", b"where it lies"), ("layout-0", b"")]
    seen: list[Any] = []
    swap = replica.servers[0].swap.remote

    async def remember(version: int, staged: list[bytes], recompute: bool) -> Any:
        seen.append(staged)
        return await swap(version, staged, recompute)

    monkeypatch.setattr(replica.servers[0], "swap", SimpleNamespace(remote=remember), raising=False)
    world.updater.update_weights(1)
    world.updater.update_weights(2)
    assert seen == [[b"where it lies"] * 2, [b""] * 2]
    assert world.updater._copies.known == {"layout-0"}


@pytest.mark.parametrize(("asked", "staging"), [("device", "host"), ("host", "host"), ("none", "none")])
def test_gloo_stages_in_host_memory(monkeypatch: pytest.MonkeyPatch, asked: str, staging: str) -> None:
    assert World(monkeypatch, staging=asked).updater._staging == staging


def test_process_group_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for version in (1, 2, 3):
        world.updater.update_weights(version)
    assert world.num_built == 1 and "finalize" not in {method for _, method in world.log}


def test_without_staging_the_pause_covers_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, staging="none")
    world.updater.update_weights(1)
    assert world.calls("worker-0") == ["update_weights"]
    order = [method for owner, method in world.log if owner != "trainer"]
    assert order.index("update_weights") > max(i for i, method in enumerate(order) if method == "pause_keep")


def test_dead_generator_is_left_out_before_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.updater.update_weights(1)
    world.replicas[1].servers[0].answers["check_alive"] = ray.exceptions.ActorDiedError()
    metrics = world.updater.update_weights(2)
    assert world.lost == [world.replicas[1]] and world.num_built == 2
    assert metrics["scalerl/pipeline/replicas"] == 1
    assert "finalize" in world.calls("trainer") and "execute_checkpoint_engine" in world.calls("worker-0")
    assert "execute_checkpoint_engine" not in world.calls("worker-1"), "it is dead"


def test_generator_that_dies_in_an_update_does_not_leave_others_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    died = ray.exceptions.ActorDiedError()
    world.replicas[0].servers[0].answers.update(swap=died, check_alive=[None, died])
    world.updater.update_weights(1)
    calls = world.calls("server-1")
    assert calls == ["swap"] * 2, "once with the dying one, once more without it"
    assert world.lost == [world.replicas[0]]


def test_generator_that_hangs_in_a_swap_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server still answers; the engine behind it does not."""
    world = World(monkeypatch, transfer_timeout_s=0.1)
    world.replicas[0].servers[0].answers["swap"] = HANG
    metrics = world.updater.update_weights(1)
    assert world.lost == [world.replicas[0]] and metrics["scalerl/pipeline/replicas"] == 1
    assert world.calls("server-1") == ["swap"] * 2
    assert world.calls("server-0") == ["swap", "give_up"], "its requests would wait for their time-out"


@pytest.mark.parametrize("step", ["pause_keep", "finish_update"])
def test_generator_that_hangs_in_a_step_of_an_unstaged_update_is_left_out(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    world = World(monkeypatch, transfer_timeout_s=0.1, staging="none")
    world.replicas[1].servers[0].answers[step] = HANG
    assert world.updater.update_weights(1)["scalerl/pipeline/replicas"] == 1
    assert world.lost == [world.replicas[1]]


def test_run_ends_when_every_generator_hangs_in_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num=1, transfer_timeout_s=0.1)
    world.replicas[0].servers[0].answers["swap"] = HANG
    with pytest.raises(GeneratorsLostError, match="every generator") as ended:
        world.updater.update_weights(1)
    assert "swap to version 1 has not ended" in str(ended.value.__context__)


def test_unstaged_update_is_tried_again_only_after_all_have_ended_the_first_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A late end of the first try would let an engine go on in the middle of the second."""
    world = World(monkeypatch, staging="none")
    died = ray.exceptions.ActorDiedError()
    world.replicas[0].servers[0].answers.update(finish_update=died, check_alive=[None, died])
    ended: list[int] = []
    living = world.replicas[1].servers[0]

    async def finish_late(*_: Any) -> dict[str, float]:
        await asyncio.sleep(0.05)
        ended.append(len(world.calls("server-1")))
        return dict(UPDATE)

    living.finish_update = SimpleNamespace(remote=finish_late)
    world.updater.update_weights(1)
    assert ended == [1, 2], "a pause began before the update before it had ended"


def test_error_of_a_living_generator_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.replicas[0].workers[0].answers["stage_weights"] = ValueError("does not fit")
    with pytest.raises(ValueError, match="does not fit"):
        world.updater.update_weights(1)
    assert world.lost == []


def test_run_ends_when_no_generator_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num=1)
    world.replicas[0].workers[0].answers["get_replica_rank"] = ray.exceptions.ActorDiedError()
    with pytest.raises(GeneratorsLostError, match="every generator"):
        world.updater.check_generators()


@pytest.mark.fault("one request stuck running: sampling waits for ever")
def test_generator_that_dies_in_a_hanging_transfer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub's collective hangs for the others when a peer dies, and ends for the trainer after its time-out."""
    world = World(monkeypatch, transfer_timeout_s=0.1)
    world.updater.actor_wg.members[0].answers["update_weights"] = [RuntimeError("timed out"), {"sent": 1.0}]
    world.replicas[0].workers[0].answers["stage_weights"] = [HANG, ("layout-0", b"where")]
    world.replicas[1].workers[0].answers["stage_weights"] = [HANG]
    world.replicas[1].servers[0].answers["check_alive"] = [None, ray.exceptions.ActorDiedError()]
    metrics = world.updater.update_weights(1)
    assert world.lost == [world.replicas[1]] and world.num_built == 2
    assert metrics["sent"] == 1.0 and metrics["scalerl/pipeline/replicas"] == 1


def test_transfer_is_made_again_only_when_every_rank_of_the_trainer_is_out_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: ranks that gather weights for two transfers at once get each other's, or wait for ever."""
    world = World(monkeypatch)
    died = ray.exceptions.ActorDiedError()
    world.replicas[1].workers[0].answers["stage_weights"] = [died]
    world.replicas[1].servers[0].answers["check_alive"] = [None, died]
    trainer = world.updater.actor_wg.members[0]

    async def end_late(**_: Any) -> dict[str, float]:
        world.log.append(("trainer", "begins"))
        await asyncio.sleep(0.1)
        world.log.append(("trainer", "ends"))
        return {"sent": 1.0}

    trainer.update_weights = SimpleNamespace(remote=end_late)
    assert world.updater.update_weights(1)["scalerl/pipeline/replicas"] == 1
    assert world.calls("trainer") == ["begins", "ends", "finalize", "begins", "ends"]


def test_trainer_that_a_dead_peer_holds_in_a_transfer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can get it out, as of NCCL's collectives."""
    world = World(monkeypatch, transfer_timeout_s=0.1)
    world.updater.actor_wg.members[0].answers["update_weights"] = [HANG]
    world.replicas[1].workers[0].answers["stage_weights"] = [died := ray.exceptions.ActorDiedError()]
    world.replicas[1].servers[0].answers["check_alive"] = [None, died]
    with pytest.raises(WeightSyncError, match=r"ending a transfer that failed .*still in it: trainer rank 0\."):
        world.updater.update_weights(1)


def test_transfer_that_hangs_although_all_live_ends_the_run_and_names_who(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, transfer_timeout_s=0.1)
    world.updater.actor_wg.members[0].answers["update_weights"] = [HANG]
    world.replicas[1].workers[0].answers["stage_weights"] = [HANG]
    with pytest.raises(
        WeightSyncError, match=r"transfer of version 1 .*=0\.1; still in it: trainer rank 0, generator 1\."
    ):
        world.updater.update_weights(1)
    assert world.lost == []


def test_process_group_that_cannot_be_ended_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is still in the collective that the dead generator has left: nobody can get it out."""
    world = World(monkeypatch, transfer_timeout_s=0.1)
    world.updater.update_weights(1)
    world.updater.actor_wg.members[0].answers["finalize"] = HANG
    world.replicas[1].servers[0].answers["check_alive"] = ray.exceptions.ActorDiedError()
    with pytest.raises(WeightSyncError, match=r"ending the process group .*still in it: trainer rank 0\."):
        world.updater.update_weights(2)


def unreachable() -> ray.exceptions.ActorUnavailableError:
    return ray.exceptions.ActorUnavailableError("rpc timeout", b"0" * 16)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("no_pauses")
def test_generator_out_of_reach_for_a_moment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a passing network fault takes a generator out of the run for good."""
    world = World(monkeypatch)
    world.replicas[0].servers[0].answers["check_alive"] = [unreachable(), unreachable(), None]
    world.replicas[1].workers[0].answers["get_replica_rank"] = [unreachable(), 0]
    assert world.updater.update_weights(1)["scalerl/pipeline/replicas"] == 2 and world.lost == []


@pytest.mark.usefixtures("no_pauses")
def test_generator_that_stays_out_of_reach_is_left_out_and_told_to_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_strikes=2)
    world.replicas[0].servers[0].answers["check_alive"] = [unreachable() for _ in range(9)]
    assert world.updater.update_weights(1)["scalerl/pipeline/replicas"] == 1
    assert world.lost == [world.replicas[0]] and world.calls("server-0") == ["give_up"]


@pytest.mark.usefixtures("no_pauses")
def test_generator_that_does_not_answer_has_its_strikes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HEALTH_TIMEOUT_S", 0.05)
    world = World(monkeypatch, max_strikes=2)
    world.replicas[0].servers[0].answers["check_alive"] = [HANG, None]
    world.updater.check_generators()
    assert world.lost == []
    world.replicas[0].servers[0].answers["check_alive"] = HANG
    world.updater.check_generators()
    assert world.lost == [world.replicas[0]]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("owner", "method"), [("servers", "swap"), ("workers", "stage_weights")])
def test_update_in_which_a_generator_is_out_of_reach_for_a_moment_is_made_again(
    monkeypatch: pytest.MonkeyPatch, owner: str, method: str
) -> None:
    """Fault: a passing network fault in the middle of an update ends the run."""
    world = World(monkeypatch)
    world.updater.update_weights(1)
    actor = getattr(world.replicas[0], owner)[0]
    actor.answers[method].insert(0, unreachable())
    assert world.updater.update_weights(2)["scalerl/pipeline/replicas"] == 2
    assert world.lost == [] and world.num_built == 2, "others may have been in the collective: it is built anew"


@pytest.mark.usefixtures("no_pauses")
def test_update_that_never_gets_through_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_strikes=3)
    world.replicas[0].servers[0].answers["swap"] = [unreachable() for _ in range(9)]
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        world.updater.update_weights(1)
    assert world.calls("server-0") == ["swap"] * 3


def test_generator_that_gets_no_requests_gets_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one that the balancer has removed idles, receives weights, and counts as a replica."""
    world = World(monkeypatch)
    serving = ["address-0", "address-1"]
    world.updater._serving = lambda: serving
    assert world.updater.update_weights(1)["scalerl/pipeline/replicas"] == 2
    serving.remove("address-1")
    assert world.updater.update_weights(2)["scalerl/pipeline/replicas"] == 1
    assert world.lost == [world.replicas[1]] and world.calls("server-1") == ["swap", "give_up"]


def test_balancer_out_of_reach_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[str]:
        raise unreachable()

    world = World(monkeypatch)
    world.updater._serving = fail
    assert world.updater.update_weights(1)["scalerl/pipeline/replicas"] == 2


@pytest.mark.fault("a generator that hung for a while is lost for the rest of the run")
def test_generator_that_answers_again_gets_the_weights_and_then_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: one that was out of reach idles for the rest of the run. Before its weights are new it serves nobody."""
    world = World(monkeypatch)
    serving = ["address-0"]
    world.updater._serving = lambda: serving
    world.updater.update_weights(1)
    left_out = world.replicas[1]
    assert world.lost == world.absent.asked == [left_out]
    assert world.updater.update_weights(2)["scalerl/pipeline/replicas"] == 1 and world.returned == []
    world.absent.back = [left_out]
    metrics = world.updater.update_weights(3)
    assert metrics["scalerl/pipeline/replicas"] == 2 and world.num_built == 2, "the group is built anew, with it"
    ((returned, at),) = world.returned
    assert returned == [left_out] and ("server-1", "swap") in world.log[:at], "requests before weights"
    serving.append("address-1")
    assert world.updater.update_weights(4)["scalerl/pipeline/replicas"] == 2 and len(world.returned) == 1


class Launching:
    """In place of the Relauncher: what was launched is there when a test says so."""

    def __init__(self, *ready: Any) -> None:
        self.num_under_way, self.looks, self.ready = 1, 0, list(ready)

    def take_launched(self) -> list[Any]:
        self.looks += 1
        if self.looks < 3:
            return []
        self.num_under_way, ready, self.ready = 0, self.ready, []
        return ready


@pytest.mark.fault("a generator that died is lost for the rest of the run")
def test_run_waits_for_a_generator_in_the_place_of_its_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the weights that the dead one had before it gets requests, while the trainer waits for data."""
    monkeypatch.setattr(weights, "LOOK_S", 0.01)
    world = World(monkeypatch, num=1)
    world.updater.update_weights(3)
    world.replicas[0].servers[0].answers["check_alive"] = ray.exceptions.ActorDiedError()
    fresh = world.replica(7)
    world.updater._relauncher = Launching(fresh)  # type: ignore[assignment]
    world.updater.check_generators()
    assert world.lost == [world.replicas[0]] and world.updater.replicas == [fresh]
    ((returned, at),) = world.returned
    assert returned == [fresh] and ("server-7", "swap") in world.log[:at], "requests before weights"
    assert world.num_built == 2 and world.updater.update_weights(4)["scalerl/pipeline/replicas"] == 1


def test_run_that_launches_none_ends_with_its_last_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, also while the dead one is asked: its trainer may be in a collective that nobody ends."""
    world = World(monkeypatch, num=1, max_relaunches=0)
    world.updater.update_weights(1)
    world.absent.num_asked = 1
    world.replicas[0].servers[0].answers["check_alive"] = ray.exceptions.ActorDiedError()
    with pytest.raises(GeneratorsLostError):
        world.updater.check_generators()
    assert "finalize" not in world.calls("trainer")


def test_run_ends_when_the_launch_takes_longer_than_a_transfer_may(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num=1, transfer_timeout_s=0.05)
    world.replicas[0].servers[0].answers["check_alive"] = ray.exceptions.ActorDiedError()
    world.updater._relauncher = Launching()  # type: ignore[assignment]
    world.updater._relauncher.looks = -(10**9)
    with pytest.raises(GeneratorsLostError, match=r"none was launched in its place .*max_relaunches=3, .*=0\.05"):
        world.updater.check_generators()


@pytest.mark.fault("a generator that hung for a while is lost for the rest of the run")
def test_generator_that_comes_back_and_hangs_again_gets_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, num=3, transfer_timeout_s=0.1)
    left_out = world.replicas[2]
    left_out.servers[0].answers["swap"] = [HANG, HANG]
    assert world.updater.update_weights(1)["scalerl/pipeline/replicas"] == 2
    world.absent.back = [left_out]
    assert world.updater.update_weights(2)["scalerl/pipeline/replicas"] == 2
    assert world.lost == [left_out] * 2 and world.returned == []
    assert world.updater.update_weights(3)["scalerl/pipeline/replicas"] == 2 and world.returned == []
