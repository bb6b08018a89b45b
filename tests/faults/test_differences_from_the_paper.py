# SPDX-License-Identifier: Apache-2.0
"""Where the presets differ from the paper, a page says so: each row of its table is checked against what runs."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from recipes.ablation import spec
from scalerl_verl.interruption.budgets import Budgets, InterruptionSettings
from scalerl_verl.interruption.markers import ThinkingScript
from scalerl_verl.interruption.response import NATURAL, InterruptedResponse
from scalerl_verl.planning.resolve import compose_run
from scalerl_verl.scaling.arguments import add_commands
from tests.paths import RECIPES

REPO = RECIPES.parent
HEADING = "## Where we differ from the paper"


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """First cell -> other cells of the table."""
    text = (REPO / "docs" / "pieces.md").read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0]
    lines = [line for line in text.split("\n") if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line[1:-1].split("|")] for line in lines[1:])}


def test_response_that_closes_its_thinking_itself_may_answer_beyond_the_answer_budget(rows: dict) -> None:
    assert "binds interrupted responses" in rows["tokens of the answer"][1]
    settings = InterruptionSettings(start_marker=None, end_marker="e", phrase="stop e")
    script = ThinkingScript(settings, lambda text: [ord(letter) for letter in text], lambda ids: "".join(map(chr, ids)))
    response = InterruptedResponse(script, Budgets(low=10, high=10, answer=3, grace=0, total=40), 10, thinks=True)
    response.add([ord("e")] * 10, None, stopped=False)
    assert response.record().outcome == NATURAL
    assert response.next_limit() == 30


def test_truncated_responses_stay_in_the_recipe(rows: dict) -> None:
    config = compose_run(["+scalerl=recipe"])
    assert "reward_shaping" not in config.algorithm.scalerl
    (override,) = re.findall(r"`'(.*?)'`", rows["truncated responses"][2])
    assert "exclude_truncated" in compose_run(["+scalerl=recipe", override]).algorithm.scalerl.reward_shaping


def test_loss_left_out_is_verls_own_clip(rows: dict) -> None:
    runs = {run.name: run for run in spec.read_sweep(RECIPES / "ablation" / "sweep.yaml")}

    def clip_of(name: str) -> tuple[float, ...]:
        command = runs[f"{name}/seed0"].command(Path("out"))
        overrides = [text for text in command[command.index("--") + 1 :] if not text.startswith("~")]
        actor = compose_run(["+scalerl=recipe", *overrides]).actor_rollout_ref.actor
        assert actor.policy_loss.loss_mode == "vanilla"
        return actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c

    assert clip_of("leave_one_out/loss") == (0.2, 0.2, 3.0)
    assert clip_of("dapo_clip/high_0.26") == (0.2, 0.26, 1e9)
    (cells,) = [cells for name, cells in rows.items() if name.startswith("ablation of the loss")]
    assert ".2/.26" in cells[0] and ".2/.2, and a dual clip at 3" in cells[1] and "dapo_clip/high_0.26" in cells[2]


def test_warm_up_of_eight_steps_a_batch(rows: dict) -> None:
    config = compose_run(["+scalerl=ppo_off_policy"])
    batches, steps = config.actor_rollout_ref.actor.optim.lr_warmup_steps, config.trainer.v1.ppo_off_policy.num_updates
    told = rows["warm-up of `ppo_off_policy`"][1]
    assert told == f"{batches} batches of {steps}, which are {batches * steps}"
    assert compose_run(["+scalerl=recipe"]).actor_rollout_ref.actor.optim.lr_warmup_steps == 100


def test_optimizer_is_what_the_page_says() -> None:
    optim = compose_run(["+scalerl=recipe"]).actor_rollout_ref.actor.optim
    assert list(optim.betas) == [0.9, 0.999] and optim.clip_grad == 1.0
    text = (REPO / "docs" / "pieces.md").read_text(encoding="utf-8")
    assert "betas of .9 and .999, and gradients are clipped at 1" in text


def test_fit_takes_every_point_by_default(rows: dict) -> None:
    assert "all points" in rows["fit of a curve"][1]
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    given = parser.parse_args(["fit", "run"])
    assert (given.method, given.warm_up) == ("profile", 0.0)


@pytest.mark.parametrize("page", ["docs/baselines.md", "recipes/ablation/README.md", "docs/evidence.md"])
def test_pages_on_comparisons_lead_to_the_table(page: str) -> None:
    assert "pieces.md#where-we-differ-from-the-paper" in (REPO / page).read_text(encoding="utf-8")
