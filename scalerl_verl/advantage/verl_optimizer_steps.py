# SPDX-License-Identifier: Apache-2.0
"""Several optimizer steps on a batch of verl's: which rows each of them sees (runs on the driver).

verl divides a batch among ranks by length and cuts each rank's rows into mini-batches, so with several ranks a step
sees parts of prompts. In runs that average over prompts, drop prompts or count them (``ppo_off_policy``), a step gets
whole ones: ``ppo_mini_batch_size`` of them, however many rows they have.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from scalerl_verl.advantage.prompt_steps import divide_prompts, order_for_ranks, rows_of_steps, rows_per_step
from scalerl_verl.advantage.step import AdvantageStep, uses_groups
from scalerl_verl.loss import token_means
from scalerl_verl.names import ACTOR, GROUP_SIZE, PIPELINE_RL, PPO_OFF_POLICY, V1, select
from scalerl_verl.names.asking import trainer_mode


@dataclass(frozen=True)
class StepRows:
    """How a batch is divided: in its order, each rank's rows lie together, and a rank's rows of a step.

    Args:
        num_steps: optimizer steps on the batch.
        rows_per_step: padding rows included, over all ranks.
        num_ranks: data-parallel ranks of the actor.
    """

    num_steps: int
    rows_per_step: int
    num_ranks: int

    def rows(self) -> list[NDArray[np.int64]]:
        """Rows of each step."""
        return rows_of_steps(self.num_steps * self.rows_per_step, self.num_steps, self.num_ranks)


def divides_by_prompts(config: Any) -> bool:
    """Whether an optimizer step of this run has to see whole prompts, or all rows.

    In ``pipeline_rl`` a batch is one step, also where prompts ask for more than ``rollout.n`` responses.
    """
    return uses_groups(config) or trainer_mode(config) in (PPO_OFF_POLICY, PIPELINE_RL)


def _sync_step_key(config: Any) -> str:
    return f"{V1}.{trainer_mode(config)}.parameter_sync_step"


def num_steps(config: Any) -> int:
    """Optimizer steps on what the trainer samples at once."""
    prompts = int(config.data.train_batch_size) // int(select(config, _sync_step_key(config), 1))
    return max(1, -(-prompts // int(select(config, f"{ACTOR}.ppo_mini_batch_size"))))


def find_problems(config: DictConfig) -> Iterator[str]:
    """Shuffling within each rank, which puts rows of one prompt into different steps."""
    for key, default in (
        ("data.train_batch_size", None),
        (f"{ACTOR}.ppo_mini_batch_size", None),
        (_sync_step_key(config), 1),
    ):
        value = select(config, key, default)
        if not isinstance(value, int) or value < 1:
            return  # verl's business, or another check's
    if divides_by_prompts(config) and num_steps(config) > 1 and select(config, f"{ACTOR}.shuffle", False):
        yield (
            f"{ACTOR}.shuffle=True with {num_steps(config)} optimizer steps a batch: each rank would shuffle its own "
            f"rows, and no step would see whole prompts; set {ACTOR}.shuffle=False"
        )


def balance_steps(trainer: Any, batch: Any, metrics: dict[str, Any], prefix: str) -> tuple[Any, StepRows | None]:
    """Pad and order a batch so that each optimizer step sees whole prompts and ranks have equal work in each.

    Args:
        trainer: verl's.
        batch: verl's KVBatchMeta, without padding rows.
        metrics: get verl's balance of ranks.
        prefix: of these metrics.

    Returns:
        The batch and how it is divided; unchanged and None where verl's own division does: one step that holds all
        rows.
    """
    config = trainer.config
    if not divides_by_prompts(config):
        return batch, None
    steps, group = num_steps(config), int(select(config, GROUP_SIZE, 1))
    least = int(select(config, f"{ACTOR}.ppo_mini_batch_size")) * group
    if steps == 1 and len(batch) <= least:
        return batch, None
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

    parts = divide_prompts([key.rsplit("_", 2)[0] for key in batch.keys], steps)
    num_ranks, largest = _num_ranks(trainer), max(map(len, parts))
    whole = _batch_multiple(trainer, num_ranks)
    size = rows_per_step(largest, least, _multiple(config, group, num_ranks), len(parts), whole)
    num_real, num_all = len(batch), size * len(parts)
    batch = upsample_batch_to_divisible_size(batch, num_all, trainer.tokenizer.eos_token_id)
    padding = iter(range(num_real, num_all))
    filled = [part + [next(padding) for _ in range(size - len(part))] for part in parts]
    _order(batch, filled, num_ranks, metrics, prefix)
    return batch, StepRows(len(parts), size, num_ranks)


def _order(batch: Any, steps: Sequence[Sequence[int]], num_ranks: int, metrics: dict[str, Any], prefix: str) -> None:
    """Reorder a batch by steps, balanced by verl's own measure of work, and report the balance as verl does."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

    lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
    workload = calculate_workload(lengths)

    def partition(rows: Sequence[int], num_parts: int) -> list[list[int]]:
        found = get_seqlen_balanced_partitions(workload[list(rows)], k_partitions=num_parts, equal_size=True)
        return [[rows[index] for index in part] for part in found]

    ranks = order_for_ranks(steps, num_ranks, partition)
    metrics.update(log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=ranks, prefix=prefix))
    batch.reorder([row for rank in ranks for row in rank])


