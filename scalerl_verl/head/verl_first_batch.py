# SPDX-License-Identifier: Apache-2.0
"""The start-up probe of the FP32 head in verl's trainer loop: which sides are asked, and the first batch."""

from __future__ import annotations

import sys
from typing import Any

from scalerl_verl.head.agreement import MAX_START_MISMATCH, check_records, compare_first_batch, on_policy_rows
from scalerl_verl.head.settings import trainer_backend
from scalerl_verl.names import FSDP, GENERATOR_DTYPE, ROLLOUT, VLLM, select
from scalerl_verl.names.asking import generator_head_dtype, is_bypassed


def asked_sides(config: Any) -> list[str]:
    """Sides of which a composed config asks an FP32 head: ``trainer``, ``generator``; both or none after the checks."""
    asked = {
        "trainer": trainer_backend(config) is not None,
        "generator": generator_head_dtype(config) == GENERATOR_DTYPE,
    }
    return [side for side, is_asked in asked.items() if is_asked]


def probe_sides(trainer: Any) -> int | None:
    """Compare both sides' heads once verl has started them.

    Returns:
        The version of the weights whose first batch is to be compared, too; None if the run asks for no FP32 head.

    Raises:
        HeadError: they differ (see `head_agreement`).
    """
    sides = asked_sides(trainer.config)
    if not sides:
        return None
    check_records(trainer, sides)
    # The weights that the generator holds now; a resumed run starts at the step of its checkpoint.
    return int(trainer.global_steps)


def probe_first_batch(trainer: Any, batch: Any, metrics: dict[str, Any], version: int | None) -> None:
    """Compare log-probs of the first batch, if it was sampled under the weights that the trainer still holds.

    Args:
        trainer: verl's V1 trainer.
        batch: verl's KVBatchMeta, with old log-probs.
        metrics: of the step; the measured mismatch is added.
        version: as of `probe_sides`; None: not the first batch, or nothing to compare.

    Raises:
        HeadError: they differ (see `head_agreement`).
    """
    if version is None:
        return
    rows_B = on_policy_rows(batch.tags, version)
    if not rows_B.any():
        print(
            f"[scalerl_verl] the first batch holds no response of the initial weights (version {version}: prompts were "
            "restored from a checkpoint): trainer and generator are compared by their heads only",
            file=sys.stderr,
            flush=True,
        )
        return
    logp_train_BT, logp_rollout_BT, mask_BT = _read_log_probs(trainer, batch)
    limit = MAX_START_MISMATCH["float32" if _is_fp32(trainer.config) else "bfloat16"]
    metrics.update(compare_first_batch(logp_train_BT[rows_B], logp_rollout_BT[rows_B], mask_BT[rows_B], limit))


def _read_log_probs(trainer: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Log-probs by the trainer and by the generator, and the mask of responses, [B, T] each.

    With ``bypass_mode`` verl does not compute the trainer's: one forward more, on this batch only.
    """
    import transfer_queue as tq
    from verl.workers.utils.padding import response_from_nested

    if is_bypassed(trainer.config):
        extra = {**batch.extra_info, "calculate_entropy": False, "compute_loss": False}
        extra["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
        # A copy: what a forward is told must not reach the update.
        probe = tq.KVBatchMeta(partition_id=batch.partition_id, keys=batch.keys, tags=batch.tags, extra_info=extra)
        trainer.actor_rollout_wg.compute_log_prob(probe)
        fields = ["log_probs", "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        data["log_probs"] = response_from_nested(data.pop("log_probs"), data["response_mask"])
        train = "log_probs"
    else:
        train = "old_log_probs"
        fields = [train, "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    padded = data.to_padded_tensor()
    return padded[train], padded["rollout_log_probs"], padded["response_mask"].bool()


def _is_fp32(config: Any) -> bool:
    """Whether the bodies of both models compute in FP32, so that the head is not all that could."""
    trainer = select(config, f"{FSDP}.mixed_precision.param_dtype")
    # The engine's own key wins over verl's.
    generator = select(config, f"{VLLM}.dtype", select(config, f"{ROLLOUT}.dtype"))
    return str(trainer) in ("fp32", "float32") and str(generator) in ("fp32", "float32", "float")
