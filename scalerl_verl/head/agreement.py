# SPDX-License-Identifier: Apache-2.0
"""Do trainer and generator run the same head? Asked on the driver, before the first batch and on it.

Shape legend: B rows (responses), T tokens of the padded response.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scalerl_verl.errors import HeadError
from scalerl_verl.generator.replicas import replicas_of
from scalerl_verl.head.vllm_probe import HEAD_FACT, judge_head
from scalerl_verl.loss import mismatch_metrics
from scalerl_verl.loss.ratios import usable_tokens
from scalerl_verl.upstream import status

MAX_START_MISMATCH = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest mean |log-ratio| of the first batch, whose two log-probs come from the same weights. FP32 models differ by
1e-7 to 1e-5, by summation order; bf16 anywhere makes it 1e-3 or more. bf16 models differ by 0.005 to 0.05 through
their bodies, whatever the head, so that only other weights, another temperature or another prompt exceed 0.1: there the
heads themselves are told apart by what each side measured (`check_records`)."""

Records = Sequence[Sequence[dict[str, Any]]]
"""What each process of a side noted about its head."""


def read_head_facts(_: Any) -> list[dict[str, Any]]:
    """What this process noted; runs inside verl's Ray actors."""
    return status.read_facts(HEAD_FACT)


def collect_records(trainer: Any) -> dict[str, Records]:
    """Ask every trainer worker and the server of every vLLM replica.

    Args:
        trainer: verl's V1 trainer of any mode, initialised.

    Returns:
        ``trainer`` and ``generator``, each a list over processes.
    """
    import ray

    actors = {
        "trainer": list(trainer.actor_rollout_wg.workers),
        # The engines' records were brought to the first server of each replica when it started.
        "generator": [replica.servers[0] for replica in replicas_of(trainer)],
    }
    return {
        side: ray.get([handle.__ray_call__.remote(read_head_facts) for handle in handles])
        for side, handles in actors.items()
    }


def find_disagreements(records: dict[str, Records], sides: Sequence[str]) -> list[str]:
    """Say what keeps the sides from running the same FP32 head, with the numbers.

    Args:
        records: from `collect_records`.
        sides: those the config asks an FP32 head of.
    """
    problems = []
    for side in sides:
        silent = sum(not noted for noted in records[side])
        if silent or not records[side]:
            problems.append(
                f"{silent} of {len(records[side])} processes of the {side} measured no FP32 head: it is not active "
                "there, or the plugin was not loaded there"
            )
        for entry in (entry for noted in records[side] for entry in noted):
            problem = judge_trainer_head(entry) if side == "trainer" else judge_head(entry)
            if problem is not None and problem not in problems:
                problems.append(problem)
    return problems


def judge_trainer_head(record: dict[str, Any]) -> str | None:
    """Say what is wrong with a trainer worker's record of its head; None if it is FP32."""
    if record["max_error"] <= record["tolerance"]:
        return None
    return (
        f"the trainer's head gives log-probs from {record['weight_dtype']} weights that are off by "
        f"{record['max_error']:.2g} against float64 (FP32 stays below {record['tolerance']:g})"
    )


def describe_records(records: dict[str, Records]) -> str:
    """One line with what each side measured."""
    parts = []
    for side, error in (("trainer", "max_error"), ("generator", "max_abs_error")):
        noted = [entry for process in records[side] for entry in process]
        if noted:
            weights = "/".join(sorted({entry["weight_dtype"] for entry in noted}))
            worst = max((entry[error] for entry in noted), key=lambda value: math.inf if math.isnan(value) else value)
            parts.append(f"{side} off by {worst:.2g} at most ({len(records[side])} processes, {weights} weights)")
    return "FP32 head against float64: " + "; ".join(parts)


def check_records(trainer: Any, sides: Sequence[str]) -> None:
    """Compare what both sides measured when they started.

    Raises:
        HeadError: a side that was asked to has no FP32 head, with the numbers of both.
    """
    records = collect_records(trainer)
    problems = find_disagreements(records, sides)
    if problems:
        raise HeadError(
            "trainer and generator do not run the same head: " + "; ".join(problems) + f". {describe_records(records)}"
        )
    print(f"[scalerl_verl] {describe_records(records)}", file=sys.stderr, flush=True)


def on_policy_rows(tags: Sequence[dict[str, Any]], version: int) -> NDArray[np.bool_]:
    """Which rows were sampled from beginning to end under weights of this version, padding rows left out, [B]."""
    return np.array(
        [
            not tag.get("is_padding", False) and tag.get("min_global_steps") == tag.get("max_global_steps") == version
            for tag in tags
        ],
        dtype=bool,
    )


def compare_first_batch(
    logp_train_BT: torch.Tensor, logp_rollout_BT: torch.Tensor, mask_BT: torch.Tensor, limit: float
) -> dict[str, float]:
    """Return the mismatch of rows whose two log-probs come from the same weights.

    Args:
        logp_train_BT: by the trainer, before any update, [B, T].
        logp_rollout_BT: recorded by the generator, [B, T].
        mask_BT: tokens of responses, [B, T] bool.
        limit: largest mean |log-ratio|.

    Returns:
        ``scalerl/mismatch/first_batch_log_ratio_abs_mean`` and ``..._max``; nothing if no token is unmasked.

    Raises:
        HeadError: the mean is above the limit, or a token has a log-prob that is none.
    """
    difference_BT = logp_train_BT.double() - logp_rollout_BT.double()
    # What the loss would leave out as no probability counts as broken here, or a head of rubbish would agree perfectly.
    compared_BT = usable_tokens(logp_train_BT, logp_rollout_BT, mask_BT) & difference_BT.isfinite()
    num_tokens, num_broken = int(mask_BT.sum()), int((mask_BT & ~compared_BT).sum())
    if not num_tokens:
        return {}
    measured = mismatch_metrics(logp_train_BT, logp_rollout_BT, mask_BT)
    mean, largest = (measured[f"scalerl/mismatch/log_ratio_abs_{how}"][0] for how in ("mean", "max"))
    if num_broken or not mean <= limit:
        raise HeadError(
            f"trainer and generator disagree about the first batch, sampled under the weights that the trainer holds: "
            f"mean |log-ratio| {mean:.3g} (allowed {limit:g}), max {largest:.3g}, {num_broken} of {num_tokens} "
            "log-probs are NaN, infinite or too large. Possible causes: a head in another precision on one side, "
            "weights that did not arrive, or a temperature, top_p, top_k or token mask that only one side applies"
        )
    prefix = "scalerl/mismatch/first_batch_log_ratio_abs"
    return {f"{prefix}_mean": mean, f"{prefix}_max": largest}
