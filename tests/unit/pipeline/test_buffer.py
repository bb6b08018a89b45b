# SPDX-License-Identifier: Apache-2.0
"""The replay buffer: which groups train, which are started, which are started again.

TransferQueue is a stub here, a dictionary: the real one needs Ray, and the end-to-end runs use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from scalerl_verl.cpu.vllm_alias import install_vllm_alias

install_vllm_alias()

from verl.trainer.ppo.v1 import replay_buffer as verl_buffer  # noqa: E402

from scalerl_verl.errors import GenerationFailedError, GeneratorsLostError, NoSignalError  # noqa: E402
from scalerl_verl.pipeline import buffer as our_buffer  # noqa: E402
from scalerl_verl.pipeline.admission import AdmissionRule  # noqa: E402
from scalerl_verl.pipeline.buffer import PipelineReplayBuffer  # noqa: E402
from scalerl_verl.pipeline.failures import ERROR_TAG  # noqa: E402
from scalerl_verl.pipeline.filtering import GroupFilter  # noqa: E402
from scalerl_verl.pipeline.groups import GiveUpStreak, GroupWatch  # noqa: E402
from scalerl_verl.pipeline.lead import Lead  # noqa: E402

GROUP_SIZE = 2


class World:
    """Prompts with their state, and a script of what happens while the trainer waits."""

    def __init__(
        self,
        batch_groups: int,
        k: int,
        monkeypatch: pytest.MonkeyPatch,
        num_steps: int = 100,
        lead: Lead | None = None,
        max_batches: int | None = None,
    ) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.count, self.step = 0, 1
        self.waits: list[Any] = []
        self.now = 0.0
        self.health_checks = 0
        self.rewards: dict[str, float] = {}
        self.rejected: list[list[str]] = []
        monkeypatch.setattr(verl_buffer, "tq", self)
        monkeypatch.setattr(our_buffer, "tq", self)
        monkeypatch.setattr("transfer_queue.kv_list", self.kv_list)
        self.buffer = PipelineReplayBuffer(
            AdmissionRule(batch_groups, k),
            group_size=GROUP_SIZE,
            watch=GroupWatch(max_attempts=2, timeout_s=50.0, clock=lambda: self.now),
            admit=self.admit,
            reissue=self.reissue,
            check_generators=self.check,
            num_steps=lambda: num_steps,
            lead=lead,
            group_filter=None if max_batches is None else GroupFilter("reward", max_batches, batch_groups),
            note_rejected=lambda batch, num_sampled: self.rejected.append(sorted(batch.keys)),
            trainer_mode="pipeline_rl",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="wait",
            sampler_kwargs={},
        )
        monkeypatch.setattr(self.buffer, "_wait_for_next_poll", self.wait)

    # What the buffer asks of TransferQueue.
    def kv_list(self, partition: str | None = None) -> dict[str, dict]:
        return {"train": {key: dict(tag) for key, tag in self.rows.items()}}

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: list[dict[str, Any]]) -> None:
        for key, tag in zip(keys, tags, strict=True):
            self.rows[key].update(tag)

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: Sequence[str] = ("response_mask",)
    ) -> dict[str, Any]:
        """Responses of three tokens, the last of which is not sampled; the reward is that of the key, or 0."""
        assert keys and set(keys) <= self.rows.keys()
        scores = torch.tensor([[0.0, self.rewards.get(key, 0.0), 0.0] for key in keys])
        columns = {"rm_scores": scores, "response_mask": torch.tensor([[1, 1, 0]] * len(keys))}
        columns["extra_fields"] = np.array([{"versions": [[0, 2]]} for _ in keys], dtype=object)
        return {name: columns[name] for name in select_fields}

    # What it asks of the trainer.
    def admit(self, num: int) -> None:
        for _ in range(num):
            self.rows[f"g{self.count}"] = {"is_prompt": True, "status": "pending", "global_steps": self.step}
            self.count += 1

    def reissue(self, uids: list[str]) -> list[str]:
        new = [f"{uid}.again" for uid in uids]
        for uid in new:
            self.rows[uid] = {"is_prompt": True, "status": "pending", "global_steps": self.step}
        return new

    def check(self) -> None:
        self.health_checks += 1

    def wait(self, partition: str, last: float) -> float:
        assert self.waits, f"the trainer waits and nothing more will happen: {self.rows}"
        self.waits.pop(0)()
        return last

    def finish(self, *uids: str, status: str = "finished", num: int = GROUP_SIZE) -> None:
        for uid in uids:
            self.rows[uid]["status"] = status
            for session in range(num):
                self.rows[f"{uid}_{session}_0"] = {"status": "success"}

    def finish_mixed(self, *uids: str) -> None:
        """Groups with a signal: their first response earns 1, the others nothing."""
        self.finish(*uids)
        self.rewards |= {f"{uid}_0_0": 1.0 for uid in uids}

    def fail_open(self, error: str | None) -> list[str]:
        """Every group that is open fails, as verl's worker and `note_failure` report it; the groups."""
        groups = [uid for uid, tag in self.rows.items() if tag.get("status") == "pending"]
        for uid in groups:
            self.rows[uid].update({"status": "failure"} | ({ERROR_TAG: error} if error else {}))
        return groups

    def sample(self, step: int) -> tuple[list[str], dict]:
        self.step = step
        batch, metrics = self.buffer.sample(step, "train", self.buffer._rule.batch_groups)
        assert all(key.count("_") == 2 for key in batch.keys), "only rows of responses go to the trainer"
        groups = sorted({key.split("_")[0] for key in batch.keys})
        for key in batch.keys:
            self.rows.pop(key)
        return groups, {name.removeprefix("scalerl/pipeline/"): value for name, value in metrics.items()}


