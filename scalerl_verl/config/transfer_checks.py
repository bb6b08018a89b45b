# SPDX-License-Identifier: Apache-2.0
"""Whether the buckets of a weight update hold the model's weights: verl asserts it a minute after the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import MODEL, select
from scalerl_verl.pipeline.transfer import bucket_problem, largest_sent, read_transfer
from scalerl_verl.shapes import find_config, from_config


def find_model_problems(config: DictConfig) -> Iterator[str]:
    """A bucket that is smaller than the largest weight of the model, where one has to hold it."""
    content = _model_config(config)
    largest = None if content is None else _largest(content)
    problem = None if largest is None else bucket_problem(read_transfer(config), largest)
    if problem is not None:
        yield problem


def shared_memory_bytes(config: DictConfig) -> float:
    """What a weight update takes of /dev/shm on a CPU: one bucket, of which no more is touched than the model has."""
    transfer, content = read_transfer(config), _model_config(config)
    if not transfer.needs_room:
        return 0.0
    try:
        shape = from_config(content or {}, "")
    except ScaleRLConfigError:  # an architecture that is not counted
        return transfer.bucket_bytes
    return min(transfer.bucket_bytes, float(shape.num_params * transfer.sent_bytes))


def _model_config(config: DictConfig) -> Mapping[str, Any] | None:
    """The content of the model's config.json; None if it is not here, or broken (`machine_checks` says so)."""
    path = str(select(config, f"{MODEL}.hf_config_path", select(config, f"{MODEL}.path", "")))
    try:
        return find_config(path) if path else None
    except ScaleRLConfigError:
        return None


def _largest(content: Mapping[str, Any]) -> int | None:
    """Number of elements of the largest weight; for an architecture that is not counted, of its embedding."""
    try:
        return largest_sent(from_config(content, ""))
    except ScaleRLConfigError:
        text = content.get("text_config")
        text = text if isinstance(text, Mapping) else content
        vocab, hidden = text.get("vocab_size"), text.get("hidden_size")
        return vocab * hidden if isinstance(vocab, int) and isinstance(hidden, int) else None
