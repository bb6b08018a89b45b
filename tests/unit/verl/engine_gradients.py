# SPDX-License-Identifier: Apache-2.0
"""Child program of test_engine_gradients: gradients of a tiny model through verl's FSDP2 engine, for several splits.

python engine_gradients.py FOLDER; RANK and WORLD_SIZE in the environment. Reads FOLDER/model; rank 0 writes
FOLDER/gradients-<world>.npz, "precision|loss|order|split" -> flat gradient, and FOLDER/inputs.npz. What several updates
on a batch leave is written by rank_updates.

verl's engine has no FP64 of its own, its table of precision names ends at 32 bits. That function alone is replaced here
(`allow_fp64`); FSDP2, micro-batching and the loss are verl's in both precisions.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import nn
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from scalerl_verl.advantage.step import advantage_step, fold_row_weights
from scalerl_verl.loss.term_weights import FIELD
from scalerl_verl.loss.verl_config import ScaleRLFSDPActorConfig, ScaleRLPolicyLossConfig
from scalerl_verl.verl.algorithms import estimate_advantages
from tests.unit.verl.rank_updates import engine_config, model_config, write_updates

PROMPT_TOKENS = 3
UIDS = list("aabbccbb")
REWARDS = [1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
LENGTHS = [2, 9, 4, 1, 7, 3, 12, 5]
SPLITS: dict[str, dict[str, Any]] = {
    "fours": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4},
    "single rows": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "pairs": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2},
    "dynamic, 16 tokens": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 16},
    "dynamic, 31 tokens": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 31},
}
KL = {"use_kl_loss": True, "kl_loss_type": "mse", "kl_loss_coef": 0.3}
"""mse is half the square of the log-probs' difference."""
ENTROPY = {"entropy_coeff": 0.2}
KL_IN_REWARD, GAMMA = 0.3, 0.9


@dataclass(frozen=True)
class Loss:
    """What trains: options of the policy loss, terms beside it, and where the advantages come from.

    Args:
        options: of `scalerl_cispo`.
        terms: fields of verl's ActorConfig.
        advantages: ``ours``; ``none``, for terms by themselves; ``kl``: verl's REINFORCE++ with a KL in the reward.
        precisions: in which it is tried; verl's terms are the same code in both.
    """

    options: dict[str, Any] = field(default_factory=dict)
    terms: dict[str, Any] = field(default_factory=dict)
    advantages: str = "ours"
    precisions: tuple[str, ...] = ("fp64",)


BOTH = ("fp32", "fp64")
LOSSES = {
    "cap": Loss(precisions=BOTH),
    "range": Loss({"token_mask_range": [0.5, 2.0]}, precisions=BOTH),
    "sequence": Loss({"sequence_truncation": "product"}, precisions=BOTH),
    "terms": Loss(terms=KL | ENTROPY, precisions=BOTH),
    "KL": Loss(terms=KL, advantages="none"),
    "KL as in verl's scripts": Loss(terms=KL | {"kl_loss_type": "low_var_kl"}, advantages="none"),
    "entropy": Loss(terms=ENTROPY, advantages="none"),
    "KL in the reward": Loss(advantages="kl"),
}
ORDERS = {
    "in order": [0, 1, 2, 3, 4, 5, 6, 7],
    "groups apart": [6, 0, 4, 3, 2, 7, 1, 5],
    "padding rows": [8, 3, 9, 10, 0, 5, 11, 12, 13, 2, 7, 14, 1, 6, 15, 4],
}
"""Rows in the order of the batch; those from 8 on are verl's padding: one masked token of a prompt of their own."""


def make_batch(vocab_size: int, num_rows: int) -> dict[str, Any]:
    """Rows of 3 prompt tokens and the response; log-probs that make ratios of both sides of the cap."""
    generator = torch.Generator().manual_seed(0)
    num_padding = num_rows - len(UIDS)
    lengths, trained = LENGTHS + [1] * num_padding, LENGTHS + [0] * num_padding
    tokens = [torch.randint(3, vocab_size, (PROMPT_TOKENS + n,), generator=generator) for n in LENGTHS]
    logp = [-4 * torch.rand(n, generator=generator) - 3 for n in LENGTHS]
    tokens += [torch.full((PROMPT_TOKENS + 1,), 3)] * num_padding
    logp += [torch.zeros(1)] * num_padding
    mask_BT = torch.arange(max(LENGTHS))[None, :] < torch.tensor(trained)[:, None]
    rewards_BT = torch.zeros(mask_BT.shape)
    rewards_BT[torch.arange(num_rows), torch.tensor(lengths) - 1] = torch.tensor(REWARDS + [7.0] * num_padding)
    uids = np.array(UIDS + ["pad"] * num_padding, dtype=object)
    actor = SimpleNamespace(loss_agg_mode="prompt-mean")
    with advantage_step(SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor)), {}) as step:
        advantages_BT, _ = estimate_advantages(rewards_BT, mask_BT, uids, OmegaConf.create({"scalerl": {}}))
    advantages = [row[:n] for row, n in zip(advantages_BT, lengths, strict=True)]
    in_reward_BT = with_kl_in_reward(rewards_BT, mask_BT.long(), nn.utils.rnn.pad_sequence(logp, True), uids)
    in_reward = [row[:n] for row, n in zip(in_reward_BT, lengths, strict=True)]
    masks = [row[:n].long() for row, n in zip(mask_BT, lengths, strict=True)]
    weights = [torch.full((n,), float(w)) for n, w in zip(lengths, step.weights_B, strict=True)]
    by_name = {"ours": advantages, "none": [0 * row for row in advantages], "kl": in_reward}
    return {"tokens": tokens, "logp": logp, "advantages": by_name, "masks": masks, "weights": weights}