def _num_ranks(trainer: Any) -> int:
    """Data-parallel ranks of the actor, as verl finds them."""
    group = trainer.actor_rollout_wg
    if "actor" not in group._dispatch_info:
        group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    return int(max(group._dispatch_info["actor"])) + 1


def _multiple(config: Any, group: int, num_ranks: int) -> int:
    """A step's rows fill whole groups (verl counts them in prompts) and each rank's micro-batches."""
    micro = select(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    in_micro = num_ranks if micro is None or select(config, f"{ACTOR}.use_dynamic_bsz", False) else num_ranks * micro
    return math.lcm(group, int(in_micro))


def _batch_multiple(trainer: Any, num_ranks: int) -> int:
    """The critic's mini-batches divide the batch, too, and each rank's micro-batches that log-probs are computed in."""
    config, multiple = trainer.config, 1
    if trainer.use_critic:
        multiple = int(config.critic.ppo_mini_batch_size) * int(select(config, GROUP_SIZE, 1))
    for section in ("rollout", "ref"):
        micro = select(config, f"actor_rollout_ref.{section}.log_prob_micro_batch_size_per_gpu")
        if micro is not None and not select(config, f"actor_rollout_ref.{section}.log_prob_use_dynamic_bsz", False):
            multiple = math.lcm(multiple, num_ranks * int(micro))
    return multiple


def update_actor(
    config: Any,
    batch: Any,
    metrics: dict[str, Any],
    step: AdvantageStep | None,
    division: StepRows | None,
    update: Any,
) -> Any:
    """One call of verl's ``_update_actor``: without the steps in which nothing trains, and with sums that are sums.

    Args:
        config: the run's; its mini-batch is another during the call where `balance_steps` divided the batch.
        batch: verl's KVBatchMeta, in the order of `balance_steps`.
        metrics: of the training step.
        step: what was found when the advantages were computed; None if they were not.
        division: of `balance_steps`.
        update: verl's own, called with a batch and metrics.

    Returns:
        The batch that was trained on; None if nothing was.
    """
    dead = step.steps_without_signal() if step is not None and step.uses_names else []
    if step is not None and step.uses_names:
        metrics["scalerl/data/skipped_updates_sum"] = float(len(dead))
    if step is not None and dead:
        # A step of AdamW on zero gradients still decays the weights and moves along old momenta.
        if division is None or len(dead) == division.num_steps:
            return None
        batch = _without_steps(batch, division, dead)
        step.leave_out_rows(np.concatenate([division.rows()[number] for number in dead]))
    with _mini_batch_of(config, division):
        batch = update(batch, metrics)
    names = [name for name in metrics if name.startswith("actor/scalerl/")]
    for name, value in token_means.divide({name: metrics.pop(name) for name in names}).items():
        if name.endswith("_sum"):
            # verl averages over the updates. What is summed here is counts: rounding takes off what the average left.
            value = round(value * _num_updates(config, len(batch), division), 6)
        metrics[name.removeprefix("actor/")] = value
    return batch


@contextlib.contextmanager
def _mini_batch_of(config: Any, division: StepRows | None) -> Iterator[None]:
    """Within, verl's mini-batch is a step of `balance_steps`, which holds more rows where responses have several."""
    if division is None:
        yield
        return
    actor = config.actor_rollout_ref.actor
    usual = actor.ppo_mini_batch_size
    actor.ppo_mini_batch_size = division.rows_per_step // int(select(config, GROUP_SIZE, 1))
    try:
        yield
    finally:
        actor.ppo_mini_batch_size = usual


def _num_updates(config: Any, num_rows: int, division: StepRows | None) -> int:
    """Optimizer steps of one `_update_actor`."""
    usual = int(select(config, f"{ACTOR}.ppo_mini_batch_size")) * int(select(config, GROUP_SIZE, 1))
    size = usual if division is None else division.rows_per_step
    return num_rows // size * int(select(config, f"{ACTOR}.ppo_epochs", 1))


def _without_steps(batch: Any, division: StepRows, dead: Sequence[int]) -> Any:
    """The batch without the rows of some steps; the others keep their order, hence their ranks and steps."""
    gone = {int(row) for number in dead for row in division.rows()[number]}
    return batch.select_keys([key for row, key in enumerate(batch.keys) if row not in gone])
