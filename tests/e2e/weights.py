# SPDX-License-Identifier: Apache-2.0
"""Compare what the trainer sent with what the engine holds, parameter by parameter."""

from __future__ import annotations

from pathlib import Path

import torch

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def expected_in_engine(sent: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The trainer's tensor(s) behind a parameter of vLLM, which fuses projections (dimension 0) and stacks experts."""
    experts, _, kind = name.rpartition(".")
    if kind in _OF_EXPERTS:
        experts = experts.removesuffix(".routed_experts")
        count = len({sent_name.split(".experts.")[1].split(".")[0] for sent_name in sent if ".experts." in sent_name})
        parts = [[sent[f"{experts}.{i}.{part}.weight"] for part in _OF_EXPERTS[kind]] for i in range(count)]
        return torch.stack([torch.cat(weights) for weights in parts])
    for fused, parts in _FUSED.items():
        if f".{fused}." in name:
            return torch.cat([sent[name.replace(fused, part)] for part in parts])
    return sent[name]


def compare_updates(folder: Path) -> int:
    """Assert exact equality after every recorded update; returns how many were compared.

    vLLM pads its vocabulary: rows past the trainer's must not matter and are left out.
    """
    held_files = sorted(folder.glob("held-*.pt"), key=lambda path: int(path.stem.split("-")[1]))
    for path in held_files:
        number = path.stem.split("-")[1]
        sent, held = (torch.load(name, map_location="cpu") for name in (folder / f"sent-{number}.pt", path))
        assert held, f"the engine reported no parameter after update {number}"
        for name, tensor in held.items():
            # A GPU engine holds bf16, into which the trainer's FP32 weights are rounded on loading.
            wanted = expected_in_engine(sent, name).to(tensor.dtype)
            assert torch.equal(tensor[: wanted.shape[0]], wanted), f"{name} differs after update {number}"
    return len(held_files)
