# SPDX-License-Identifier: Apache-2.0
"""Faults that FP32 heads have had in trainers, each through verl's real engine: refused at start, or impossible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scalerl_verl.config.checks import find_problems
from tests.unit.composed import HEAD, HEAD_DTYPE, changed
from tests.unit.head.test_head_engines import save_models

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("head_faults")
    save_models(folder)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SCALERL_", "VERL_"))}
    environment |= {"VERL_PLATFORM": "cpu", "SCALERL_VERL_ACTIVE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.head_refusals", str(folder)],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_the_sound_engine_starts(found: dict[str, Any]) -> None:
    assert found["nothing wrong"] == "started"


@pytest.mark.parametrize("kind", ["fused", "logits"])
def test_fault_tied_embedding_changed_alone_and_a_cloned_head_stays_stale(found: dict[str, Any], kind: str) -> None:
    after = found[f"tied, {kind}"]
    assert after["moved"] > 0.1, "the weights before must not be uniform"
    # An embedding of zeros, which is the head: every token is equally likely at once.
    assert after["from_uniform"] < 1e-6
    assert not any("scalerl" in name for name in after["state"]), "the head keeps no tensor of its own"


@pytest.mark.parametrize(
    ("fault", "where"),
    [("lora on the head", "output layer"), ("saved modules", "output layer"), ("lora on the embedding", "embedding")],
)
def test_fault_lora_bypasses_the_fp32_path(found: dict[str, Any], fault: str, where: str) -> None:
    assert f"LoRA sits on the {where}" in found[fault]
    assert "leave lm_head and embed_tokens out of target_modules and modules_to_save" in found[fault]


@pytest.mark.fault("FP32 in the trainer or the generator only")
@pytest.mark.parametrize("side", [{HEAD: "fp32"}, {HEAD: "fp32_shared_pass"}, {HEAD_DTYPE: "float32"}])
def test_fault_fp32_on_one_side_only(side: dict[str, Any]) -> None:
    problems = find_problems(changed("", side))
    assert any("only" in problem and "+scalerl=fp32_head sets both sides" in problem for problem in problems)
    assert find_problems(changed("", {HEAD: "fp32", HEAD_DTYPE: "float32"})) == []


def test_fault_flag_that_silently_has_no_effect(found: dict[str, Any]) -> None:
    assert "impl_backend=fp32 has no effect on Qwen3ForCausalLM" in found["taken off"]
    assert "called its output layer 0 times in one forward, 1 is expected" in found["undone"]


@pytest.mark.parametrize("kind", ["bf16 logits", "bf16 logits, fused"])
def test_fault_head_is_fp32_in_name_only(found: dict[str, Any], kind: str) -> None:
    assert "log-probs of the output layer are off by 0.0" in found[kind]
    assert "(bfloat16 weights); FP32 stays within 0.001" in found[kind]


@pytest.mark.parametrize("kind", ["fused", "logits"])
def test_fault_cast_of_a_tied_head_makes_the_embedding_fp32_too(found: dict[str, Any], kind: str) -> None:
    after = found[f"tied, {kind}"]
    assert after["embedded"] == ["torch.bfloat16"], "the trunk computes in the model's dtype"
    assert after["stored"] == ["torch.float32"] and after["same_parameters"], "FSDP's master weights, untouched"
