# SPDX-License-Identifier: Apache-2.0
"""Estimator, row weights and policy loss as verl composes them, against the paper's objective written out directly.

    J = 1/P sum_x 1/(sum_i |y_i|) sum_i sum_t min(rho_it, eps_max) * A_i * log pi_train(y_it)

over the P prompts whose rewards differ; A_i is centred on the prompt and divided by the standard deviation over all
rows of these prompts (arXiv 2510.13786, section 2).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from scalerl_verl.advantage.step import (
    AdvantageStep,
    advantage_step,
    current_step,
    fold_row_weights,
    prepare_rows,
)
from scalerl_verl.advantage.verl_optimizer_steps import StepRows
from scalerl_verl.errors import PatchError, ScaleRLConfigError
from scalerl_verl.loss.token_means import divide
from scalerl_verl.loss.verl_config import PLAIN_MODE, statistics_mode
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl import training_step as patches
from scalerl_verl.verl.algorithms import estimate_advantages, metric_aggregations, policy_loss
from tests.steps import in_front_of

EPS_MAX = 2.0
WIDTH = 9


@dataclass
class StubActorConfig:
    """Stands for verl's ActorConfig: what policy_loss reads of it."""

    policy_loss: dict[str, Any] = field(default_factory=lambda: {"loss_mode": "scalerl_cispo", "eps_max": EPS_MAX})
    global_batch_info: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def checked_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the driver's start-up check had passed."""
    monkeypatch.setenv(ACTIVE_ENV, "1")


def stub_config(loss_agg_mode: str, adv_estimator: str = "scalerl") -> SimpleNamespace:
    """Stands for the composed config: the keys that the training step reads."""
    actor = SimpleNamespace(loss_agg_mode=loss_agg_mode, policy_loss=SimpleNamespace(loss_mode="vanilla"))
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(actor=actor),
        algorithm=SimpleNamespace(adv_estimator=adv_estimator),
    )


