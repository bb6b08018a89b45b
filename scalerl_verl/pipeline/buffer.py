# SPDX-License-Identifier: Apache-2.0
"""verl's replay buffer with the admission rule: what may train, what is started, what is started again."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import DAPO_FILTERED_REWARD_COUNTS_KEY, ReplayBufferAsync

from scalerl_verl.columns import ROLLOUT_N, VERSIONS, objects_of, queue_rows, read_group_sizes
from scalerl_verl.errors import GenerationFailedError
from scalerl_verl.names import GROUP_SIZE, MAX_STALENESS
from scalerl_verl.pipeline.admission import AdmissionRule
from scalerl_verl.pipeline.failures import ERROR_TAG, WAITING_TAG
from scalerl_verl.pipeline.filtering import GroupFilter
from scalerl_verl.pipeline.groups import GiveUpStreak, GroupWatch
from scalerl_verl.pipeline.lead import Lead, Wait

logger = logging.getLogger(__name__)
HEALTH_INTERVAL_S = 30.0
"""Seconds between two looks at the generators while the trainer waits for data."""


class PipelineReplayBuffer(ReplayBufferAsync):
    """Batches of whole groups by `AdmissionRule`; validation is verl's.

    verl tags a prompt with the step in which it was handed out; the weights in use then are those of the step before,
    so a group of step s starts at version s - 1.

    What lies in the queue at the first look is a checkpoint's, maybe of another k, batch or group size. Groups that can
    train as they are stay; the others are generated again, before any fresh prompt. Those that the rule has no room for
    yet wait in the queue under `WAITING_TAG`, through further checkpoints, too.

    Args:
        rule: the admission rule.
        group_size: responses to a prompt that asks for no number of its own (`note_group_sizes`).
        watch: attempts and ages of groups.
        admit: ``admit(num_prompts)`` hands out fresh prompts.
        reissue: ``reissue(uids)`` starts groups again from nothing, under new ids, which it returns.
        check_generators: raises if there is nobody left to wait for.
        num_steps: optimizer steps of the whole run.
        lead: keeps the number of groups under way below what the rule allows; None: the rule alone.
        group_filter: dynamic sampling: finished groups whose metric is the same for all responses are given up, and
            the rule starts others; None: every finished group trains.
        note_rejected: ``note_rejected(batch, num_sampled)`` learns of their rows (verl's KVBatchMeta) and of the tokens
            that each row trains, before they are deleted.
        **kwargs: verl's.
    """

    def __init__(
        self,
        rule: AdmissionRule,
        group_size: int,
        watch: GroupWatch,
        admit: Callable[[int], Any],
        reissue: Callable[[list[str]], list[str]],
        check_generators: Callable[[], None],
        num_steps: Callable[[], int],
        lead: Lead | None = None,
        group_filter: GroupFilter | None = None,
        note_rejected: Callable[[Any, list[int]], None] = lambda batch, num_sampled: None,
        **kwargs: Any,
    ) -> None:
        # What verl's own search for such groups goes by; it wants to know who replaces them, and never asks.
        metric = None if group_filter is None else group_filter.metric
        super().__init__(**kwargs, filter_groups_metric=metric, refill_fn=admit)
        self._rule, self._group_size, self._watch = rule, group_size, watch
        self._admit, self._reissue, self._check_generators = admit, reissue, check_generators
        self._num_steps, self._lead = num_steps, lead
        self._filter, self._note_rejected = group_filter, note_rejected
        self._batch_at: float | None = None
        self._sizes: dict[str, int] = {}
        self._is_first_look = True
        self._streak = GiveUpStreak(rule.batch_groups * (rule.max_staleness + 1))
        self.counts: Counter[str] = Counter()

    def note_group_sizes(self, sizes: Mapping[str, int]) -> None:
        """Prompts that ask for a number of responses of their own (verl's column ``__rollout_n__``)."""
        self._sizes.update(sizes)

    def top_up(self, global_steps: int) -> None:
        """Start as many groups as the rule allows at this step, those that wait before fresh ones."""
        self._sync_metadata_from_transfer_queue()
        if self._is_first_look:
            self._is_first_look = False
            self._sort_restored(global_steps)
        num_untrained = len(self.prompt_global_steps["train"])
        most = None if self._lead is None else self._lead.groups
        num = self._rule.num_to_admit(num_untrained, max(0, self._num_steps() - global_steps + 1), most)
        if not num:
            return
        waiting = self._find_waiting()[:num]
        if waiting:
            self._reissue(waiting)
            tq.kv_clear(keys=waiting, partition_id="train")
        if num > len(waiting):
            self._admit(num - len(waiting))

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        """The next batch by the rule; waits for it. Validation goes verl's way.

        Raises:
            GenerationFailedError: every group is given up, one after the other.
            NoSignalError: too many groups in which all responses earn the same.
            ValueError: another batch size than the rule's.
        """
        if partition_id == "val":
            return super().sample(global_steps, partition_id, batch_size)
        if batch_size != self._rule.batch_groups:
            raise ValueError(f"{batch_size} groups were asked for, but a batch has {self._rule.batch_groups}")
        last_debug = last_look = time.time()
        wait = Wait(self._rule.batch_groups)
        while True:
            self._sync_metadata_from_transfer_queue()
            self._start_again()
            self._reject_alike()
            looked_at = set(self.finished_keys["train"])
            self.top_up(global_steps)  # which looks again: what has finished in between is not judged yet
            starts = {uid: step - 1 for uid, step in self.prompt_global_steps["train"].items()}
            finished = {uid: starts[uid] for uid in looked_at}
            running = [start for uid, start in starts.items() if uid not in finished]
            wait.look(len(finished))
            batch = self._rule.select(global_steps - 1, finished, running)
            if batch is not None:
                self._note_lead(global_steps - 1, min(starts[uid] for uid in batch), wait)
                self._watch.forget(batch)
                self._forget_sizes(batch)
                depth = len(finished) - len(batch)
                metrics = {
                    "scalerl/pipeline/queue_depth": depth,
                    "scalerl/pipeline/groups_in_flight": len(running),
                    **({} if self._lead is None else {"scalerl/pipeline/lead": self._lead.batches}),
                    **{f"scalerl/pipeline/{name}_sum": self.counts[name] for name in GroupWatch.COUNTS},
                    **self._take_rejections(),
                }
                self.counts.clear()
                return self._materialize_batch("train", batch, dict(self.partitions["train"])), metrics
            if time.time() - last_look > HEALTH_INTERVAL_S:
                self._check_generators()
                last_look = time.time()
            last_debug = self._wait_for_next_poll("train", last_debug)

    def _note_lead(self, version: int, oldest: int, wait: Wait) -> None:
        now = time.perf_counter()
        if self._lead is not None and self._batch_at is not None:
            step_s = max(now - self._batch_at, 1e-9)
            self._lead.note_batch(version, oldest, wait.num_over, wait.short_s / step_s, wait.waited_s / step_s)
        self._batch_at = now

    def _start_again(self) -> None:
        """Failed, incomplete and stuck groups: another attempt, or, after too many, gone for good."""
        counts = self._count_responses()
        incomplete = {uid for uid in self.finished_keys["train"] if counts[uid] < self._size_of(uid)}
        complete = self.finished_keys["train"] - incomplete
        self._watch.note_finished(complete)
        open_groups = self.pending_keys["train"] | self.running_keys["train"]
        stuck = self._watch.find_stuck(open_groups)
        failed = self.failure_keys["train"] | incomplete | stuck
        if not failed:
            self._streak.note(complete, (), "")
            return
        causes = dict.fromkeys(failed, "no error was recorded: look into the log of the AgentLoopWorkers")
        causes |= dict.fromkeys(incomplete, "a response is missing: an agent loop returned no output")
        causes |= dict.fromkeys(stuck, "no end within the time limit: its AgentLoopWorker may be gone")
        causes |= self._read_errors(failed)
        again, given_up = self._watch.sort_failed(sorted(failed))
        last_error = causes[(given_up or again)[-1]]
        logger.warning("groups started again: %s; given up: %s; the last error: %s", again, given_up, last_error)
        try:
            self._streak.note(complete, given_up, last_error)
        except GenerationFailedError:
            self._check_generators()  # if there is none left, that is the cause, and it has a name of its own
            raise
        if again:
            for old, new in zip(again, self._reissue(again), strict=True):
                self._watch.renew(old, new)
        self._clear_groups("train", set(failed))
        self._forget_sizes(failed)
        self.counts.update({"groups_reissued": len(again), "groups_given_up": len(given_up)})
        self._sync_metadata_from_transfer_queue()

    def _reject_alike(self) -> None:
        """Give up the finished groups that verl's filter finds; none of them comes back, on a resumption neither."""
        if self._filter is None:
            return
        alike, values = self._dapo_filtered_keys("train")
        if alike:
            tags = {key: tag for key, tag in self.partitions["train"].items() if key.split("_")[0] in alike}
            batch = KVBatchMeta(partition_id="train", keys=list(tags), tags=list(tags.values()))
            masks = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["response_mask"])
            num_sampled = [int(mask.sum()) for mask in masks["response_mask"].unbind()]
            self._note_rejected(batch, num_sampled)
            self.counts.update({"groups_rejected": len(alike), "tokens_rejected": sum(num_sampled)})
            self._clear_groups("train", alike)
            self._watch.forget(alike)
            self._forget_sizes(alike)
        self._filter.note(values, len(self.finished_keys["train"]))

    def _take_rejections(self) -> dict[str, Any]:
        """Metrics of the groups that were rejected for the batch that is complete now; verl's own names, too."""
        if self._filter is None:
            return {}
        values = self._filter.take()
        metrics: dict[str, Any] = {f"scalerl/pipeline/{name}_sum": self.counts[name] for name in GroupFilter.COUNTS}
        if values:
            metrics["training/filter_groups/evicted_samples"] = sum(values.values())
            metrics[DAPO_FILTERED_REWARD_COUNTS_KEY] = values
        return metrics

    @staticmethod
    def _read_errors(failed: set[str]) -> dict[str, str]:
        """What the agent loops of these groups raised, as `note_failure` left it; verl's snapshot has no such tag."""
        rows = queue_rows("train")
        return {uid: str(rows[uid][ERROR_TAG]) for uid in failed if ERROR_TAG in rows.get(uid, {})}

    def _sort_restored(self, global_steps: int) -> None:
        """Keep the groups of a checkpoint that can train as they are; let the others wait to be generated again."""
        starts = {uid: step - 1 for uid, step in self.prompt_global_steps["train"].items()}
        if not starts:
            return
        finished = sorted(self.finished_keys["train"])
        if finished:
            stored = tq.kv_batch_get(keys=finished, partition_id="train")
            self.note_group_sizes(read_group_sizes(stored, finished))
        counts = self._count_responses()
        unknown = self._find_unversioned(finished)
        complete = [uid for uid in finished if counts[uid] == self._size_of(uid)]
        fitting = {uid: starts[uid] for uid in complete if uid not in unknown}
        kept = self._rule.keep(global_steps - 1, fitting)
        again = [uid for uid in starts if uid not in kept]
        if again:
            self._let_wait(again)
        num_again = {
            "were unfinished": len(starts) - len(finished),
            f"are too old for {MAX_STALENESS}={self._rule.max_staleness} and "
            f"data.train_batch_size={self._rule.batch_groups}": len(fitting) - len(kept),
            f"have another number of responses than {GROUP_SIZE}={self._group_size}, or {ROLLOUT_N} of "
            "their prompt": len(finished) - len(complete),
            "have no record of their weights' versions, as in other trainer modes": len(complete) - len(fitting),
        }
        reasons = "; ".join(f"{num} {why}" for why, num in num_again.items() if num)
        print(
            f"[scalerl_verl] resumed: of {len(starts)} prompt groups in the checkpoint {len(kept)} train as they are, "
            f"and {len(again)} are generated again{reasons and f' ({reasons})'}",
            file=sys.stderr,
            flush=True,
        )

    def _find_unversioned(self, finished: list[str]) -> set[str]:
        """Groups that another trainer mode finished: they have no record of the versions of their tokens."""
        groups = set(finished)
        keys = [key for key in self.partitions["train"] if key.split("_")[0] in groups]
        if not keys:
            return set()
        data = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["extra_fields"])
        extras = zip(keys, objects_of(data["extra_fields"]), strict=True)
        return {key.split("_")[0] for key, extra in extras if extra.get(VERSIONS) is None}

    def _let_wait(self, uids: list[str]) -> None:
        """Drop what was generated for these prompts; to verl they are no prompts from here on."""
        gone = set(uids)
        responses = [key for key in self.partitions["train"] if key.split("_")[0] in gone]
        if responses:
            tq.kv_clear(keys=responses, partition_id="train")
        tq.kv_batch_put(keys=uids, partition_id="train", tags=[{"is_prompt": False, WAITING_TAG: True} for _ in uids])
        self._forget_sizes(uids)
        self._sync_metadata_from_transfer_queue()

    def _find_waiting(self) -> list[str]:
        """Prompts that wait to be generated again, those that were drawn first at the head."""
        tags = {uid: tag for uid, tag in self.partitions["train"].items() if tag.get(WAITING_TAG, False)}
        return sorted(tags, key=lambda uid: int(tags[uid]["global_steps"]))

    def _count_responses(self) -> Counter[str]:
        sessions = {tuple(key.split("_")[:2]) for key in self.partitions["train"]}  # keys are uid_session_output
        return Counter(uid for uid, *_ in sessions)

    def _size_of(self, uid: str) -> int:
        return self._sizes.get(uid, self._group_size)

    def _forget_sizes(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self._sizes.pop(uid, None)
