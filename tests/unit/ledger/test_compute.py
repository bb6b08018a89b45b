# SPDX-License-Identifier: Apache-2.0
"""The ledger in a trainer: our steps in front of stand-ins for verl's methods, real configs, real files.

A real trainer needs Ray and an engine: tests/e2e/test_sync.py runs one, with a resumption.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from scalerl_verl.advantage import AdvantageResult
from scalerl_verl.advantage.step import AdvantageStep
from scalerl_verl.json_lines import read_records
from scalerl_verl.ledger import verl as compute
from tests.steps import in_front_of

FLOPS_PER_TOKEN = 100.0
MAX_LENGTH = 8


def make_config(folder: Path, **changes: Any) -> Any:
    config = OmegaConf.create(
        {
            "trainer": {
                "nnodes": 1, "n_gpus_per_node": 2, "resume_mode": "auto",
                "default_local_dir": str(folder / "checkpoints"), "v1": {"trainer_mode": "sync"},
            },
            "algorithm": {"adv_estimator": "scalerl", "rollout_correction": {"bypass_mode": True}},
            "actor_rollout_ref": {
                "actor": {
                    "loss_agg_mode": "prompt-mean", "ppo_epochs": 1, "policy_loss": {"loss_mode": "scalerl_cispo"},
                },
                "rollout": {"nnodes": 0, "n_gpus_per_node": 4},
            },
            "reward": {"reward_model": {"enable_resource_pool": False}},
            "data": {"max_response_length": MAX_LENGTH},
        }
    )  # fmt: skip
    for path, value in changes.items():
        OmegaConf.update(config, path.replace("__", "."), value)
    return config


class StubBuffer:
    """Stands for verl's ReplayBuffer: two responses to the prompt asked for, the second of the greatest length."""

    def sample(self, global_steps: int, partition_id: str, batch_size: str) -> Any:
        tags = [{"response_len": MAX_LENGTH - 2}, {"response_len": MAX_LENGTH}]
        return SimpleNamespace(keys=[f"{batch_size}_0_0", f"{batch_size}_1_0"], tags=tags), {}


class StubTrainer:
    """Stands for verl's PPOTrainer: the methods that ours extend, with their order in a step."""

    scalerl: Any
    use_reference_policy = False
    total_training_steps = 10
    uses_names = True
    saved: tuple[int, ...] = ()
    val_dataset = None

    def __init__(self, config: Any) -> None:
        self.config, self.global_steps = config, 0
        self.replay_buffer = StubBuffer()

    def _load_checkpoint(self) -> None:
        latest = Path(self.config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt"
        self.global_steps = int(latest.read_text()) if latest.exists() else 0

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir)
        assert (folder / f"global_step_{self.global_steps}" / compute.STATE_FILE).exists()
        (folder / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))

    def _validate(self) -> dict[str, float]:
        for prompt in ("p", "q"):
            self.replay_buffer.sample(global_steps=self.global_steps, partition_id="val", batch_size=prompt)
        return self._val_metrics_update(["a"] * 4, ["p", "p", "q", "q"], {"reward": [1, -1, 1, 1]}, [])

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Any, turns: Any
    ) -> dict:
        return {"val-core/a": 0.5}

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: Any, global_steps: Any, epoch: Any) -> None:
        metrics["training/global_step"] = global_steps

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        return batch

    def train_step(self, kept: list[bool], save: bool = False, validate: bool = False) -> dict[str, float]:
        """One step of three rows of 4, 5 and 6 tokens, a prompt of 2 tokens each, and a padding row."""
        self.timing_raw: dict[str, float] = {}
        self.global_steps += 1
        self.kept = kept
        metrics: dict[str, float] = {}
        batch = self.step(metrics, self.timing_raw)
        if save:
            self._save_checkpoint()
        if validate:
            metrics.update(self._validate())
        self._compute_metrics(batch, metrics, {}, self.global_steps, 0)
        return metrics

    def step(self, metrics: dict[str, float], timing_raw: dict[str, float]) -> Any:
        tags = [{"seq_len": n + 2} for n in (4, 5, 6)] + [{"seq_len": 2, "is_padding": True}]
        batch = SimpleNamespace(tags=tags)
        step = AdvantageStep("prompt-mean", metrics, uses_groups=True, uses_names=self.uses_names)
        step.num_tokens_B, step.kept_B = np.array([4, 5, 6, 0]), np.array([*self.kept, False])
        step.result = AdvantageResult(step.kept_B.astype(float), step.kept_B, groups=None, std=1.0)
        compute.count_batch(self.scalerl.ledger, self, batch, step)
        self.scalerl.step = step
        return self._update_actor(batch, metrics)


