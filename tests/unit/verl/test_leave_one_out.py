# SPDX-License-Identifier: Apache-2.0
"""The table of pieces left out of the recipe: what it says to add composes and leaves out that piece alone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from scalerl_verl.config.checks import find_problems
from tests.unit.composed import compose_config

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "adopt.md").read_text()
TABLE = PAGE.split("One piece left out of `recipe`")[1].split("\n## ")[0]
ROWS = {name: shlex.split(line) for name, line in re.findall(r"^\| (.+?) \| `(.+)` \|$", TABLE, re.MULTILINE)}
TELLTALES = {
    "the loss": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "the prompt average": "actor_rollout_ref.actor.loss_agg_mode",
    "batch normalisation": "algorithm.scalerl.adv_norm",
    "zero-variance filtering": "algorithm.scalerl.zero_variance",
    "no-positive-resampling": "data.sampler.class_path",
    "forced interruption": "actor_rollout_ref.rollout.agent.default_agent_loop",
    "the FP32 head": "actor_rollout_ref.model.fused_kernel_options.impl_backend",
    "the fast front end": "algorithm.scalerl.fast_frontend",
}


def test_every_piece_has_its_row() -> None:
    assert set(ROWS) == set(TELLTALES)


@pytest.mark.parametrize("name", TELLTALES)
def test_what_the_page_says_leaves_that_piece_out_and_no_other(name: str) -> None:
    recipe, config = compose_config("+scalerl=recipe"), compose_config("+scalerl=recipe", *ROWS[name])
    assert find_problems(config) == []
    changed = {
        piece for piece, path in TELLTALES.items() if OmegaConf.select(config, path) != OmegaConf.select(recipe, path)
    }
    assert changed == {name}
