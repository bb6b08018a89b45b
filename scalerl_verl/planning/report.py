# SPDX-License-Identifier: Apache-2.0
"""A plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scalerl_verl.planning.layout import GIB
from scalerl_verl.planning.plan import Plan, Split, generation_resident
from scalerl_verl.planning.update import Update


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain data; memory in GiB a GPU."""
    layout = plan.layout
    return {
        "fits": not plan.problems,
        "problems": list(plan.problems),
        "model": {"parameters": plan.shape.num_params, "active_parameters": plan.shape.active_params},
        "gpus": {
            "cluster": plan.cluster_gpus,
            "memory_gib": plan.gpu_bytes / GIB,
            "device": plan.device,
            "train": layout.trainer_gpus,
            "generate": layout.generator_gpus,
            "shared": layout.shares_gpus,
        },
        "batch": {
            "responses_per_update": layout.sequences_per_update,
            "updates_per_batch": layout.updates_per_batch,
            "tokens_per_micro_batch_and_gpu": layout.trainer.tokens,
        },
        "trainer_gib": dict(_trainer_rows(plan)),
        "generator_gib": dict(_generator_rows(plan)),
        "host_gib": {"staged weights": round(plan.host_bytes / GIB, 2)},
        "cache": {
            "tokens_per_engine": plan.generator.cache_tokens,
            "longest_sequences": plan.generator.num_longest,
            "sequences_in_flight": plan.rates.sequences_per_engine,
        },
        "queue": {**asdict(plan.queueing), "wait_s": plan.queueing.wait_s} if plan.queueing else None,
        "update": _update_facts(plan.update),
        "notes": _notes(plan),
        "balance": {
            "assumptions": asdict(plan.assumptions),
            "trainer_share": plan.rates.trainer_share,
            "this_split": asdict(plan.split),
            "best_split": asdict(plan.best) if plan.best else None,
        },
    }


def _trainer_rows(plan: Plan) -> list[tuple[str, float]]:
    memory = plan.trainer
    moment = max(memory.moments, key=lambda name: memory.moments[name])
    rows = [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("unsharded gradients", memory.unsharded_gradients),
        ("transfer buffers", memory.transfer),
        ("gathered layers", memory.gathered),
        ("activations", memory.activations),
        ("head", memory.head),
        (f"at the {moment}", memory.moments[moment]),
        ("peak", memory.peak),
        ("reserve", plan.layout.generator.reserve_bytes),
    ]
    return [(name, round(value / GIB, 2)) for name, value in rows]


def _generator_rows(plan: Plan) -> list[tuple[str, float]]:
    memory = plan.generator
    rows = [
        ("weights", memory.weights),
        ("step of the greatest size", memory.profile),
        ("reserve", memory.reserve),
        ("KV cache", memory.cache),
        ("vLLM's share", memory.budget),
        ("staged weights beside it", memory.staged),
        ("transfer buffers beside it", memory.buffers),
    ]
    if plan.layout.shares_gpus:
        rows.append(("trainer beside it", generation_resident(plan.layout, plan.trainer)))
    return [(name, round(value / GIB, 2)) for name, value in rows]


