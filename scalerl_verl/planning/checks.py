# SPDX-License-Identifier: Apache-2.0
"""Divisibility and lengths: what verl or vLLM would refuse minutes after the start, or never say. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from scalerl_verl.names import ACTOR, FSDP, GROUP_SIZE, ROLLOUT, TRAINER_MODE
from scalerl_verl.pipeline.transfer import bucket_problem, largest_sent
from scalerl_verl.planning.layout import RunLayout
from scalerl_verl.shapes import ModelShape

_SP = f"{FSDP}.ulysses_sequence_parallel_size"


def find_problems(layout: RunLayout, shape: ModelShape) -> list[str]:
    """Everything that does not divide or does not fit in length, each with what to change."""
    problems = [*_batches(layout), *_parallel(layout, shape), *_engines(layout, shape), *_lengths(layout, shape)]
    bucket = bucket_problem(layout.generator.transfer, largest_sent(shape))
    return problems + ([bucket] if bucket else [])


def _batches(layout: RunLayout) -> Iterator[str]:
    if layout.prompts % layout.prompts_per_update:
        yield (
            f"data.train_batch_size={layout.prompts} is no multiple of {ACTOR}.ppo_mini_batch_size="
            f"{layout.prompts_per_update}: the rest would be filled up with padding; make it one"
        )
    if layout.trainer_gpus % layout.sequence_parallel:
        return  # reported with the parallel sizes
    ranks = layout.trainer_gpus // layout.sequence_parallel
    sequences = layout.sequences_per_update
    if sequences % ranks:
        nearest = max((n for n in range(1, ranks + 1) if sequences % n == 0), default=1)
        yield (
            f"{ACTOR}.ppo_mini_batch_size x {GROUP_SIZE} = {layout.prompts_per_update} x {layout.group_size} = "
            f"{sequences} responses do not divide over {ranks} data-parallel ranks (GPUs that train / {_SP}): use "
            f"{nearest} ranks, or another batch"
        )
    elif not layout.dynamic_batches and layout.micro_batch and sequences // ranks % layout.micro_batch:
        yield (
            f"{sequences // ranks} responses a rank are no multiple of {ACTOR}.ppo_micro_batch_size_per_gpu="
            f"{layout.micro_batch}: choose a divisor, or set {ACTOR}.use_dynamic_bsz=True"
        )
    if not layout.dynamic_batches and not layout.micro_batch:
        yield f"{ACTOR}.ppo_micro_batch_size_per_gpu is not set: set it, or {ACTOR}.use_dynamic_bsz=True"


def _parallel(layout: RunLayout, shape: ModelShape) -> Iterator[str]:
    size = layout.sequence_parallel
    if layout.trainer_gpus % size:
        yield f"{_SP}={size} does not divide {layout.trainer_gpus} GPUs that train: choose a divisor"
    if shape.num_heads % size:
        yield f"{_SP}={size} does not divide {shape.num_heads} attention heads: choose a divisor"
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        yield f"{_SP}={size} and {shape.num_kv_heads} KV heads: one has to divide the other"
    if 0 < layout.fsdp_size < layout.trainer_gpus and layout.trainer_gpus % layout.fsdp_size:
        yield (
            f"{FSDP}.fsdp_size={layout.fsdp_size} does not divide {layout.trainer_gpus} GPUs that train: "
            "choose a divisor, or -1 for all"
        )


def _engines(layout: RunLayout, shape: ModelShape) -> Iterator[str]:
    key, size = f"{ROLLOUT}.tensor_model_parallel_size", layout.generator.tensor_parallel
    if shape.num_heads % size:
        yield f"{key}={size} does not divide {shape.num_heads} attention heads: choose a divisor"
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        yield f"{key}={size} and {shape.num_kv_heads} KV heads: one has to divide the other"
    if layout.generator_gpus % layout.gpus_per_engine:
        yield (
            f"engines of {layout.gpus_per_engine} GPUs ({key} x {ROLLOUT}.data_parallel_size) do not divide "
            f"{layout.generator_gpus} GPUs that generate: choose a divisor"
        )
    if layout.separate and layout.generator_gpus < 1:
        yield (
            f"{TRAINER_MODE}={layout.mode} needs GPUs that generate: set {ROLLOUT}.nnodes and {ROLLOUT}.n_gpus_per_node"
        )
    if layout.generator.expert_parallel > 1 and layout.generator.expert_parallel != layout.gpus_per_engine:
        yield (
            f"{ROLLOUT}.expert_parallel_size={layout.generator.expert_parallel} has to be 1 or the GPUs of an engine, "
            f"{layout.gpus_per_engine}"
        )


def _lengths(layout: RunLayout, shape: ModelShape) -> Iterator[str]:
    longest = layout.max_prompt + layout.max_response
    parts = (
        f"data.max_prompt_length + data.max_response_length = {layout.max_prompt} + {layout.max_response} = {longest}"
    )
    if longest > layout.max_model_len:
        yield f"{parts} tokens exceed {ROLLOUT}.max_model_len={layout.max_model_len}: raise it, or lower the lengths"
    if shape.max_positions and layout.max_model_len > shape.max_positions:
        yield (
            f"{ROLLOUT}.max_model_len={layout.max_model_len} exceeds the {shape.max_positions} positions of the "
            "model: lower it"
        )
    room = layout.token_budget * layout.sequence_parallel
    if layout.dynamic_batches and longest > room:
        yield (
            f"{parts} tokens do not fit into one micro-batch: {ACTOR}.ppo_max_token_len_per_gpu={layout.token_budget} "
            f"x {_SP}={layout.sequence_parallel} = {room}; raise one of them"
        )