@dataclass
class Batch:
    """Prompts a (3 rows), b (all right), c (incomplete: 2), d (a single row), e (4), and 2 padding rows."""

    uid_B: np.ndarray
    rewards_B: np.ndarray
    mask_BT: torch.Tensor
    logp_BT: torch.Tensor
    rollout_BT: torch.Tensor

    @classmethod
    def make(cls, seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        uid = list("aaabbccdeeeeae")
        rewards = [1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, 7, 7]
        lengths = [*rng.integers(1, WIDTH + 1, size=12), 0, 0]
        order = rng.permutation(14)
        mask_BT = torch.arange(WIDTH)[None, :] < torch.tensor(np.array(lengths)[order])[:, None]
        # What stands at masked positions must not matter.
        noise = torch.full((14, WIDTH), float("nan"))
        logp_BT = torch.tensor(-3 * rng.random((14, WIDTH)), dtype=torch.float32)
        rollout_BT = torch.tensor(-3 * rng.random((14, WIDTH)), dtype=torch.float32)
        return cls(
            uid_B=np.array(uid, dtype=object)[order],
            rewards_B=np.array(rewards, dtype=np.float64)[order],
            mask_BT=mask_BT,
            logp_BT=torch.where(mask_BT, logp_BT, noise),
            rollout_BT=torch.where(mask_BT, rollout_BT, noise),
        )

    def data(self) -> DataProto:
        """As verl's trainer builds it: the reward stands on the last token; padding rows carry one too."""
        rewards_BT = torch.zeros(len(self.uid_B), WIDTH)
        last_B = (self.mask_BT.sum(-1) - 1).clamp(min=0)
        rewards_BT[torch.arange(len(last_B)), last_B] = torch.tensor(self.rewards_B, dtype=torch.float32)
        tensors = {"response_mask": self.mask_BT.long(), "token_level_rewards": rewards_BT}
        batch = TensorDict(tensors, batch_size=len(self.uid_B))
        return DataProto(batch=batch, non_tensor_batch={"uid": self.uid_B})


def patched_advantages(data: DataProto, keys: list[str], estimator: str, algorithm: Any, **options: Any) -> DataProto:
    """verl's own function under our patch, which prepares the rows and folds the weights."""
    builders = {spec.target: spec.build for spec in patches.SPECS}
    patched = builders["compute_advantage_for_multi_trajectories"](compute_advantage_for_multi_trajectories, None)
    return patched(data, keys, adv_estimator=estimator, config=algorithm, **options)


def compute_advantages(
    batch: Batch, mode: str, estimator: str = "scalerl", **section: Any
) -> tuple[torch.Tensor, AdvantageStep]:
    """The driver's half of a step: verl's own function calls the estimator, then the patch folds the weights."""
    algorithm = OmegaConf.create({"scalerl": section} if estimator == "scalerl" else {})
    metrics: dict[str, Any] = {}
    with advantage_step(stub_config(mode, estimator), metrics) as step:
        keys = [f"{uid}_{row}_0" for row, uid in enumerate(batch.uid_B)]
        data = patched_advantages(batch.data(), keys, estimator, algorithm)
    assert current_step() is None
    return data.batch["advantages"], step


def reference_gradient(batch: Batch) -> np.ndarray:
    """-dJ / dlog pi_train in float64, by loops; shares no code with the package."""
    lengths = batch.mask_BT.sum(-1).tolist()
    prompts: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.uid_B):
        if lengths[row]:
            prompts.setdefault(uid, []).append(row)
    prompts = {uid: rows for uid, rows in prompts.items() if len({batch.rewards_B[row] for row in rows}) > 1}
    centred = {row: batch.rewards_B[row] - np.mean(batch.rewards_B[rows]) for rows in prompts.values() for row in rows}
    std = np.std(list(centred.values()))
    grad_BT = np.zeros(batch.mask_BT.shape)
    for rows in prompts.values():
        num_tokens = sum(lengths[row] for row in rows)
        for row in rows:
            for t in range(lengths[row]):
                ratio = np.exp(float(batch.logp_BT[row, t]) - float(batch.rollout_BT[row, t]))
                grad_BT[row, t] = -min(ratio, EPS_MAX) * centred[row] / std / num_tokens / len(prompts)
    return grad_BT


def trainer_gradient(
    batch: Batch, advantages_BT: torch.Tensor, mode: str, parts: list[list[list[list[int]]]]
) -> np.ndarray:
    """The workers' half: ``parts[mini_batch][rank][micro_batch]`` holds rows; gradients are averaged as FSDP does."""
    logp_BT = batch.logp_BT.clone().requires_grad_()
    for mini_batch in parts:
        rows_of_mini_batch = [row for rank in mini_batch for micro in rank for row in micro]
        info = {
            "dp_size": len(mini_batch),
            "batch_num_tokens": int(batch.mask_BT[rows_of_mini_batch].sum()),
            "global_batch_size": len(rows_of_mini_batch),
            "loss_scale_factor": None,
        }
        for rank in mini_batch:
            for micro in rank:
                config = StubActorConfig(global_batch_info=info)
                loss, _ = policy_loss(
                    batch.rollout_BT[micro], logp_BT[micro], advantages_BT[micro], batch.mask_BT[micro], mode, config
                )
                (loss / len(mini_batch) / len(parts)).backward()
    assert logp_BT.grad is not None
    return logp_BT.grad.numpy()


def split(rng: np.random.Generator, rows: list[int], num: int) -> list[list[int]]:
    cuts = np.sort(rng.integers(0, len(rows) + 1, size=num - 1))
    return [part.tolist() for part in np.split(np.array(rows, dtype=int), cuts) if part.size]