def test_groups_are_started_up_to_the_bound_and_the_oldest_train(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 1, monkeypatch)
    world.waits = [lambda: world.finish("g3", "g1"), lambda: world.finish("g0")]
    groups, metrics = world.sample(1)
    assert groups == ["g1", "g3"] and world.count == 4, "B * (k + 1) groups; the first two to end may train"
    assert metrics["groups_in_flight"] == 2 and metrics["queue_depth"] == 0
    world.waits.append(lambda: world.finish("g2"))
    assert world.sample(2)[0] == ["g0", "g2"], "at version 1 groups of version 0 train or never"
    assert world.count == 6


def test_no_more_start_than_the_lead_says_and_it_learns_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recording(Lead):
        def note_batch(self, version: int, oldest: int, num_over: int, short: float, waited: float) -> None:
            assert 0 <= short <= waited
            noted.append((version, oldest, num_over))

    noted: list[tuple[int, int, int]] = []
    lead = Recording(AdmissionRule(2, 8))
    lead.groups = 5
    world = World(2, 8, monkeypatch, lead=lead)
    world.waits = [lambda: world.finish("g0", "g1", "g2")]
    _, metrics = world.sample(1)
    assert world.count == 5 and metrics["lead"] == 1.5 and noted == [], "before the second batch no step has a length"
    world.waits = [lambda: world.finish("g3")]
    assert "g3" in world.sample(2)[0] and world.count == 7
    lead.groups = 3
    world.finish("g4", "g5", "g6")
    assert "g4" in world.sample(3)[0] and world.count == 7, "three are there already"
    assert noted == [(1, 0, -1), (2, 0, 1)], "one group less than a batch at the first look, then one more"


def test_straggler_of_the_last_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 1, monkeypatch)
    world.waits = [lambda: world.finish("g1")]
    assert world.sample(1)[0] == ["g1"]
    world.step = 2
    world.buffer.top_up(2)
    world.finish("g2")
    world.waits = [lambda: None, lambda: world.finish("g0")]
    assert world.sample(2)[0] == ["g0"], "g2 is complete, but g0 would be too old for the step after"


@pytest.mark.fault("a staleness bound of 0 or 1 that is off by one")
def test_k_0_starts_one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a staleness bound of 0 is off by one."""
    world = World(3, 0, monkeypatch)
    for step in (1, 2):
        names = [f"g{world.count + i}" for i in range(3)]
        world.waits = [lambda names=names: world.finish(*names)]
        assert world.sample(step)[0] == sorted(names)
        assert world.count == 3 * step and world.rows == {}


def test_nothing_is_started_for_steps_that_will_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 3, monkeypatch, num_steps=1)
    world.waits = [lambda: world.finish("g0", "g1")]
    world.sample(1)
    assert world.count == 2


def test_failed_group_is_started_again_then_given_up_and_never_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 0, monkeypatch)
    world.waits = [
        lambda: world.finish("g0", status="failure", num=1),
        lambda: world.finish("g0.again", status="failure", num=0),
        lambda: world.finish("g1"),
    ]
    groups, metrics = world.sample(1)
    assert groups == ["g1"] and metrics["groups_reissued_sum"] == 1 and metrics["groups_given_up_sum"] == 1
    assert world.rows == {}, "rows of failed attempts are gone"


def test_group_with_a_missing_response_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 0, monkeypatch)
    world.waits = [lambda: world.finish("g0", num=1), lambda: world.finish("g0.again")]
    assert world.sample(1)[0] == ["g0.again"]


@pytest.mark.fault("one request stuck running: sampling waits for ever")
def test_lost_group_stuck_in_running_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a lost uid stuck in "running" blocks sampling for ever. Its old attempt comes back late, too."""
    world = World(1, 0, monkeypatch)

    def run() -> None:
        world.rows["g0"]["status"] = "running"

    def pass_time() -> None:
        world.now = 60.0

    def come_back() -> None:
        world.rows["g0"] = {"status": "finished"}
        world.rows["g0_0_0"] = {"status": "success"}

    world.waits = [run, pass_time, come_back, lambda: world.finish("g0.again")]
    groups, metrics = world.sample(1)
    assert groups == ["g0.again"] and metrics["groups_reissued_sum"] == 1


