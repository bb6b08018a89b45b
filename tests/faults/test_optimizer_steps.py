# SPDX-License-Identifier: Apache-2.0
"""What one optimizer step sees, and what of a batch reaches the optimizer: several steps a batch, several ranks.

verl's own `PPOTrainer._balance_batch` and `_update_actor` run here behind ours, with its padding, its partitions and
its mini-batches. Stand-ins are a worker group without workers, and a TransferQueue in this process's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict
from verl.utils.seqlen_balancing import calculate_workload

from scalerl_verl.advantage import step as training_step
from scalerl_verl.advantage import verl_optimizer_steps as optimizer_steps
from scalerl_verl.loss import cispo_metrics
from scalerl_verl.loss.ratio_watch import ESS_ALARM
from scalerl_verl.loss.token_means import WEIGHT
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import training_step as patches
from scalerl_verl.verl.algorithms import metric_aggregations, policy_loss
from tests.steps import in_front_of
from tests.unit.composed import changed

GROUP = 4
BUILDERS = {spec.target: spec.build for spec in patches.SPECS}


@pytest.fixture(autouse=True)
def checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the driver's start-up check had passed."""
    monkeypatch.setenv(ACTIVE_ENV, "1")


class InMemoryQueue:
    """Stands for verl's TransferQueue: padding takes one sample and puts others."""

    def kv_batch_get(self, keys: list[str], partition_id: str) -> list[dict[str, Any]]:
        return [{"position_ids": torch.arange(3), "uid": keys[0]}]

    def kv_batch_put(self, **_: Any) -> None:
        pass


class WorkersOfNoProcess:
    """Stands for the actor's worker group: answers as verl's workers do after one update a mini-batch."""

    def __init__(self, num_ranks: int) -> None:
        self._dispatch_info = {"actor": list(range(num_ranks))}
        self.batches: list[Any] = []
        self.metrics: dict[str, Any] = {"mfu": [0.5]}

    def update_actor(self, batch: Any) -> Any:
        self.batches.append(batch)
        return {"metrics": dict(self.metrics)}


class VerlTrainer(PPOTrainer):
    """verl's with no more than the attributes that the two methods read."""

    def __init__(self, config: DictConfig, num_ranks: int) -> None:
        self.config, self.use_critic, self.global_steps = config, False, 1
        self.actor_rollout_wg = WorkersOfNoProcess(num_ranks)
        self.tokenizer = type("Tokenizer", (), {"eos_token_id": 0})()

    def on_sample_end(self) -> None:
        raise AssertionError

    on_step_end = on_sample_end


Trainer = in_front_of(VerlTrainer)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(padding_utils, "tq", InMemoryQueue())
    yield