@pytest.mark.fault("other micro-batches, ranks or token budgets: another loss, or a gradient scaled by the ranks")
@pytest.mark.parametrize("num_mini", [1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_gradient_of_any_split_is_that_of_the_paper_s_objective(seed: int, num_ranks: int, num_mini: int) -> None:
    """1e-6: the loss is FP32 (6e-8 a rounding), and a rounding of the log-ratio enters the ratio undamped."""
    batch = Batch.make(seed)
    advantages_BT, _ = compute_advantages(batch, "prompt-mean")
    rng = np.random.default_rng(seed)
    rows = rng.permutation(14)
    parts = []
    for mini in np.split(rows, num_mini):
        ranks = np.array_split(mini, num_ranks)
        parts.append([split(rng, rank.tolist(), int(rng.integers(1, 5))) for rank in ranks])
    expected_BT = reference_gradient(batch)
    assert np.abs(expected_BT).max() > 0
    np.testing.assert_allclose(trainer_gradient(batch, advantages_BT, PLAIN_MODE, parts), expected_BT, rtol=1e-6)


def test_reference_of_the_test_above_sees_truncation_padding_and_dropping() -> None:
    batch = Batch.make(0)
    ratio_BT = (batch.logp_BT - batch.rollout_BT).exp()[batch.mask_BT]
    assert (ratio_BT > EPS_MAX).any() and (ratio_BT < EPS_MAX).any()
    grad_BT = reference_gradient(batch)
    trained = {uid for uid, row in zip(batch.uid_B, grad_BT, strict=True) if row.any()}
    assert trained == {"a", "c", "e"}
    assert (batch.mask_BT.sum(-1) == 0).sum() == 2


@pytest.mark.parametrize("mode", ["prompt-mean", "token-mean", "seq-mean-token-sum"])
def test_rows_without_signal_carry_no_advantage(mode: str) -> None:
    batch = Batch.make(1)
    advantages_BT, step = compute_advantages(batch, mode)
    for row, uid in enumerate(batch.uid_B):
        trains = uid in "ace" and bool(batch.mask_BT[row].any())
        assert bool(advantages_BT[row].any()) is trains
    assert not advantages_BT[~batch.mask_BT].any()
    assert step.steps_without_signal() == []


def test_metrics_of_a_step_count_prompts_rows_and_tokens() -> None:
    batch = Batch.make(2)
    _, step = compute_advantages(batch, "prompt-mean")
    assert step.metrics == {
        "scalerl/data/prompts_sum": 5,
        "scalerl/data/prompts_mixed_sum": 3,
        "scalerl/data/prompts_all_right_sum": 1,
        "scalerl/data/prompts_all_wrong_sum": 0,
        "scalerl/data/prompts_single_sum": 1,
        "scalerl/data/rows_kept_sum": 9,
        "scalerl/advantage/std": pytest.approx(step.result.std),
        "scalerl/data/generated_tokens_sum": int(batch.mask_BT.sum()),
    }


@pytest.mark.parametrize("zero_variance", ["drop", "keep"])
def test_step_without_a_mixed_prompt_trains_nothing(zero_variance: str) -> None:
    batch = Batch.make(3)
    batch.rewards_B[:] = 1.0
    advantages_BT, step = compute_advantages(batch, "prompt-mean", zero_variance=zero_variance)
    assert step.steps_without_signal() == [0]
    assert not advantages_BT.any()


def test_estimator_of_verl_with_its_own_aggregation_is_not_touched() -> None:
    batch = Batch.make(4)
    expected = compute_advantage_for_multi_trajectories(
        batch.data(), batch_keys=[f"{uid}_{row}_0" for row, uid in enumerate(batch.uid_B)], adv_estimator="grpo"
    ).batch["advantages"]
    advantages_BT, step = compute_advantages(batch, "token-mean", estimator="grpo")
    assert expected.any()
    assert torch.equal(advantages_BT, expected)
    assert step.steps_without_signal() == []
    assert step.metrics == {}


def test_estimator_of_verl_with_prompt_average_gets_prompt_weights() -> None:
    """Weight of a row: rows / (prompts * tokens of the prompt), every prompt with a token counted."""
    batch = Batch.make(5)
    plain_BT, _ = compute_advantages(batch, "token-mean", estimator="grpo")
    weighted_BT, _ = compute_advantages(batch, "prompt-mean", estimator="grpo")
    lengths_B = batch.mask_BT.sum(-1)
    for row, uid in enumerate(batch.uid_B):
        num_tokens = int(lengths_B[torch.tensor(batch.uid_B == uid)].sum())
        torch.testing.assert_close(weighted_BT[row], plain_BT[row] * 14 / (5 * num_tokens))


def test_unknown_key_of_our_section_stops_the_estimator() -> None:
    with pytest.raises(ScaleRLConfigError, match=r"algorithm\.scalerl\.norm does not exist"):
        compute_advantages(Batch.make(0), "prompt-mean", norm="batch")


def test_estimator_outside_our_training_step_is_refused() -> None:
    data = Batch.make(0).data()
    with pytest.raises(PatchError, match=r"verl\.training_step\.weights"):
        estimate_advantages(
            data.batch["token_level_rewards"], data.batch["response_mask"], data.non_tensor_batch["uid"]
        )


def test_row_weights_outside_the_patched_step_change_nothing() -> None:
    data = Batch.make(0).data()
    data.batch["advantages"] = torch.ones_like(data.batch["token_level_rewards"])
    assert fold_row_weights(data) is data
    assert (data.batch["advantages"] == 1).all()


def loss_arguments(**changes: Any) -> dict[str, Any]:
    ones = torch.ones(2, 3)
    config = StubActorConfig(global_batch_info={"dp_size": 2, "batch_num_tokens": 6, "global_batch_size": 2})
    fields = {
        "old_log_prob": -ones,
        "log_prob": -ones,
        "advantages": ones,
        "response_mask": ones.bool(),
        "loss_agg_mode": "token-mean",
        "config": config,
    }
    return {**fields, **changes}


def test_second_correction_of_the_mismatch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.rollout_correction\.rollout_is=null"):
        policy_loss(**loss_arguments(rollout_is_weights=torch.ones(2, 3)))


def test_prompt_average_that_comes_to_the_policy_loss_by_itself_is_refused() -> None:
    with pytest.raises(PatchError, match="loss_agg_mode=prompt-mean reached a policy loss by itself"):
        policy_loss(**loss_arguments(loss_agg_mode="prompt-mean"))
    policy_loss(**loss_arguments())


def test_entropy_metric_of_verl_s_trainer_is_a_token_mean_under_prompt_mean() -> None:
    """Its rows have no prompt weights, and verl does not know the mode; the config is as before afterwards."""
    config = stub_config("prompt-mean")
    with pytest.raises(RuntimeError), statistics_mode(config):
        assert config.actor_rollout_ref.actor.loss_agg_mode == "token-mean"
        raise RuntimeError
    assert config.actor_rollout_ref.actor.loss_agg_mode == "prompt-mean"
    other = stub_config("seq-mean-token-mean")
    with statistics_mode(other):
        assert other.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"


def test_cap_that_is_no_positive_number_is_refused() -> None:
    config = StubActorConfig(
        policy_loss={"loss_mode": "scalerl_cispo", "eps_max": -1}, global_batch_info={"dp_size": 1}
    )
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.actor\.policy_loss\.eps_max=-1"):
        policy_loss(**loss_arguments(config=config))


def test_sums_survive_the_average_over_ranks() -> None:
    """verl averages over ranks what micro-batches sum up; 2 bad tokens on this one of 2 ranks count as 4."""
    logp_BT = -torch.ones(2, 3)
    logp_BT[0, :2] = float("nan")
    _, metrics = policy_loss(**loss_arguments(log_prob=logp_BT))
    assert metrics["scalerl/loss/nonfinite_tokens_sum"] == 4
    assert set(metrics) == set(metric_aggregations())
    assert all(name.startswith(("scalerl/loss/", "scalerl/mismatch/")) for name in metrics)


class StubTrainer:
    """Stands for PPOTrainer: a step that trains unless every reward is equal, and an update that counts."""

    def __init__(self, batch: Batch) -> None:
        self.config = stub_config("prompt-mean")
        self.batch, self.updates = batch, 0

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = self.batch.data()
        estimate_advantages(
            data.batch["token_level_rewards"], data.batch["response_mask"], data.non_tensor_batch["uid"]
        )
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        self.updates += 1
        metrics.update({"actor/scalerl/loss/ratio_max": 3.0, "actor/pg_loss": 1.0})
        return batch


@pytest.mark.fault("every group filtered: the run aborts or divides by 0")
@pytest.mark.parametrize("trains", [True, False])
def test_update_is_skipped_when_nothing_trains(trains: bool) -> None:
    batch = Batch.make(0)
    if not trains:
        batch.rewards_B[:] = -1.0
    trainer, metrics = in_front_of(StubTrainer)(batch), {}
    trainer._compute_advantage("batch", metrics)
    assert trainer._update_actor("batch", metrics) == "batch"
    assert trainer.updates == int(trains)
    assert metrics["scalerl/data/skipped_updates_sum"] == float(not trains)
    assert ("scalerl/loss/ratio_max" in metrics) is trains
    assert not any(name.startswith("actor/scalerl/") for name in metrics)


def test_advantages_know_the_rows_of_each_update() -> None:
    trainer = in_front_of(StubTrainer)(Batch.make(0))
    division = trainer.scalerl.division = StepRows(1, len(trainer.batch.rewards_B), 1)
    trainer._compute_advantage("batch", {})
    assert np.array_equal(trainer.scalerl.step.rows_of_steps, division.rows())


WORKER = """
import functools, json, torch
import verl
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss
from scalerl_verl.loss.verl_config import ScaleRLFSDPActorConfig, ScaleRLPolicyLossConfig
from scalerl_verl.verl.actor_loss import training_loss

config = ScaleRLFSDPActorConfig(
    rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode="prompt-mean",
    policy_loss=ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo", eps_max=2.0),
)

def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

def micro_batch(log_ratios, entropy):
    # Two prompt tokens before each response; the model's output at position t scores token t + 1.
    lengths = [len(row) for row in log_ratios]
    logp = [torch.cat([torch.zeros(1), torch.tensor(row) - 1.0, torch.zeros(1)]) for row in log_ratios]
    data = TensorDict({
        "prompts": nested([torch.ones(2, dtype=torch.long) for _ in lengths]),
        "responses": nested([torch.ones(n, dtype=torch.long) for n in lengths]),
        "response_mask": nested([torch.ones(n, dtype=torch.long) for n in lengths]),
        "old_log_probs": nested([-torch.ones(n) for n in lengths]),
        "advantages": nested([torch.ones(n) for n in lengths]),
    }, batch_size=len(lengths))
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=6, global_batch_size=3)
    entropy = nested([torch.full((n + 2,), value) for n, value in zip(lengths, entropy)])
    loss_function = training_loss(functools.partial(ppo_loss, config=config))
    return loss_function(model_output={"log_probs": nested(logp), "entropy": entropy}, data=data)

results = [micro_batch([[0.0, 1.0], [0.0]], [1.0, 4.0]), micro_batch([[3.0, 0.0, 0.0]], [2.0])]
merged = {}
for _, metrics in results:
    for name, value in metrics.items():
        merged.setdefault(name, Metric(aggregation=value.aggregation)).extend(value)
print("WORKER " + json.dumps({
    "losses": [float(loss) for loss, _ in results],
    "metrics": {name: float(Metric.aggregate_dp([metric])) for name, metric in merged.items()},
}))
"""


@pytest.fixture(scope="module")
def worker() -> dict[str, Any]:
    """Two micro-batches (3 responses, 6 tokens) through the loss of our engines in a process of an active run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    environment["SCALERL_VERL_ACTIVE"] = "1"
    done = subprocess.run([sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.split("\n") if line.startswith("WORKER ")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("WORKER "))


def test_actor_s_loss_keeps_maxima_minima_and_sums(worker: dict[str, Any]) -> None:
    """Log-ratios 0, 1, 0 and 3, 0, 0: the maximum is e^3, where verl's mean over micro-batches gives 11.4."""
    metrics = worker["metrics"]
    assert metrics["scalerl/loss/ratio_max"] == pytest.approx(np.exp(3), rel=1e-5)
    assert metrics["scalerl/loss/ratio_min"] == pytest.approx(1.0, rel=1e-5)
    assert metrics["scalerl/mismatch/log_ratio_abs_max"] == pytest.approx(3.0, rel=1e-5)
    assert metrics["scalerl/loss/nonfinite_tokens_sum"] == 0.0
    assert divide(metrics)["scalerl/loss/capped_frac_pos"] == pytest.approx(1 / 3)


def test_actor_s_loss_aggregates_prompt_mean_over_the_global_batch(worker: dict[str, Any]) -> None:
    """Ratios capped at 2, log-probs log-ratio - 1, over 3 rows: (1*1 - 2*0 + 1*1) / 3 and (-2*2 + 1 + 1) / 3."""
    assert worker["losses"] == pytest.approx([2 / 3, -2 / 3], rel=1e-5)
    assert worker["metrics"]["actor/pg_loss"] == pytest.approx(0.0, abs=1e-6)


def test_entropy_under_prompt_mean_is_reported_as_its_token_mean(worker: dict[str, Any]) -> None:
    """(2 tokens * 1 + 1 * 4 + 3 * 2) / 6."""
    assert worker["metrics"]["actor/entropy_loss"] == pytest.approx(2.0, rel=1e-5)


def session_data(rows: dict[str, tuple[int, float]]) -> tuple[DataProto, list[str]]:
    """Row key -> (tokens that train, reward on the last token, which a tool's output masks); as verl builds it."""
    keys = list(rows)
    mask_BT = torch.arange(6)[None, :] < torch.tensor([tokens for tokens, _ in rows.values()])[:, None]
    rewards_BT = torch.zeros(len(rows), 6)
    rewards_BT[:, -1] = torch.tensor([reward for _, reward in rows.values()])
    batch = TensorDict({"response_mask": mask_BT.long(), "token_level_rewards": rewards_BT}, batch_size=len(rows))
    uid_B = np.array([key.split("_")[0] for key in keys], dtype=object)
    return DataProto(batch=batch, non_tensor_batch={"uid": uid_B}), keys


SESSION_ROWS = {
    "a_0_0": (2, 1.0),
    "a_0_1": (1, 1.0),
    "a_1_0": (3, -1.0),
    "b_0_1": (0, 1.0),
    "b_0_0": (4, 1.0),
    "b_1_0": (1, -1.0),
    "b_2_0": (1, -1.0),
    "pad_0_0": (0, 0.0),
}


def first_of_rows(data: DataProto) -> list[float]:
    """The advantage of each row, the same at every token that trains and 0 elsewhere."""
    advantages_BT, mask_BT = data.batch["advantages"], data.batch["response_mask"].bool()
    values = advantages_BT[:, 0]
    torch.testing.assert_close(advantages_BT, values[:, None] * mask_BT)
    return values.tolist()


def test_outputs_of_a_session_share_its_advantage_and_count_once() -> None:
    """Prompt a: 1, -1 (6 tokens); b: 1, -1, -1 (6 tokens), whose first session ends with an output that is all masked.

    Centred 1, -1 and 4/3, -2/3, -2/3; variance (1 + 1 + 16/9 + 4/9 + 4/9) / 5 = 14/15; weight 8 rows / (2 * 6).
    """
    data, keys = session_data(SESSION_ROWS)
    with advantage_step(stub_config("prompt-mean"), {}) as step:
        data = patched_advantages(data, keys, "scalerl", OmegaConf.create({}))
    scale = 8 / 12 / np.sqrt(14 / 15)
    expected = [1, 1, -1, 0, 4 / 3, -2 / 3, -2 / 3, 0]
    assert first_of_rows(data) == pytest.approx([value * scale for value in expected], rel=1e-6)
    assert step.metrics["scalerl/data/rows_kept_sum"] == 6
    assert step.metrics["scalerl/advantage/std"] == pytest.approx(np.sqrt(14 / 15))


def test_prompt_average_with_verl_s_estimator_counts_the_tokens_of_all_outputs() -> None:
    """GRPO without its std: 1, 1, -1 for prompt a (5 and 3 tokens), 1, -1 for b; weight 5 rows / (2 prompts * T)."""
    rows = {"a_0_0": (4, 1.0), "a_0_1": (1, 1.0), "a_1_0": (3, -1.0), "b_0_0": (1, 1.0), "b_1_0": (1, -1.0)}
    data, keys = session_data(rows)
    with advantage_step(stub_config("prompt-mean", "grpo"), {}):
        data = patched_advantages(data, keys, "grpo", OmegaConf.create({}), norm_adv_by_std_in_grpo=False)
    weights = [5 / (2 * 8)] * 3 + [5 / (2 * 2)] * 2
    signs = [1, 1, -1, 1, -1]
    assert first_of_rows(data) == pytest.approx([w * sign for w, sign in zip(weights, signs, strict=True)], rel=1e-6)


def test_zero_variance_is_judged_by_sessions() -> None:
    """Prompt a: both sessions pass; the first output of one was scored -1 by itself. Nothing to learn from."""
    data, keys = session_data({"a_0_0": (2, -1.0), "a_0_1": (2, 1.0), "a_1_0": (2, 1.0)})
    with advantage_step(stub_config("token-mean"), {}) as step:
        patched_advantages(data, keys, "scalerl", OmegaConf.create({}))
    assert step.steps_without_signal() == [0] and step.metrics["scalerl/data/prompts_all_right_sum"] == 1


def test_run_without_our_names_does_not_read_the_keys() -> None:
    data, _ = session_data({"a_0_0": (2, -1.0), "b_0_0": (2, 1.0)})
    with advantage_step(stub_config("token-mean", "grpo"), {}) as step:
        prepare_rows(data, ["of another", "form"])
    assert step.sessions is None
    prepare_rows(data, ["outside", "a step"])


def test_reward_on_a_masked_last_token_counts() -> None:
    """verl puts the reward on the last token, which a tool's output or an injected phrase masks."""
    rewards_BT = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask_BT = torch.tensor([[True, True, False], [True, True, True]])
    with advantage_step(stub_config("token-mean"), {}) as step:
        advantages_BT, _ = estimate_advantages(rewards_BT, mask_BT, np.array(["a", "a"]), OmegaConf.create({}))
    assert step.result is not None and step.result.groups.num_mixed == 1
    torch.testing.assert_close(advantages_BT, torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]))


def test_run_that_was_not_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ACTIVE_ENV)
    batch = torch.zeros(1, 1)
    with pytest.raises(PatchError, match="loss_mode=scalerl_cispo is used in a run whose configuration"):
        policy_loss(batch, batch, batch, batch.bool(), "token-mean", StubActorConfig())
    with advantage_step(stub_config("token-mean"), {}), pytest.raises(PatchError, match="adv_estimator=scalerl"):
        estimate_advantages(batch, batch.bool(), np.array(["a"]), None)