def test_generators_are_looked_at_while_the_trainer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_buffer, "HEALTH_INTERVAL_S", -1.0)
    world = World(1, 0, monkeypatch)
    world.waits = [lambda: None, lambda: world.finish("g0")]
    world.sample(1)
    assert world.health_checks == 2


def test_another_batch_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="3 groups were asked for, but a batch has 2"):
        World(2, 0, monkeypatch).buffer.sample(1, "train", 3)


@pytest.mark.fault("every group fails: they are given up for ever, and nobody says why")
@pytest.mark.parametrize(("batch_groups", "k"), [(8, 1), (4, 2), (1, 0)])
def test_run_of_which_every_group_fails_stops_with_the_cause(
    batch_groups: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a broken tokenizer or agent loop, and groups are given up for ever."""
    world = World(batch_groups, k, monkeypatch)
    world.waits = [lambda: world.fail_open("KeyError: 'chat_template'") and None] * 1000
    with pytest.raises(
        GenerationFailedError, match=r"(\d+) prompt groups in a row .*KeyError: 'chat_template'"
    ) as error:
        world.sample(1)
    num = int(str(error.value).split()[0])
    bound = max(batch_groups * (k + 1), GiveUpStreak.LEAST)
    assert num == bound, "a round of all groups that may be open fails, and that is it"
    assert "AgentLoopWorker" in str(error.value) and "max_attempts" in str(error.value)


def test_run_whose_last_generator_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every group fails because nobody generates, and the message blames tokenizer and agent loop."""

    def lost() -> None:
        raise GeneratorsLostError("every generator is dead")

    world = World(8, 0, monkeypatch)
    world.buffer._check_generators = lost
    world.waits = [lambda: world.fail_open("no server is left") and None] * 1000
    with pytest.raises(GeneratorsLostError):
        world.sample(1)


def test_error_that_nobody_recorded_still_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(8, 0, monkeypatch)
    world.waits = [lambda: world.fail_open(None) and None] * 1000
    with pytest.raises(GenerationFailedError, match="no error was recorded"):
        world.sample(1)


def test_poisoned_prompts_among_healthy_ones_are_only_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other prompt fails always, over three batches: more are given up than may be in a row."""
    world = World(8, 0, monkeypatch)

    def every_other() -> None:
        for uid in [uid for uid, tag in world.rows.items() if tag.get("status") == "pending"]:
            if int(uid.split(".")[0][1:]) % 2:
                world.finish(uid)
            else:
                world.rows[uid].update({"status": "failure", ERROR_TAG: "ValueError: poisoned"})

    given_up = 0
    for step in (1, 2, 3):
        world.waits = [every_other] * 200
        groups, metrics = world.sample(step)
        assert len(groups) == 8 and all(int(uid.split(".")[0][1:]) % 2 for uid in groups)
        given_up += metrics["groups_given_up_sum"]
    assert given_up > 2 * GiveUpStreak.LEAST


def test_first_failures_do_not_count_when_groups_finish_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A streak ends with the first group that finishes, and starts anew."""
    streak = GiveUpStreak(8)
    streak.note((), [f"a{i}" for i in range(7)], "x")
    streak.note({"good"}, ["b"], "x")
    streak.note({"good"}, [f"c{i}" for i in range(7)], "x")
    with pytest.raises(GenerationFailedError, match=r"^8 prompt groups .*: y\."):
        streak.note({"good"}, ["d"], "y")


@pytest.mark.fault("dynamic sampling: groups without a signal train, or what replaces them breaks the bound")
@pytest.mark.parametrize("k", [0, 1])
def test_groups_without_a_signal_are_given_up_and_others_take_their_place(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(2, k, monkeypatch, max_batches=0)
    bound = 2 * (k + 1)

    def first() -> None:
        world.finish("g0")
        world.finish_mixed("g1")

    def then() -> None:
        assert world.count == bound + 1 and "g0" not in world.rows and "g0_0_0" not in world.rows
        world.finish_mixed(f"g{bound}", *(["g2", "g3"] if k else []))

    world.waits = [first, then]
    groups, metrics = world.sample(1)
    assert len(groups) == 2 and set(groups) <= {"g1", "g2", "g3", f"g{bound}"}
    assert world.rejected == [["g0_0_0", "g0_1_0"]]
    assert metrics["groups_rejected_sum"] == 1 and metrics["tokens_rejected_sum"] == 2 * GROUP_SIZE
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert metrics[verl_buffer.DAPO_FILTERED_REWARD_COUNTS_KEY] == {0.0: 1}
    world.step = 2
    world.buffer.top_up(2)
    world.finish_mixed(*(uid for uid, tag in world.rows.items() if tag.get("status") == "pending"))
    _, metrics = world.sample(2)
    assert metrics["groups_rejected_sum"] == metrics["tokens_rejected_sum"] == 0, "counts are those of one batch"
    assert "training/filter_groups/evicted_samples" not in metrics


def test_without_dynamic_sampling_such_groups_train(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 0, monkeypatch)
    world.waits = [lambda: world.finish("g0", "g1")]
    groups, metrics = world.sample(1)
    assert groups == ["g0", "g1"] and "groups_rejected_sum" not in metrics


def test_incomplete_group_is_started_again_and_not_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 0, monkeypatch, max_batches=0)
    world.waits = [lambda: world.finish("g0", num=1), lambda: world.finish_mixed("g0.again")]
    groups, metrics = world.sample(1)
    assert groups == ["g0.again"] and metrics["groups_reissued_sum"] == 1 and metrics["groups_rejected_sum"] == 0


def test_prompt_with_one_response_of_its_own_is_not_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's filter looks at groups of several."""
    world = World(1, 0, monkeypatch, max_batches=0)
    world.buffer.note_group_sizes({"g0": 1})
    world.waits = [lambda: world.finish("g0", num=1)]
    assert world.sample(1)[0] == ["g0"]


@pytest.mark.fault("dynamic sampling never finds a batch: generation goes on for ever, and nobody says why")
def test_run_that_finds_no_signal_ends_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 0, monkeypatch, max_batches=3)

    def finish_open() -> None:
        world.finish(*[uid for uid, tag in world.rows.items() if tag.get("status") == "pending"])

    world.waits = [finish_open] * 100
    with pytest.raises(NoSignalError, match=r"max_num_gen_batches=3 batches of 2 groups.*filter_groups\.enable=False"):
        world.sample(1)
    assert world.count == 6 and len(world.waits) == 97, "three batches were generated, and that is it"