Trainer = in_front_of(StubTrainer, ledger=True)


@pytest.fixture(autouse=True)
def priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs by a fixed price instead of a model's config."""
    monkeypatch.setattr(compute, "find_flops_counter", lambda config: lambda seqlens: FLOPS_PER_TOKEN * sum(seqlens))


def start(folder: Path, **changes: Any) -> Any:
    trainer = Trainer(make_config(folder, **changes))
    trainer._load_checkpoint()
    return trainer


def test_step_counts_tokens_flops_and_steps(tmp_path):
    metrics = start(tmp_path).train_step([True, True, False])
    assert metrics["scalerl/compute/generated_tokens"] == 15
    assert metrics["scalerl/compute/trained_tokens"] == 9
    # 21 tokens with prompts: an update and, with the recorded log-probs kept, one forward pass for generation.
    assert metrics["scalerl/compute/model_flops"] == pytest.approx(21 * FLOPS_PER_TOKEN * (1 + 1 / 3))
    assert metrics["scalerl/compute/steps"] == 1 and metrics["scalerl/compute/gpu_hours"] > 0


def test_recomputed_log_probs_a_reference_and_epochs_cost_more(tmp_path):
    trainer = start(tmp_path, algorithm__rollout_correction__bypass_mode=False, actor_rollout_ref__actor__ppo_epochs=2)
    trainer.use_reference_policy = True
    metrics = trainer.train_step([True, True, True])
    assert metrics["scalerl/compute/model_flops"] == pytest.approx(21 * FLOPS_PER_TOKEN * (2 + 3 / 3))
    assert metrics["scalerl/compute/trained_tokens"] == 30


def test_skipped_update_trains_nothing(tmp_path):
    metrics = start(tmp_path).train_step([False, False, False])
    assert metrics["scalerl/compute/trained_tokens"] == 0 and metrics["scalerl/compute/generated_tokens"] == 15
    assert metrics["scalerl/compute/model_flops"] == pytest.approx(21 * FLOPS_PER_TOKEN / 3)


def test_unknown_architecture_leaves_flops_out(tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "find_flops_counter", lambda config: None)
    assert "scalerl/compute/model_flops" not in start(tmp_path).train_step([True] * 3)


def test_validation_is_logged_with_the_compute_before_it(tmp_path):
    trainer = start(tmp_path)
    before = trainer._validate()
    assert before["scalerl/compute/steps"] == before["scalerl/compute/generated_tokens"] == 0
    assert before["scalerl/validation/pass_rate"] == 0.75 and before["scalerl/validation/stderr"] == pytest.approx(0.25)
    assert (before["scalerl/validation/num_prompts"], before["scalerl/validation/num_generations"]) == (2, 4)
    during = trainer.train_step([True] * 3, validate=True)
    after = trainer.train_step([True] * 3)
    assert during["scalerl/compute/generated_tokens"] == 15 and after["scalerl/compute/generated_tokens"] == 30
    assert (
        before["scalerl/compute/gpu_hours"] < during["scalerl/compute/gpu_hours"] < after["scalerl/compute/gpu_hours"]
    )
    assert "scalerl/forecast/num_points" in during and "scalerl/validation/pass_rate" not in after


def test_validation_reports_its_lengths_and_leaves_verl_s_buffer_alone(tmp_path):
    trainer = start(tmp_path)
    found = trainer._validate()
    assert {name: value for name, value in found.items() if name.startswith("scalerl/length/")} == {
        "scalerl/length/val/truncated_fraction": 0.5,
        "scalerl/length/val/prompts_truncated_fraction": 1.0,
        "scalerl/length/val/truncated_fraction_prompt_max": 0.5,
        "scalerl/length/val/clamped_fraction": 0.0,
    }
    assert vars(trainer.replay_buffer) == {} and trainer.scalerl.validation is None


