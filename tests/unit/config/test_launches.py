# SPDX-License-Identifier: Apache-2.0
"""Kinds of launch as verl's example scripts have them, with our presets: accepted, or refused with all keys at once."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from benchmarks.reference.launches import PRESETS, Edits, Launch, read_launches
from scalerl_verl.config.checks import find_problems
from tests.unit.composed import compose_config

pytestmark = pytest.mark.usefixtures("clean_environment")

LAUNCHES = {launch.name: launch for launch in read_launches()}
CASES = [(name, preset) for name in LAUNCHES for preset in PRESETS]
ENGINE = "model_engine"
"""Chooses files, so Hydra has to compose anew; every other line replaces a value after the presets have said theirs."""


def config_of(launch: Launch, preset: str, edits: Edits = Edits()) -> DictConfig:
    """The launch line composed. `test_lines_compose_with_hydra` sees that it is what Hydra makes of it."""
    lines = launch.lines(edits)
    engine = [lines.pop(ENGINE)] if ENGINE in lines else []
    config = compose_config(f"+scalerl={PRESETS[preset]}", *engine)
    with open_dict(config):
        for key, line in lines.items():
            override = OverridesParser.create().parse_override(line)
            if override.is_delete():
                section, _, leaf = key.rpartition(".")
                del OmegaConf.select(config, section)[leaf]
            else:
                OmegaConf.update(config, key, override.value(), force_add=True)
    return config


@pytest.mark.parametrize("name", LAUNCHES)
def test_lines_compose_with_hydra(name: str) -> None:
    launch = LAUNCHES[name]
    for edits in (Edits(), launch.edits("recipe")):
        assert compose_config(*launch.overrides("recipe", edits)) == config_of(launch, "recipe", edits)


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_launch_is_accepted_or_every_edit_it_needs_is_named_at_once(name: str, preset: str) -> None:
    launch = LAUNCHES[name]
    edits, problems = launch.edits(preset), find_problems(config_of(launch, preset))
    needed = [*edits.keys, *launch.refused.get(preset, ())]
    assert bool(problems) is bool(needed), problems
    assert [key for key in needed if not any(key in text for text in problems)] == []
    if preset not in launch.refused and needed:
        assert find_problems(config_of(launch, preset, edits)) == []


def test_names_alone_are_enough_for_the_loss_and_the_average_where_a_script_sets_no_other_loss() -> None:
    """The aim of presets: one line more, none changed."""
    for name, launch in LAUNCHES.items():
        own = {"loss_mode", "rollout_is"} & {key.rpartition(".")[2] for key in launch.settings}
        for preset in ("prompt_mean",) if own else ("cispo", "prompt_mean"):
            edits = launch.edits(preset)
            assert not (edits.drop or edits.set), (name, preset)
