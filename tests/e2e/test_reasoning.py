# SPDX-License-Identifier: Apache-2.0
"""smollm2-reasoning by its one command on the CPU: data, supervised phase, RL, report; a small random model stands in.

The pretrained model has 93 MB and a step of it takes a minute here; what differs is the tokenizer, in which the markers
are ordinary text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.quickstart import model as quickstart_model
from scalerl_verl.json_lines import read_records
from tests.paths import RECIPES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
pytest.importorskip("reasoning_gym")

# A character is a token here: the phrase alone has 84, a prompt up to 81.
OVERRIDES = (
    "data.max_prompt_length=192",
    "data.max_response_length=224",
    "actor_rollout_ref.rollout.max_model_len=416",
    "actor_rollout_ref.rollout.n=4",
)
STEPS = 2


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run; its data are in ``data``."""
    out = tmp_path_factory.mktemp("reasoning")
    tokenizer = quickstart_model.build_tokenizer()
    quickstart_model.build_model(tokenizer).save_pretrained(out / "pretrained")
    tokenizer.save_pretrained(out / "pretrained")
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "MODEL": str(out / "pretrained"),
        "PROBLEMS": "--families chain_sum simple_equations --train 32 --test 8 --demonstrations 64",
        "SUPERVISE": "--steps 12 --batch 8 --learning-rate 3e-3 --check 2",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    command = ["bash", str(RECIPES / "smollm2-reasoning" / "run.sh"), "--cpu", "--data", str(out / "data")]
    command += ["--out", str(out), "--steps", str(STEPS), "--", *OVERRIDES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return out


def test_supervised_phase_trains_and_measures_the_start(out: Path) -> None:
    start = json.loads((out / "data" / "start.json").read_text())
    assert start["loss"] < 3.5, "a random model has 4.6"
    assert set(start["start"]) <= {"all", "reasoning_gym/chain_sum", "reasoning_gym/simple_equations"}


def test_run_grades_both_families_and_counts_what_became_of_the_thinking(out: Path) -> None:
    records = read_records(out / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    for family in ("chain_sum", "simple_equations"):
        assert f"val-core/reasoning_gym/{family}/acc/mean@1" in records[-1]["data"]
    assert "scalerl/length/interrupted_fraction" in records[-1]["data"]


def test_run_is_reported(out: Path) -> None:
    assert json.loads((out / "summary.json").read_text())["steps"] == STEPS
    assert (out / "learning_curve.png").stat().st_size > 5000
