# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) of a run: which matrices have one, and how many numbers train."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import MODEL, PIPELINE_RL, select
from scalerl_verl.shapes import ModelShape

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices of a layer, as transformers names them. PEFT's ``all-linear`` adapts these, and not the output layer."""


@dataclass(frozen=True)
class Adapters:
    """Two matrices beside each adapted one, [rank, in] and [out, rank]. These train; the rest is frozen.

    Args:
        rank: of each adapter.
        targets: of `PROJECTIONS`.
    """

    rank: int
    targets: frozenset[str] = frozenset(PROJECTIONS)

    def layer_params(self, shape: ModelShape) -> int:
        """Numbers that train in one dense layer."""
        hidden, attention, feed_forward = shape.hidden, ("q_proj", "k_proj", "v_proj", "o_proj"), shape.intermediate
        inner = dict(zip(attention, (shape.q_size, shape.kv_size, shape.kv_size, shape.q_size), strict=True))
        return self.rank * sum(hidden + inner.get(name, feed_forward) for name in self.targets)

    def num_params(self, shape: ModelShape) -> int:
        """Numbers that train in the whole model."""
        return shape.num_layers * self.layer_params(shape)


def read_adapters(config: DictConfig, shape: ModelShape, mode: str) -> Adapters | None:
    """The adapters of a composed config; None where the whole model trains.

    Args:
        config: verl's.
        shape: of its model.
        mode: of its trainer.

    Raises:
        ScaleRLConfigError: adapters whose memory is not counted here.
    """
    rank = int(select(config, f"{MODEL}.lora_rank", 0))
    loaded = select(config, f"{MODEL}.lora_adapter_path")
    if rank <= 0 and loaded is None:
        return None
    problems = []
    if mode != PIPELINE_RL or select(config, f"{MODEL}.lora.merge", False) is not True:
        problems.append(
            f"{MODEL}.lora_rank={rank}: plan counts adapters that are merged before they are sent in pipeline_rl "
            "(verl's other modes hold adapters in vLLM, or send weights in bf16 whatever the generator's dtype is); "
            f"take the preset pipeline with {MODEL}.lora.merge=True, or leave lora_rank out, which shows what training "
            "the whole model takes"
        )
    if loaded is not None:
        problems.append(
            f"{MODEL}.lora_adapter_path={loaded}: its own file says which matrices it adapts, which plan does not "
            f"read; set {MODEL}.lora_rank and target_modules to what it has, without the path"
        )
    if shape.num_mixture_layers:
        problems.append(
            f"{MODEL}.lora_rank={rank}: plan counts adapters of dense models only, since transformers keeps the "
            "experts of a mixture in one parameter, which all-linear does not reach; leave lora_rank out"
        )
    if select(config, f"{MODEL}.target_parameters"):
        problems.append(
            f"{MODEL}.target_parameters: plan counts adapters of matrices only; name them in {MODEL}.target_modules"
        )
    targets = _names(config, "target_modules", "all-linear", problems)
    excluded = _names(config, "exclude_modules", None, problems)
    if not problems and not targets - excluded:
        problems.append(f"{MODEL}.exclude_modules leaves no matrix of {MODEL}.target_modules to adapt")
    if problems:
        raise ScaleRLConfigError(problems)
    return Adapters(rank, frozenset(targets - excluded))


def _names(config: DictConfig, key: str, default: Any, problems: list[str]) -> frozenset[str]:
    """Of `PROJECTIONS`, those that a list names."""
    given = select(config, f"{MODEL}.{key}", default)
    if given is None:
        return frozenset()
    if given == "all-linear":
        return frozenset(PROJECTIONS)
    found: Collection[str] = list(given) if isinstance(given, list | ListConfig) else [str(given)]
    if not isinstance(given, list | ListConfig) or not set(found) <= set(PROJECTIONS):
        problems.append(
            f"{MODEL}.{key}={given}: plan counts all-linear, or a list of {', '.join(PROJECTIONS)}; name the "
            "matrices so"
        )
    return frozenset(found)
