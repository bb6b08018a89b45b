# SPDX-License-Identifier: Apache-2.0
"""Part of engine_gradients: one batch, several optimizer steps, through verl's trainer methods, worker and engine.

verl's `PPOTrainer._balance_batch` and `_update_actor`, behind ours, hand each rank its part, which verl's
`TrainingWorker` trains on in FP64, by plain gradient descent.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo import padding_utils
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from scalerl_verl.loss.verl_config import ScaleRLFSDPActorConfig, ScaleRLPolicyLossConfig
from scalerl_verl.verl.actor_loss import ppo_loss
from tests.faults.test_optimizer_steps import (
    GROUP,
    InMemoryQueue,
    Trainer,
    advantage_data,
    prompt_of,
    run_config,
    take_advantages,
)

PROMPT_TOKENS = 3
MINI = 3
UPDATES = 4
CASES: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    # responses of each prompt, rows of each response, how a step is split
    "unequal groups": (
        [4, 3, 1, 4, 2, 4, 4, 3, 4, 4, 3, 2],
        1,
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24},
    ),
    "a prompt lost, responses of two rows": (
        [4, 3, 4, 4, 2, 4, 4, 4, 4, 4, 3],
        2,
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    ),
}
EQUAL = {"p1", "p3", "p4", "p5", "p9"}
"""Prompts whose responses all pass: the second of four updates has no other ones, so that it is left out."""


class RankOfWorkers:
    """The actor's worker group as one rank sees it: its part of a batch, as verl deals it out."""

    def __init__(self, worker: TrainingWorker, rows: dict[str, dict[str, Any]], split: dict[str, Any]) -> None:
        self.worker, self.rows, self.split = worker, rows, split
        self._dispatch_info = {"actor": list(range(worker.world_size))}

    def update_actor(self, batch: KVBatchMeta) -> Any:
        part = batch.chunk(self.worker.world_size)[self.worker.rank]
        rows = [self.rows[key] for key in part.keys]
        data = TensorDict(
            {
                name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
                for name in rows[0]
                if name != "number"
            }
            | {"number": torch.tensor([row["number"] for row in rows])},
            batch_size=len(rows),
        )
        tu.assign_non_tensor(data, **{**batch.extra_info, "temperature": 1.0, **self.split})
        return {"metrics": {**tu.get(self.worker.train_mini_batch(data), "metrics"), "mfu": [0.0]}}


def make_rows(keys: list[str], advantages_BT: torch.Tensor, lengths: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Fields of each row by its key: the same for every order; padding rows have one masked token."""
    rows = {}
    for number, (key, advantages) in enumerate(zip(keys, advantages_BT, strict=True)):
        is_padding, size = key not in lengths, lengths.get(key, 1)
        generator = torch.Generator().manual_seed(0 if is_padding else int.from_bytes(key.encode(), "big") % 2**31)
        tokens = torch.randint(3, 20, (PROMPT_TOKENS + size,), generator=generator)
        mask = torch.full((size,), int(not is_padding))
        rows[key] = {
            "input_ids": tokens,
            "position_ids": torch.arange(len(tokens)),
            "prompts": tokens[:PROMPT_TOKENS],
            "responses": tokens[PROMPT_TOKENS:],
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": -4 * torch.rand(size, generator=generator) - 1,
            "advantages": advantages[:size],
            "number": number,
        }
    return rows


def model_config(path: str) -> HFModelConfig:
    return HFModelConfig(
        path=path,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )


def engine_config(precision: str) -> FSDPEngineConfig:
    """Everything in one precision."""
    mixed = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), precision)
    return FSDPEngineConfig(strategy="fsdp2", model_dtype=precision, mixed_precision=mixed, use_torch_compile=False)


def make_worker(model_path: str) -> TrainingWorker:
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=model_config(model_path),
        engine_config=engine_config("fp64"),
        # SGD shows the size of a gradient, which AdamW divides out.
        optimizer_config=FSDPOptimizerConfig(
            lr=0.3, optimizer="SGD", total_training_steps=UPDATES, clip_grad=1e9, override_optimizer_config={}
        ),
        checkpoint_config=CheckpointConfig(),
    )
    worker = TrainingWorker(config)
    worker.reset()
    worker.flops_counter = None
    return worker


def train(worker: TrainingWorker, case: str) -> tuple[list[list[str]], dict[str, Any]]:
    """Row keys that each optimizer step of this rank saw, and the step's metrics."""
    sizes, outputs, split = CASES[case]
    keys = [f"p{p}_{s}_{o}" for p, size in enumerate(sizes) for s in range(size) for o in range(outputs)]
    rng = np.random.default_rng(0)
    lengths = {key: int(rng.integers(1, 13)) for key in keys}
    tags = [{"seq_len": PROMPT_TOKENS + lengths[key], "response_len": lengths[key], "global_steps": 1} for key in keys]
    fixed = {"use_dynamic_bsz": split["use_dynamic_bsz"]}
    if "micro_batch_size_per_gpu" in split:
        fixed["ppo_micro_batch_size_per_gpu"] = split["micro_batch_size_per_gpu"]
    changes = {f"actor_rollout_ref.actor.{key}": value for key, value in fixed.items()}
    trainer: Any = Trainer(run_config(UPDATES * MINI, MINI, **changes), worker.world_size)
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(KVBatchMeta(keys=keys, tags=tags, partition_id="train"), metrics)
    rewards = {key: 1.0 if prompt_of(key) in EQUAL or "_0_" in key else -1.0 for key in keys}
    advantages_BT = take_advantages(trainer, batch, advantage_data(batch, rewards, lengths), metrics)
    rows = make_rows(batch.keys, advantages_BT, lengths)
    config = ScaleRLFSDPActorConfig(
        rollout_n=GROUP,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="prompt-mean",
        policy_loss=ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo", eps_max=2.0),
    )
    seen: list[list[str]] = []

    def noting_loss(*, model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        seen[-1].extend(list(rows)[number] for number in data["number"].tolist())
        return ppo_loss(config, model_output, data, dp_group)

    step = worker.engine.train_batch

    @functools.wraps(step)
    def noting_step(*args: Any, **kwargs: Any) -> Any:
        seen.append([])
        return step(*args, **kwargs)

    worker.set_loss_fn(noting_loss)
    trainer.actor_rollout_wg = RankOfWorkers(worker, rows, split)
    with mock.patch.object(worker.engine, "train_batch", noting_step):
        trainer._update_actor(batch, metrics)
    return seen, {name: float(value) for name, value in metrics.items() if name.startswith("scalerl/")}


def write_updates(folder: Path, rank: int, world: int) -> None:
    """Each rank writes updates-<world>-<rank>.json, rank 0 weights-<world>.npz: case -> flat weights at the end."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with mock.patch.object(padding_utils, "tq", InMemoryQueue()):
        worker = make_worker(str(folder / "model"))
        parameters = list(worker.engine.module.parameters())
        start = [parameter.detach().clone() for parameter in parameters]
        found, weights = {}, {"start": torch.cat([parameter.full_tensor().flatten() for parameter in start]).numpy()}
        for case in CASES:
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
            found[case] = train(worker, case)
            weights[case] = torch.cat([parameter.detach().full_tensor().flatten() for parameter in parameters]).numpy()
    (folder / f"updates-{world}-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        np.savez(folder / f"weights-{world}.npz", **weights)