def make_ref(logp: torch.Tensor) -> torch.Tensor:
    """Log-probs of a reference that is no multiple of the sampling policy."""
    return logp / 2 - 2 + logp.square() / 50


def with_kl_in_reward(
    rewards_BT: torch.Tensor, mask_BT: torch.Tensor, logp_BT: torch.Tensor, uids: np.ndarray
) -> torch.Tensor:
    """Advantages with the weights of prompts, by verl's own penalty and estimator, as its trainer calls them."""
    columns = {
        "token_level_scores": rewards_BT,
        "response_mask": mask_BT,
        "old_log_probs": logp_BT,
        "ref_log_prob": make_ref(logp_BT),
    }
    data = DataProto(batch=TensorDict(columns, batch_size=len(uids)), non_tensor_batch={"uid": uids})
    data, _ = apply_kl_penalty(data, FixedKLController(KL_IN_REWARD), "kl")
    algorithm = OmegaConf.create({"gamma": GAMMA, "adv_estimator": "reinforce_plus_plus"})
    actor = SimpleNamespace(loss_agg_mode="prompt-mean")
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor), algorithm=algorithm)
    with advantage_step(config, {}):
        data = compute_advantage(data, algorithm.adv_estimator, gamma=GAMMA, config=algorithm)
        return fold_row_weights(data).batch["advantages"]


def inputs_of(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a reference needs to know of the batch in order."""
    tokens, logp = (nn.utils.rnn.pad_sequence(batch[key], True).numpy() for key in ("tokens", "logp"))
    known = {"uids": UIDS, "rewards": REWARDS, "lengths": LENGTHS, "prompt": PROMPT_TOKENS}
    return {**{name: np.array(value) for name, value in known.items()}, "tokens": tokens, "logp": logp}


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_data(batch: dict[str, Any], rows: list[int], split: dict[str, Any], advantages: str) -> TensorDict:
    """What a worker of verl's V1 trainer gets of these rows."""
    tokens = [batch["tokens"][i] for i in rows]
    masks = [batch["masks"][i] for i in rows]
    data = TensorDict(
        {
            "input_ids": nested(tokens),
            "position_ids": nested([torch.arange(len(row)) for row in tokens]),
            "prompts": nested([row[:PROMPT_TOKENS] for row in tokens]),
            "responses": nested([row[PROMPT_TOKENS:] for row in tokens]),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
            "old_log_probs": nested([batch["logp"][i] for i in rows]),
            "advantages": nested([batch["advantages"][advantages][i] for i in rows]),
            "ref_log_prob": nested([make_ref(batch["logp"][i]) for i in rows]),
            FIELD: nested([batch["weights"][i] for i in rows]),
        },
        batch_size=len(rows),
    )
    settings = {
        "calculate_entropy": True,
        "global_batch_size": len(batch["tokens"]),
        "temperature": 1.0,
        "use_remove_padding": False,
        **split,
    }
    tu.assign_non_tensor(data, **settings)
    return data


def allow_fp64() -> None:
    """Teach verl's table of precision names a 64th bit."""
    known = PrecisionType.to_dtype
    PrecisionType.to_dtype = staticmethod(lambda name: torch.float64 if name == "fp64" else known(name))


def make_engine(model_path: str, precision: str) -> Any:
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model_config(model_path),
        engine_config=engine_config(precision),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def gradient(engine: Any, data: TensorDict, loss: Loss) -> np.ndarray:
    """Flat gradient of one mini-batch, by verl's own forward_backward_batch and ppo_loss."""
    config = ScaleRLFSDPActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="prompt-mean",
        **loss.terms,
        policy_loss=ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo", eps_max=2.0, **loss.options),
    )
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(data, functools.partial(ppo_loss, config), forward_only=False)
        parts = [parameter.grad.full_tensor().flatten() for parameter in engine.module.parameters()]
    return torch.cat(parts).numpy()


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder / f'store-{world}'}"
    dist.init_process_group("cpu:gloo", init_method=store, rank=rank, world_size=world)
    torch.set_num_threads(1)
    allow_fp64()
    found = {}
    for precision in ("fp32", "fp64"):
        engine = make_engine(str(folder / "model"), precision)
        assert {parameter.dtype for parameter in engine.module.parameters()} == {PrecisionType.to_dtype(precision)}
        for order_name, order in ORDERS.items():
            batch = make_batch(engine.model_config.hf_config.vocab_size, len(order))
            rows = order[rank * len(order) // world : (rank + 1) * len(order) // world]
            for split_name, split in SPLITS.items():
                for loss_name, loss in LOSSES.items():
                    if precision in loss.precisions:
                        name = f"{precision}|{loss_name}|{order_name}|{split_name}"
                        found[name] = gradient(engine, make_data(batch, rows, split, loss.advantages), loss)
    if rank == 0:
        np.savez(folder / f"gradients-{world}.npz", **found)
        np.savez(folder / "inputs.npz", **inputs_of(make_batch(engine.model_config.hf_config.vocab_size, len(UIDS))))
    write_updates(folder, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
