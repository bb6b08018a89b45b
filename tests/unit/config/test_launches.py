# SPDX-License-Identifier: Apache-2.0
"""Kinds of launch as verl's example scripts have them, with our presets: accepted, or refused with all keys at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig

from benchmarks.reference.launches import PRESETS, Edits, Launch, read_launches
from scalerl_verl.config import model_checks
from scalerl_verl.config.checks import find_problems
from tests.unit.composed import compose_config, with_overrides

pytestmark = pytest.mark.usefixtures("clean_environment")

LAUNCHES = {launch.name: launch for launch in read_launches()}
CASES = [(name, preset) for name in LAUNCHES for preset in PRESETS]
ENGINE = "model_engine"
"""Chooses files, so Hydra has to compose anew; every other line replaces a value after the presets have said theirs."""


def config_of(launch: Launch, preset: str, edits: Edits = Edits()) -> DictConfig:
    """The launch line composed. `test_lines_compose_with_hydra` sees that it is what Hydra makes of it."""
    lines = launch.lines(edits)
    engine = [lines.pop(ENGINE)] if ENGINE in lines else []
    return with_overrides(compose_config(f"+scalerl={PRESETS[preset]}", *engine), lines.values())


@pytest.mark.parametrize("name", LAUNCHES)
def test_lines_compose_with_hydra(name: str) -> None:
    launch = LAUNCHES[name]
    for edits in (Edits(), launch.edits("recipe")):
        assert compose_config(*launch.overrides("recipe", edits)) == config_of(launch, "recipe", edits)


def problems_of(config: DictConfig, launch: Launch, folder: Path) -> list[str]:
    """What the start-up checks say, with the model's config.json where the launch is about its model."""
    if not launch.model:
        return find_problems(config)
    (folder / "config.json").write_text(json.dumps(launch.model))
    with_overrides(config, [f"actor_rollout_ref.model.hf_config_path={folder}"])
    return find_problems(config, also=lambda readable: list(model_checks.find_model_problems(readable)))


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_launch_is_accepted_or_every_edit_it_needs_is_named_at_once(name: str, preset: str, tmp_path: Path) -> None:
    launch = LAUNCHES[name]
    edits, problems = launch.edits(preset), problems_of(config_of(launch, preset), launch, tmp_path)
    needed = [*edits.keys, *launch.refused.get(preset, ())]
    assert bool(problems) is bool(needed), problems
    assert [key for key in needed if not any(key in text for text in problems)] == []
    if preset not in launch.refused and needed:
        assert problems_of(config_of(launch, preset, edits), launch, tmp_path) == []


def test_names_alone_are_enough_for_the_loss_and_the_average_where_a_script_sets_no_other_loss() -> None:
    """The aim of presets: one line more, none changed."""
    for name, launch in LAUNCHES.items():
        own = {"loss_mode", "rollout_is"} & {key.rpartition(".")[2] for key in launch.settings}
        for preset in ("prompt_mean",) if own else ("cispo", "prompt_mean"):
            edits = launch.edits(preset)
            assert not (edits.drop or edits.set), (name, preset)