def test_groups_that_can_train_count_as_generated_and_the_count_begins_anew_with_each_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(2, 0, monkeypatch, max_batches=2)
    for step, (alike, mixed, last) in enumerate([("g0", "g1", "g2"), ("g3", "g4", "g5")], start=1):
        world.waits = [
            lambda a=alike, m=mixed: (world.finish(a), world.finish_mixed(m)),
            lambda uid=last: world.finish_mixed(uid),
        ]
        assert world.sample(step)[0] == [mixed, last]
    world.waits = [
        lambda: (world.finish("g6"), world.finish_mixed("g7")),
        lambda: world.finish("g8"),
        lambda: world.finish("g9"),
    ]
    with pytest.raises(NoSignalError, match=r"^3 prompt groups .* 1 groups can train"):
        world.sample(3)


def test_group_that_finishes_after_the_look_is_judged_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 1, monkeypatch, max_batches=0)
    world.buffer.top_up(1)
    world.finish("g0")
    world.buffer._note_rejected = lambda *_: world.finish("g1") if "g1_0_0" not in world.rows else None
    world.waits = [lambda: None, lambda: world.finish_mixed("g2")]
    groups, metrics = world.sample(1)
    assert groups == ["g2"] and metrics["groups_rejected_sum"] == 2


@pytest.mark.fault("dynamic sampling: groups without a signal train, or what replaces them breaks the bound")
def test_resumed_run_has_no_rejected_group_and_judges_those_that_had_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    first = World(2, 1, monkeypatch, max_batches=0)
    first.waits = [lambda: (first.finish("g0"), first.finish_mixed("g1", "g2"))]
    assert first.sample(1)[0] == ["g1", "g2"]
    first.finish("g3")  # alike; nobody has looked at it when the checkpoint is written
    second = World(2, 1, monkeypatch, max_batches=0)
    second.rows, second.count, second.rewards = dict(first.rows), first.count, first.rewards
    assert not [key for key in second.rows if key.startswith(("g0", "g1", "g2"))]

    def finish_open() -> None:
        second.finish_mixed(*[uid for uid, tag in second.rows.items() if tag.get("status") == "pending"])

    second.waits = [finish_open] * 9
    groups, metrics = second.sample(2)
    assert metrics["groups_rejected_sum"] == 1 and second.rejected == [["g3_0_0", "g3_1_0"]]
    assert len(groups) == 2 and not {"g0", "g1", "g2", "g3"} & set(groups)