def run_config(prompts: int, mini: int, mode: str = "ppo_off_policy", **changes: Any) -> DictConfig:
    off_policy = {"trainer.v1.ppo_off_policy.num_updates": prompts // mini}
    return changed(
        "ppo_off_policy" if mode == "ppo_off_policy" else "recipe",
        {
            "data.train_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.rollout.n": GROUP,
            "trainer.v1.trainer_mode": mode,
            **(off_policy if mode == "ppo_off_policy" else {}),
            **changes,
        },
    )


def sampled(sizes: list[int], seed: int = 0, outputs: int = 1) -> KVBatchMeta:
    """Prompts of so many responses of very different lengths, each in so many rows."""
    rng = np.random.default_rng(seed)
    keys = [
        f"p{prompt}_{session}_{output}"
        for prompt, size in enumerate(sizes)
        for session in range(size)
        for output in range(outputs)
    ]
    lengths = np.clip(rng.lognormal(6.0, 0.8, len(keys)), 5, 14_336).astype(int).tolist()
    tags = [{"seq_len": length, "response_len": length, "global_steps": 1} for length in lengths]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def steps_of_ranks(batch: KVBatchMeta, num_ranks: int, rows_per_step: int) -> list[list[list[str]]]:
    """Row keys by [step][rank], as verl deals a batch out and cuts it into mini-batches."""
    ranks = []
    for chunk in batch.chunk(num_ranks):
        data = TensorDict({"row": torch.arange(len(chunk))}, batch_size=len(chunk))
        settings = {"epochs": 1, "seed": 42, "dataloader_kwargs": {"shuffle": False}}
        parts = tu.make_iterator(data, mini_batch_size=rows_per_step // num_ranks, **settings)
        ranks.append([[chunk.keys[row] for row in part["row"].tolist()] for part in parts])
    return [list(step) for step in zip(*ranks, strict=True)]


def prompt_of(key: str) -> str:
    return key.split("_")[0]


def real_rows(step: list[list[str]]) -> list[str]:
    return [key for rank in step for key in rank if not key.startswith("pad")]


SIZES = {
    "whole groups": ([GROUP] * 48, 1),
    "groups that lost responses": ([4, 3, 1, 4, 2, 4, 4, 1] * 6, 1),
    "groups of sizes of their own": ([1, 2 * GROUP, GROUP, 3] * 12, 1),
    "a prompt lost altogether": ([GROUP] * 47, 1),
    "responses of three rows": ([GROUP] * 48, 3),
}


@pytest.mark.parametrize("mode", ["ppo_off_policy", "sync", "colocate_async"])
@pytest.mark.parametrize("num_ranks", [1, 2, 16])
@pytest.mark.parametrize("case", SIZES)
def test_length_balancing_leaves_prompts_whole(queue: None, case: str, num_ranks: int, mode: str) -> None:
    """48 prompts, 8 steps: 6 prompts each (one of 47: 6 or 5), all their rows, equal numbers of rows on every rank."""
    sizes, outputs = SIZES[case]
    trainer, metrics = Trainer(run_config(48, 6, mode), num_ranks), {}
    batch = sampled(sizes, outputs=outputs)
    given, length_of = list(batch.keys), dict(zip(batch.keys, [tag["seq_len"] for tag in batch.tags], strict=True))
    batch = trainer._balance_batch(batch, metrics)
    division = trainer.scalerl.division
    steps = steps_of_ranks(batch, num_ranks, division.rows_per_step)
    assert len(steps) == 8
    assert sorted(key for step in steps for key in real_rows(step)) == sorted(given)
    prompts = [{prompt_of(key) for key in real_rows(step)} for step in steps]
    assert sum(map(len, prompts)) == len(sizes) and {len(found) for found in prompts} <= {6, len(sizes) // 8}
    # What our side takes for the rows of a step is what verl's workers train on.
    assert [{batch.keys[row] for row in rows} for rows in division.rows()] == [set().union(*step) for step in steps]
    for step in steps:
        assert len({len(rank) for rank in step}) == 1
        work = [sum(int(calculate_workload(length_of[key])) for key in real_rows([rank])) for rank in step]
        # Dealt out in the order of the batch, some rank has more to do.
        dealt = np.zeros(division.rows_per_step, dtype=np.int64)
        rows = [int(calculate_workload(length_of[key])) for key in given if key in set(real_rows(step))]
        dealt[: len(rows)] = rows
        assert max(work) <= dealt.reshape(num_ranks, -1).sum(axis=1).max()
    assert metrics["global_seqlen/balanced_max"] >= metrics["global_seqlen/balanced_min"]


@pytest.mark.works_with("Ulysses", "prompt average", "advantages", "curriculum")
@pytest.mark.parametrize("mode", ["ppo_off_policy", "sync"])
def test_sequence_parallel_ranks_count_once(queue: None, mode: str) -> None:
    """Four ranks of which two share each row: the driver's batch, from which all else follows, is that of two."""
    found = []
    for dispatch in ([0, 1], [0, 0, 1, 1]):  # rank -> its data-parallel rank, as verl's workers say
        trainer = Trainer(run_config(48, 6, mode), len(dispatch))
        trainer.actor_rollout_wg._dispatch_info["actor"] = dispatch
        batch = trainer._balance_batch(sampled([GROUP] * 48), {})
        found.append((batch.keys, trainer.scalerl.division))
    assert found[0] == found[1]


@pytest.mark.parametrize("section", ["rollout", "ref"])
@pytest.mark.parametrize(("prompts", "num_ranks"), [(6, 1), (6, 2), (12, 2)])
def test_micro_batches_of_log_probs_fill_each_rank(queue: None, section: str, prompts: int, num_ranks: int) -> None:
    """verl refuses a rank's part that is no multiple of them; 26 responses of 3 rows are 78 or 80 by themselves."""
    fixed = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 1}
    changes = {f"actor_rollout_ref.actor.{key}": value for key, value in fixed.items()}
    changes[f"actor_rollout_ref.{section}.log_prob_micro_batch_size_per_gpu"] = 8
    changes[f"actor_rollout_ref.{section}.log_prob_use_dynamic_bsz"] = False
    trainer = Trainer(run_config(prompts, 6, "sync", **changes), num_ranks)
    sizes = [GROUP] * (prompts - 2) + [GROUP - 1] * 2
    balanced = trainer._balance_batch(sampled(sizes, outputs=3), {})
    assert len(balanced) % (8 * num_ranks) == 0
    assert trainer.scalerl.division.rows_per_step % GROUP == 0


@pytest.mark.parametrize("num_ranks", [2, 16])
def test_verl_s_own_division_is_the_fault(queue: None, num_ranks: int) -> None:
    """If this fails, verl keeps prompts whole by itself and ours can go."""
    trainer = Trainer(run_config(48, 6), num_ranks)
    batch = PPOTrainer._balance_batch(trainer, sampled([GROUP] * 48), {})
    steps = [{prompt_of(key) for key in real_rows(step)} for step in steps_of_ranks(batch, num_ranks, 6 * GROUP)]
    assert sum(map(len, steps)) > 48


@pytest.mark.parametrize("preset", ["recipe", "grpo"])
def test_one_step_a_batch_and_other_runs_are_divided_by_verl(queue: None, preset: str) -> None:
    config = run_config(48, 48, "sync")
    if preset == "grpo":
        config = changed("grpo", {"data.train_batch_size": 48, "actor_rollout_ref.actor.ppo_mini_batch_size": 6})
        config.actor_rollout_ref.rollout.n = GROUP
    ours, theirs = sampled([GROUP] * 48), sampled([GROUP] * 48)
    ours = Trainer(config, 2)._balance_batch(ours, {})
    assert ours.keys == PPOTrainer._balance_batch(Trainer(config, 2), theirs, {}).keys


def test_shuffling_within_a_rank_is_refused() -> None:
    shuffled = run_config(48, 6, **{"actor_rollout_ref.actor.shuffle": True})
    (problem,) = optimizer_steps.find_problems(shuffled)
    assert "actor_rollout_ref.actor.shuffle=True with 8 optimizer steps" in problem
    assert list(optimizer_steps.find_problems(run_config(48, 48, "sync"))) == []


def advantage_data(batch: KVBatchMeta, rewards: dict[str, float], num_tokens: dict[str, int]) -> DataProto:
    """What verl's trainer builds of a batch; padding rows have one masked token and no reward."""
    tokens_B = torch.tensor([num_tokens.get(key, 0) for key in batch.keys])
    mask_BT = torch.arange(int(tokens_B.max()))[None, :] < tokens_B[:, None]
    scores_BT = torch.zeros(mask_BT.shape)
    scores_BT[:, 0] = torch.tensor([rewards.get(key, 0.0) for key in batch.keys])
    uids = np.array([prompt_of(key) for key in batch.keys], dtype=object)
    tensors = {"response_mask": mask_BT.long(), "token_level_scores": scores_BT, "token_level_rewards": scores_BT}
    return DataProto(batch=TensorDict(tensors, batch_size=len(batch)), non_tensor_batch={"uid": uids})


def take_advantages(trainer: Any, batch: KVBatchMeta, data: DataProto, metrics: dict[str, Any]) -> torch.Tensor:
    """The driver's part of a step, as our `_compute_advantage` does it."""
    compute = BUILDERS["compute_advantage_for_multi_trajectories"](compute_advantage_for_multi_trajectories, None)
    with training_step.advantage_step(trainer.config, metrics) as step:
        division = trainer.scalerl.division
        step.rows_of_steps = None if division is None else division.rows()
        algorithm = trainer.config.algorithm
        data = compute(data, batch.keys, adv_estimator=algorithm.adv_estimator, config=algorithm)
    trainer.scalerl.step = step
    return data.batch["advantages"]


@pytest.mark.parametrize("mode", ["prompt-mean", "token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_each_step_is_the_average_over_its_own_prompts(queue: None, mode: str, num_ranks: int) -> None:
    """Dropped prompts and lost responses lie unevenly: what a step divides by is what of it trains (float64)."""
    rng = np.random.default_rng(1)
    config = run_config(24, 6, **{"actor_rollout_ref.actor.loss_agg_mode": mode, "algorithm.scalerl.adv_norm": "none"})
    trainer, batch = Trainer(config, num_ranks), sampled([4, 3, 2, 4, 4, 4] * 4)
    keys = list(batch.keys)
    lengths = {key: int(rng.integers(1, 12)) for key in keys}
    # Prompts 0, 1, 2 and 7 all pass; of the others the first response does.
    rewards = {key: 1.0 if prompt_of(key) in ("p0", "p1", "p2", "p7") or "_0_" in key else -1.0 for key in keys}
    batch = trainer._balance_batch(batch, {})
    advantages_BT = take_advantages(trainer, batch, advantage_data(batch, rewards, lengths), {})
    for step in trainer.scalerl.division.rows():
        rows = [row for row in step.tolist() if not batch.keys[row].startswith("pad")]
        kept = [row for row in rows if prompt_of(batch.keys[row]) not in ("p0", "p1", "p2", "p7")]
        tokens = Counter({prompt_of(batch.keys[row]): 0 for row in kept})
        for row in kept:
            tokens[prompt_of(batch.keys[row])] += lengths[batch.keys[row]]
        for row in rows:
            key = batch.keys[row]
            group = [rewards[other] for other in keys if prompt_of(other) == prompt_of(key)]
            centred = rewards[key] - np.mean(group)
            # The worker divides by these: rows of the step, its tokens, or rows and the response's own tokens.
            divisor = {
                "prompt-mean": len(step),
                "token-mean": sum(lengths[batch.keys[other]] for other in rows),
                "seq-mean-token-mean": len(step) * lengths[key],
            }[mode]
            wanted = {
                "prompt-mean": len(tokens) * tokens[prompt_of(key)],
                "token-mean": sum(tokens.values()),
                "seq-mean-token-mean": len(kept) * lengths[key],
            }[mode]
            expected = centred / wanted if row in kept else 0.0
            # FP32 advantages: 6e-8 a rounding.
            assert float(advantages_BT[row, 0]) / divisor == pytest.approx(expected, rel=3e-7, abs=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_step_in_which_nothing_trains_is_left_out_alone(queue: None, num_ranks: int) -> None:
    """Prompts 0 to 5, the first step of four, all pass: verl gets the other three steps, whole."""
    trainer, metrics = Trainer(run_config(24, 6), num_ranks), {}
    batch = trainer._balance_batch(sampled([GROUP] * 24), {})
    first = {f"p{prompt}" for prompt in range(6)}
    rewards = {key: 1.0 if prompt_of(key) in first or "_0_" in key else -1.0 for key in batch.keys}
    take_advantages(trainer, batch, advantage_data(batch, rewards, dict.fromkeys(batch.keys, 3)), metrics)
    assert trainer._update_actor(batch, metrics) is batch
    (trained,) = trainer.actor_rollout_wg.batches
    steps = steps_of_ranks(trained, num_ranks, 6 * GROUP)
    assert [{prompt_of(key) for key in real_rows(step)} for step in steps] == [
        {f"p{prompt}" for prompt in range(start, start + 6)} for start in (6, 12, 18)
    ]
    assert metrics["scalerl/data/skipped_updates_sum"] == 1.0
    assert trainer.scalerl.step.kept_B.sum() == 18 * GROUP


TERMS = {
    "KL loss": {"actor_rollout_ref.actor.use_kl_loss": True},
    "entropy bonus": {"actor_rollout_ref.actor.entropy_coeff": 0.01},
    "distillation": {"distillation.enabled": True},
    "router loss": {"actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff": 0.001},
    "multi-token prediction": {"actor_rollout_ref.model.mtp.enable_train": True},
}


@pytest.mark.parametrize("zero_variance", ["keep", "drop"])
@pytest.mark.parametrize("term", [None, *TERMS])
def test_terms_besides_the_policy_loss_train_on_equal_rewards_that_are_kept(
    queue: None, term: str | None, zero_variance: str
) -> None:
    """With the policy loss alone, or where such prompts are dropped, there is nothing to train on."""
    changes = {"algorithm.scalerl.zero_variance": zero_variance, **TERMS.get(term or "", {})}
    changes["actor_rollout_ref.actor.loss_agg_mode"] = "token-mean"
    config = run_config(6, 6, "sync", **changes)
    trainer, metrics = Trainer(config, 1), {}
    batch = trainer._balance_batch(sampled([GROUP] * 6), {})
    rewards = {key: 1.0 if int(prompt_of(key)[1:]) % 2 else -1.0 for key in batch.keys}
    advantages = take_advantages(trainer, batch, advantage_data(batch, rewards, dict.fromkeys(batch.keys, 3)), metrics)
    # verl would ask its teacher while it updates.
    config.distillation.enabled = False
    assert not advantages.any()
    trainer._update_actor(batch, metrics)
    trains = term is not None and zero_variance == "keep"
    assert len(trainer.actor_rollout_wg.batches) == int(trains)
    assert metrics["scalerl/data/skipped_updates_sum"] == float(not trains)


@pytest.mark.parametrize(("prompts", "epochs"), [(48, 1), (6, 1), (6, 3)])
def test_sums_over_the_steps_of_a_batch_are_sums(queue: None, prompts: int, epochs: int) -> None:
    """One broken token on one of two ranks in each step; verl's workers and reductions as they are."""
    changes = {"actor_rollout_ref.actor.ppo_epochs": epochs}
    trainer, metrics = Trainer(run_config(prompts, 6, "sync", **changes), 2), {}
    batch = trainer._balance_batch(sampled([GROUP] * prompts), {})
    num_steps, found = prompts // 6 * epochs, {"mfu": [0.5]}
    names = {f"scalerl/loss/{kind}": how for kind, how in (("a_sum", "sum"), ("a_max", "max"), ("a_min", "min"))}
    for number in range(num_steps):
        # As the loss reports it: 1 token x 2 ranks on the first, 0 on the second; the greatest differ by step.
        ranks = [{name: Metric(how, value + 0.0) for name, how in names.items()} for value in (2 + number, number)]
        append_to_dict(found, {name: Metric.aggregate_dp([rank[name] for rank in ranks]) for name in names})
    trainer.actor_rollout_wg.metrics = found
    trainer._update_actor(batch, metrics)
    assert metrics["scalerl/loss/a_sum"] == sum(1 + number for number in range(num_steps))
    assert metrics["scalerl/loss/a_max"] == num_steps + 1 and metrics["scalerl/loss/a_min"] == 0


def test_names_of_metrics_say_how_verl_combines_them() -> None:
    """verl reduces over steps by words in the name; a mean with "max" or "min" in its name would not be one."""
    aggregations = metric_aggregations()
    for name, how in aggregations.items():
        words = {word for word in ("max", "min", "sum") if word in name}
        is_mean = name.endswith(WEIGHT) or name + WEIGHT in aggregations
        assert words == (set() if is_mean else {how}), name


SPLITS = {
    # rows of each micro-batch of each rank; 8 and 9 are padding
    "whole": [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    "rows by themselves, with padding": [[[row] for row in range(10)]],
    "two ranks of unlike work": [[[0, 5], [9]], [[1, 2, 3, 4], [6, 7, 8]]],
}


@pytest.mark.parametrize("num_updates", [1, 2])
@pytest.mark.parametrize("split", SPLITS)
def test_means_over_tokens_do_not_depend_on_the_split(queue: None, split: str, num_updates: int) -> None:
    """Padding says nothing, a row of one token little; the effective sample size alone is of each micro-batch."""
    generator = torch.Generator().manual_seed(0)
    mask_BT = torch.arange(9)[None, :] < torch.tensor([1, 9, 2, 1, 5, 1, 3, 8, 0, 0])[:, None]
    logp_BT, recorded_BT = (-3 * torch.rand(10, 9, generator=generator) for _ in range(2))
    signs_BT = torch.tensor([1.0, -1.0] * 5)[:, None].expand(10, 9)
    config = SimpleNamespace(
        policy_loss={"loss_mode": "scalerl_cispo", "eps_max": 2.0},
        global_batch_info={"dp_size": 1, "batch_num_tokens": 30},
    )
    found: dict[str, Any] = {"mfu": [0.5]}
    ranks = []
    for micro_batches in SPLITS[split]:
        total: dict[str, Metric] = {}
        for rows in micro_batches:
            tensors = (tensor[rows] for tensor in (recorded_BT, logp_BT, signs_BT, mask_BT))
            for name, value in policy_loss(*tensors, "token-mean", config)[1].items():
                total.setdefault(name, Metric(metric_aggregations()[name])).append(value)
        ranks.append(total)
    for _ in range(num_updates):
        append_to_dict(found, {name: Metric.aggregate_dp([rank[name] for rank in ranks]) for name in ranks[0]})
    trainer, metrics = Trainer(run_config(6 * num_updates, 6, "sync"), len(ranks)), {}
    trainer.actor_rollout_wg.metrics = found
    trainer._update_actor(trainer._balance_batch(sampled([GROUP] * 6 * num_updates), {}), metrics)
    expected = cispo_metrics(logp_BT, recorded_BT, signs_BT, mask_BT, 2.0)
    means = {name: value for name, (value, how) in expected.items() if how == "mean" and "ess" not in name}
    assert {name: metrics[name] for name in means} == pytest.approx(means, rel=1e-6)
    assert {name for name in metrics if name.startswith("scalerl/")} == {*expected, ESS_ALARM}