def test_resumed_run_continues_the_count(tmp_path):
    trainer = start(tmp_path)
    trainer._validate()
    trainer.train_step([True] * 3)
    saved = trainer.train_step([True] * 3, save=True, validate=True)
    trainer.train_step([True] * 3)  # dies here
    resumed = start(tmp_path)
    assert resumed.global_steps == 2
    metrics = resumed.train_step([True] * 3)
    assert metrics["scalerl/compute/generated_tokens"] == 45 and metrics["scalerl/compute/trained_tokens"] == 45
    assert metrics["scalerl/compute/wasted_tokens"] == 15 and metrics["scalerl/compute/wasted_gpu_hours"] > 0
    assert metrics["scalerl/compute/gpu_hours"] > saved["scalerl/compute/gpu_hours"]
    assert [point.totals.steps for point in resumed.scalerl.ledger.counts.points] == [0, 2]


def test_torn_line_of_a_killed_run_is_dropped(tmp_path):
    trainer = start(tmp_path)
    trainer.train_step([True] * 3, save=True)
    log = tmp_path / "checkpoints" / compute.LOG_FILE
    log.write_text(log.read_text() + '{"totals": {"gpu_sec')
    start(tmp_path).train_step([True] * 3)
    assert [record["totals"]["steps"] for record in read_records(log)] == [1, 2]


def test_new_run_in_an_old_folder_starts_from_nothing(tmp_path):
    start(tmp_path).train_step([True] * 3)
    metrics = start(tmp_path, trainer__resume_mode="disable").train_step([True] * 3)
    assert metrics["scalerl/compute/generated_tokens"] == 15 and metrics["scalerl/compute/wasted_tokens"] == 0


def test_checkpoint_without_a_ledger_says_that_the_count_is_short(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    (folder / "global_step_5").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    metrics = start(tmp_path).train_step([True] * 3)
    assert "saved without scalerl_verl" in caplog.text
    assert metrics["scalerl/compute/generated_tokens"] == 15 and metrics["scalerl/compute/steps"] == 6


@pytest.mark.parametrize("text", ["", '{"totals": {"ste', "[]", "{}", '{"totals": 3}', '{"totals": {"steps": 3}}'])
def test_count_of_a_checkpoint_that_was_cut_or_is_another_file_is_named(text, tmp_path):
    """Fault: a traceback of json that names no file."""
    path = tmp_path / "checkpoints" / "global_step_5" / compute.STATE_FILE
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(ValueError, match=r"holds no count of compute .* restore the file, or delete it to count from"):
        start(tmp_path)


def test_run_without_our_names_has_no_ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    plain = {
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__actor__loss_agg_mode": "token-mean",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "vanilla",
    }
    trainer = start(tmp_path, **plain)
    trainer.uses_names = False
    metrics = trainer.train_step([True] * 3, save=False, validate=True)
    assert not [name for name in metrics if name.startswith("scalerl/")]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 2),
        ({"trainer__v1__trainer_mode": "separate_async", "actor_rollout_ref__rollout__nnodes": 2}, 2 + 8),
        ({"trainer__v1__trainer_mode": "pipeline_rl", "actor_rollout_ref__rollout__nnodes": 2}, 2 + 8),
        ({"trainer__v1__trainer_mode": "colocate_async"}, 2),
        ({"trainer__v1__trainer_mode": "ppo_off_policy", "actor_rollout_ref__rollout__nnodes": 2}, 2),
        ({"reward__reward_model": {"enable_resource_pool": True, "nnodes": 1, "n_gpus_per_node": 3}}, 2 + 3),
    ],
)
def test_gpus_of_trainer_generators_and_reward_model_count(tmp_path, changes, gpus):
    assert compute.count_gpus(make_config(tmp_path, **changes)) == gpus


def test_flops_are_those_of_verls_counter():
    """For a model that verl knows: 6 FLOPs a parameter and token, and attention on top."""
    from transformers import Qwen2Config
    from verl.utils import config as verl_config
    from verl.utils import flops_counter

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 97}
    hf_config = Qwen2Config(num_attention_heads=4, num_key_value_heads=4, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verl_config, "omega_conf_to_dataclass", lambda _: SimpleNamespace(hf_config=hf_config))
        counter = REAL_COUNTER(OmegaConf.create({"actor_rollout_ref": {"model": {}}}))
        # It asks the device for its peak, which the trainer's process need not have.
        patch.setattr(flops_counter, "get_device_flops", lambda: 1.0)
        expected, _ = flops_counter.FlopsCounter(hf_config).estimate_flops([10, 20], 1.0)
    assert counter([10, 20]) == pytest.approx(expected * 1e12) and expected > 0


REAL_COUNTER = compute.find_flops_counter
