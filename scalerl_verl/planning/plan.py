# SPDX-License-Identifier: Apache-2.0
"""A plan: what a run takes of each GPU of a cluster, what stands in its way, and the split that balances it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scalerl_verl.names import ACTOR, BUCKET, FSDP, FUSED_KERNELS, MODEL, PIPELINE_RL, ROLLOUT, STAGING
from scalerl_verl.planning import checks
from scalerl_verl.planning.balance import DEVICES, Assumptions, Rates, decode_step_s, find_rates
from scalerl_verl.planning.generator import GeneratorMemory, generator_memory
from scalerl_verl.planning.layout import GIB, RunLayout, num_shards
from scalerl_verl.planning.queueing import Queueing, find_queueing
from scalerl_verl.planning.trainer import TrainerMemory, trainer_memory
from scalerl_verl.planning.update import Update, find_update
from scalerl_verl.shapes import ModelShape

_SP = f"{FSDP}.ulysses_sequence_parallel_size"


@dataclass(frozen=True)
class Split:
    """GPUs of each side and the seconds that each takes for one optimizer step."""

    trainers: int
    generators: int
    training_s: float
    generation_s: float

    @property
    def step_s(self) -> float:
        """Seconds between two optimizer steps when neither side waits for anything else."""
        return max(self.training_s, self.generation_s)


@dataclass(frozen=True)
class Plan:
    """Everything that `scalerl plan` prints."""

    shape: ModelShape
    layout: RunLayout
    cluster_gpus: int
    device: str
    assumptions: Assumptions
    trainer: TrainerMemory
    generator: GeneratorMemory
    rates: Rates
    split: Split
    best: Split | None
    queueing: Queueing | None
    update: Update | None
    problems: tuple[str, ...]
    preset_notes: tuple[str, ...] = ()
    """Where the run is not what its presets say."""

    @property
    def host_bytes(self) -> float:
        """Page-locked memory of a node that generates, in which weights wait."""
        return self.generator.host

    @property
    def gpu_bytes(self) -> float:
        """Memory of a GPU."""
        return self.layout.generator.gpu_bytes


def with_gpus(layout: RunLayout, trainers: int, generators: int) -> RunLayout:
    """The same run on other numbers of GPUs."""
    setup = replace(layout.trainer, num_shards=num_shards(trainers, layout.fsdp_size))
    return replace(layout, trainer_gpus=trainers, generator_gpus=generators, trainer=setup)


def make_plan(
    shape: ModelShape,
    layout: RunLayout,
    cluster_gpus: int,
    device: str,
    assumptions: Assumptions,
    node_bytes: float | None = None,
) -> Plan:
    """Estimate, check and balance a run.

    Args:
        shape: of its model.
        layout: of the run.
        cluster_gpus: GPUs there are.
        device: a key of `DEVICES`.
        assumptions: what shapes do not say.
        node_bytes: memory of a node's host; None: not known.
    """
    trainer, generator = trainer_memory(shape, layout.trainer), generator_memory(shape, layout.generator)
    rates = _rates(shape, layout, generator, device, assumptions)
    problems = [
        *checks.find_problems(layout, shape),
        *_cluster(layout, cluster_gpus),
        *_trainer_fit(shape, layout, trainer),
        *_generator_fit(layout, generator),
        *_host_fit(generator, node_bytes),
        *_shared_fit(layout, trainer, generator),
    ]
    return Plan(
        shape=shape,
        layout=layout,
        cluster_gpus=cluster_gpus,
        device=device,
        assumptions=assumptions,
        trainer=trainer,
        generator=generator,
        rates=rates,
        split=_split(layout, rates),
        best=best_split(shape, layout, cluster_gpus, generator, device, assumptions) if layout.separate else None,
        queueing=_queueing(shape, layout, generator, device, assumptions),
        update=find_update(shape, layout, assumptions.network_gbs * 1e9),
        problems=tuple(problems),
    )


def best_split(
    shape: ModelShape,
    layout: RunLayout,
    gpus: int,
    generator: GeneratorMemory,
    device: str,
    assumptions: Assumptions,
) -> Split | None:
    """The split of `gpus` with the shortest step among those that divide and fit; the fewest trainers of equal ones."""
    found: list[Split] = []
    for trainers in range(layout.sequence_parallel, gpus, layout.sequence_parallel):
        generators = (gpus - trainers) // layout.gpus_per_engine * layout.gpus_per_engine
        tried = with_gpus(layout, trainers, generators)
        if generators < 1 or checks.find_problems(tried, shape):
            continue
        if any(_trainer_fit(shape, tried, trainer_memory(shape, tried.trainer), suggest=False)):
            continue
        found.append(_split(tried, _rates(shape, tried, generator, device, assumptions)))
    return min(found, key=lambda split: (split.step_s, split.trainers), default=None)


def _split(layout: RunLayout, rates: Rates) -> Split:
    training_s, generation_s = rates.step_s(layout.trainer_gpus, max(layout.generator_gpus, 1))
    return Split(layout.trainer_gpus, layout.generator_gpus, training_s, generation_s)


def _rates(
    shape: ModelShape, layout: RunLayout, generator: GeneratorMemory, device: str, assumptions: Assumptions
) -> Rates:
    """Rates at the concurrency that cache, engine settings and staleness bound allow."""
    engines = max(layout.generator_gpus // layout.gpus_per_engine, 1)
    # pipeline_rl keeps k batches in flight beside the one being filled; other modes one generated batch.
    in_flight = layout.sequences_per_update * (layout.max_staleness + 1)
    if layout.mode != PIPELINE_RL:
        in_flight = layout.prompts * layout.group_size
    forwards = 1 + layout.trainer.checkpointing + (not layout.keeps_old_log_probs)
    return find_rates(
        shape,
        DEVICES[device],
        assumptions,
        sequences=layout.sequences_per_update,
        num_forwards=forwards,
        sequences_per_engine=max(min(in_flight / engines, _slots(layout, generator, assumptions)), 1.0),
        gpus_per_engine=layout.gpus_per_engine,
        adapter_params=layout.trainer.adapters.num_params(shape) if layout.trainer.adapters else 0,
    )


def _slots(layout: RunLayout, generator: GeneratorMemory, assumptions: Assumptions) -> float:
    """Sequences that cache and settings of an engine let it generate at once, 1 at least."""
    held = generator.cache_tokens / (assumptions.mean_prompt + assumptions.mean_response / 2)
    return max(min(held, layout.generator.max_num_seqs) * layout.data_parallel, 1.0)


def _queueing(
    shape: ModelShape, layout: RunLayout, generator: GeneratorMemory, device: str, assumptions: Assumptions
) -> Queueing | None:
    slots = _slots(layout, generator, assumptions)
    step_s = decode_step_s(shape, DEVICES[device], slots, layout.gpus_per_engine, assumptions)
    return find_queueing(layout, slots, step_s, assumptions.mean_response)


def _cluster(layout: RunLayout, gpus: int) -> Iterator[str]:
    wanted = layout.trainer_gpus + (layout.generator_gpus if layout.separate else 0)
    if wanted > gpus:
        each = f" ({layout.trainer_gpus} train, {layout.generator_gpus} generate)" if layout.separate else ""
        yield f"the run takes {wanted} GPUs{each}, the cluster has {gpus}: use a smaller split, or more GPUs"


def _trainer_fit(shape: ModelShape, layout: RunLayout, memory: TrainerMemory, suggest: bool = True) -> Iterator[str]:
    limit = layout.generator.gpu_bytes - layout.generator.reserve_bytes
    if memory.peak <= limit:
        return
    moment = max(memory.moments, key=lambda name: memory.moments[name])
    changes = []
    if suggest:
        more = _fewest_trainers(shape, layout, limit)
        if more:
            changes.append(f"train on {more} GPUs or more")
        if moment in ("head", "layer") and layout.trainer.tokens > 1024:
            changes.append(f"lower {ACTOR}.ppo_max_token_len_per_gpu and raise {_SP}")
        if moment == "head" and not layout.trainer.fused_head:
            changes.append(f"set {FUSED_KERNELS}=True")
        if not layout.trainer.checkpointing:
            changes.append(f"set {MODEL}.enable_gradient_checkpointing=True")
        if layout.trainer.defer_sync:
            changes.append(f"set {FSDP}.use_no_sync_for_gradient_accumulation=False")
    yield (
        f"a GPU that trains needs {memory.peak / GIB:.1f} GiB at its peak ({moment}), of which "
        f"{(memory.resident + memory.gradients) / GIB:.1f} are weights, gradients and optimizer over "
        f"{layout.trainer.num_shards} shards; {limit / GIB:.1f} are there: {', or '.join(changes) or 'it does not fit'}"
    )


def _fewest_trainers(shape: ModelShape, layout: RunLayout, limit: float) -> int | None:
    """The fewest GPUs, up to 16 times as many, on which training fits and its batch divides."""
    if layout.fsdp_size > 0:
        return None
    for trainers in range(layout.trainer_gpus + 1, 16 * layout.trainer_gpus + 1):
        tried = with_gpus(layout, trainers, layout.generator_gpus)
        if trainers % layout.sequence_parallel or layout.sequences_per_update % (trainers // layout.sequence_parallel):
            continue
        if trainer_memory(shape, tried.trainer).peak <= limit:
            return trainers
    return None


def _generator_fit(layout: RunLayout, memory: GeneratorMemory) -> Iterator[str]:
    setup = layout.generator
    if memory.num_blocks < memory.blocks_per_sequence:
        yield (
            f"vLLM's share of a GPU, {ROLLOUT}.gpu_memory_utilization={setup.utilization} = {memory.budget / GIB:.1f} "
            f"GiB, cannot hold a single sequence of {setup.max_model_len} tokens: weights {memory.weights / GIB:.1f}, "
            f"a step {memory.profile / GIB:.1f}, reserve {memory.reserve / GIB:.1f} and its cache take "
            f"{memory.least / GIB:.1f} GiB; raise the share to {memory.least / setup.gpu_bytes:.2f} (if below 1), or "
            f"raise {ROLLOUT}.tensor_model_parallel_size, or lower {ROLLOUT}.max_model_len or .max_num_seqs"
        )
    if memory.outside and memory.peak > setup.gpu_bytes:
        staged = f" (the whole model on every GPU, {memory.staged / GIB:.1f}, and buffers)" if memory.staged else ""
        yield (
            f"a weight update needs {memory.outside / GIB:.1f} GiB{staged} beside vLLM's {memory.budget / GIB:.1f} GiB "
            f"on a GPU of {setup.gpu_bytes / GIB:.0f} GiB: {', or '.join(_room_for_update(layout, memory))}"
        )


def _room_for_update(layout: RunLayout, memory: GeneratorMemory) -> Iterator[str]:
    """What makes room for a weight update beside vLLM."""
    setup, tensor = layout.generator, layout.generator.tensor_parallel
    left = setup.gpu_bytes - memory.outside
    if left >= memory.least:
        yield f"lower {ROLLOUT}.gpu_memory_utilization to {left / setup.gpu_bytes - 0.005:.2f}"
    else:
        yield (
            f"raise {ROLLOUT}.tensor_model_parallel_size above {tensor}, so that vLLM does with less than the "
            f"{memory.least / GIB:.1f} GiB that one sequence and its part of the weights take, and lower "
            f"{ROLLOUT}.gpu_memory_utilization"
        )
    if memory.staged:
        yield f"set {STAGING}=host"
    if memory.peak - setup.gpu_bytes < memory.buffers:
        yield f"lower {BUCKET}"


def _host_fit(memory: GeneratorMemory, node_bytes: float | None) -> Iterator[str]:
    """The staged copy in page-locked memory, one a node."""
    if node_bytes is not None and memory.host > node_bytes:
        yield (
            f"weights staged in host memory take {memory.host / GIB:.1f} GiB of a node's {node_bytes / GIB:.0f}, one "
            f"copy for all its engines: set {STAGING}=none"
        )


def generation_resident(layout: RunLayout, memory: TrainerMemory) -> float:
    """Bytes of the trainer that stay on its GPU while vLLM generates there."""
    weights = 0.0 if layout.offloads_weights else memory.weights
    return weights + memory.transfer + (0.0 if layout.offloads_optimizer else memory.optimizer)


def _shared_fit(layout: RunLayout, trainer: TrainerMemory, generator: GeneratorMemory) -> Iterator[str]:
    """Where vLLM generates on GPUs that train, it wakes up beside what the trainer leaves there."""
    if not layout.shares_gpus:
        return
    stays, setup = generation_resident(layout, trainer), layout.generator
    free = setup.gpu_bytes - setup.reserve_bytes - stays
    if generator.budget > free:
        yield (
            f"while it generates, a GPU holds {stays / GIB:.1f} GiB of the trainer and vLLM's share of "
            f"{generator.budget / GIB:.1f} GiB, of {setup.gpu_bytes / GIB:.0f}: lower {ROLLOUT}.gpu_memory_utilization "
            f"to {max(free / setup.gpu_bytes - 0.005, 0):.2f}, or set {FSDP}.param_offload=True and "
            ".optimizer_offload=True"
        )