def to_text(plan: Plan) -> str:
    """The plan as a table, GiB a GPU, with what stands in its way at the end."""
    layout, mean = plan.layout, plan.assumptions
    lines = [
        f"model       {_count(plan.shape.num_params)} parameters, {_count(plan.shape.active_params)} a token "
        f"({plan.shape.model_type})",
        f"GPUs        {_gpus(plan)}",
        f"batch       {layout.prompts_per_update} prompts x {layout.group_size} = {layout.sequences_per_update} "
        f"responses an update, {layout.updates_per_batch:g} update(s) a batch; {layout.max_prompt} + "
        f"{layout.max_response} tokens; {layout.trainer.tokens} a micro-batch and GPU",
        "",
        *_table("GiB on a GPU that trains", _trainer_rows(plan)),
        "",
        *_table("GiB on a GPU that generates", _generator_rows(plan)),
        f"cache       {plan.generator.cache_tokens:,} tokens an engine: {plan.generator.num_longest:.1f} sequences of "
        f"{layout.generator.max_model_len} tokens; {plan.rates.sequences_per_engine:.0f} in flight",
        *_host(plan),
        *_queue(plan),
        *_update(plan),
        "",
        f"balance     {100 * plan.rates.trainer_share:.0f}% of the work is training, if prompts have "
        f"{mean.mean_prompt:.0f} and responses {mean.mean_response:.0f} tokens on average, training reaches "
        f"{mean.training_efficiency:.0%} of the peak of {plan.device.upper()} and decoding "
        f"{mean.decode_efficiency:.0%} of its ideal",
        f"this split  {_times(plan.split, layout.separate)}",
    ]
    if plan.best:
        lines.append(f"best split  {_times(plan.best, True)}")
    lines += [f"note        {note}" for note in _notes(plan)]
    if plan.problems:
        lines += ["", "does not fit:", *(f"  {i}. {text}" for i, text in enumerate(plan.problems, 1))]
    else:
        lines += ["", "fits"]
    return "\n".join(lines)


def _notes(plan: Plan) -> list[str]:
    adapters = plan.layout.trainer.adapters
    of_adapters = (
        []
        if adapters is None
        else [
            f"{_count(adapters.num_params(plan.shape))} parameters of adapters train; an update sends the whole model, "
            "and the time to merge them into it is not counted"
        ]
    )
    return [*of_adapters, *(plan.queueing.notes() if plan.queueing else []), *plan.preset_notes]


def _queue(plan: Plan) -> list[str]:
    queue = plan.queueing
    if queue is None:
        return []
    return [
        f"queue       {queue.requests:,.0f} requests an engine for {queue.slots:,.0f} slots: the last waits "
        f"{queue.wait_s:,.0f} s, a response takes {queue.response_s:,.0f} s on average and {queue.longest_s:,.0f} s at "
        "most"
    ]


def _update_facts(update: Update | None) -> dict[str, float] | None:
    if update is None:
        return None
    times = {"blocked_s": update.blocked_s, "pause_s": update.pause_s, "swap_s": update.swap_s}
    return {"sent_gib": round(update.sent_bytes / GIB, 2), **{name: round(value, 4) for name, value in times.items()}}


def _update(plan: Plan) -> list[str]:
    update = plan.update
    if update is None:
        return []
    way = "within a host" if update.within_host else f"at {plan.assumptions.network_gbs:g} GB/s a network card"
    return [
        f"update      {update.sent_bytes / GIB:.2f} GiB to every generator {way}: "
        f"trainers wait {update.blocked_s:.2f} s, generators stand still for {update.pause_s:.3f} s"
    ]


def _host(plan: Plan) -> list[str]:
    if not plan.host_bytes:
        return []
    return [
        f"host        {plan.host_bytes / GIB:.2f} GiB of page-locked memory on a node that generates: weights wait "
        f"there, one copy for its {plan.layout.engines_per_node} engine(s)"
    ]


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 5e7 else f"{number / 1e6:.2f}M"


def _gpus(plan: Plan) -> str:
    layout = plan.layout
    size = f"{plan.gpu_bytes / GIB:g} GiB each"
    if layout.separate:
        return f"{layout.trainer_gpus} train + {layout.generator_gpus} generate, of {plan.cluster_gpus}; {size}"
    return f"{layout.trainer_gpus} train and generate by turns, of {plan.cluster_gpus}; {size}"


def _table(title: str, rows: list[tuple[str, float]]) -> list[str]:
    width = max(len(title), *(len(name) for name, _ in rows))
    return [title, *(f"  {name:<{width}} {value:>8.2f}" for name, value in rows if value)]


def _times(split: Split, separate: bool) -> str:
    if separate:
        waits = "generators" if split.training_s > split.generation_s else "trainers"
        return (
            f"{split.trainers} train ({split.training_s:.3g} s an update), {split.generators} generate "
            f"({split.generation_s:.3g} s): {waits} wait"
        )
    return (
        f"{split.trainers} GPUs: {split.generation_s:.3g} s of generation and {split.training_s:.3g} s of training an "
        "update"
    )
