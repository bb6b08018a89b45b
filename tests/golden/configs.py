# SPDX-License-Identifier: Apache-2.0
"""Every preset, combination of presets, recipe and run of an ablation as verl composes it; what our start-up says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.ablation.spec import read_sweep
from recipes.launch.command import build_command, parse_arguments
from recipes.launch.folder import Paths
from tests.golden import normalise
from tests.paths import RECIPES, REPO

OUT = Path("/out")
_PIECES = "setup,cispo,prompt_mean,advantage,fp32_head"
COMBINATIONS = (
    *("cispo,advantage", "cispo,fp32_head", "grpo,fp32_head", "grpo,tiny", "recipe,pipeline", "ppo_off_policy,cpu"),
    *("recipe,cpu", "recipe,pipeline,cpu", "scalerl,cpu", _PIECES, f"{_PIECES},cpu", f"{_PIECES},pipeline,cpu"),
)
"""Of presets, in documents, recipes, benchmarks and tests."""
Config = dict[str, Any]
"""Config path -> value, interpolations as written."""


def record(folder: Path) -> dict[str, dict[str, str]]:
    """Name -> config path, or line of the start-up -> value; ``folder`` takes a model and data."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when its library is imported: what the hub has is no matter of ours
    from tests.e2e.launching import CPU_ENVIRONMENT, make_assets, tiny_overrides

    os.environ.update(CPU_ENVIRONMENT)
    found = {}
    for name, line in _lines(tiny_overrides(make_assets(folder), folder)):
        config, start = (json.dumps(part).replace(str(folder), "<run>") for part in _compose(line))
        found[name] = json.loads(config.replace(str(REPO), "<repo>"))
        found[f"{name}, at start"] = json.loads(normalise(start))
    return found


def _lines(tiny: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Name -> what Hydra gets."""
    alone = sorted(path.stem for path in REPO.glob("scalerl_verl/**/configs/scalerl/*.yaml"))
    for name in (*alone, *COMBINATIONS):
        yield f"preset {name}", [f"+scalerl=[{name}]"]
    for name in alone:
        yield f"run of {name}", [f"+scalerl=[{name},cpu]", *tiny]
    for file in sorted(file for recipe in RECIPES.glob("*/config.yaml") for file in recipe.parent.glob("*.yaml")):
        yield f"recipe {file.parent.name}/{file.stem}", _launch_line([str(file.parent), "--config", file.stem])
    for sweep in sorted((RECIPES / "ablation").glob("*.yaml")):
        for run in read_sweep(sweep):
            if run.seed == 0:
                yield f"{sweep.stem} {run.name}", _launch_line(run.command(OUT)[2:])


def _launch_line(options: list[str]) -> list[str]:
    """What the recipes' launcher gives to Hydra."""
    command = build_command(parse_arguments([options[0], "--data", "/data", *options[1:]]), Paths(OUT))
    return [f"hydra.searchpath=['file://{command[4]}']", *command[5:]]


def _compose(line: list[str]) -> tuple[Config, Config]:
    """The config as composed; and what verl's own check, which ours wraps, says, raises and changes in it."""
    import verl  # noqa: F401 - loads the plugin
    from hydra import compose, initialize_config_module
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict
    from verl.utils import config as checks

    said = io.StringIO()
    with initialize_config_module("verl.trainer.config", version_base=None), contextlib.redirect_stderr(said):
        config = compose("ppo_trainer", overrides=line, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config["hydra"]
        before = dict(_leaves(OmegaConf.to_container(config)))
        try:
            checks.validate_config(config, use_reference_policy=False, use_critic=False)
        except (ValueError, RuntimeError, AssertionError, SystemExit) as error:
            print(f"{type(error).__name__}: {error}", file=said)
    lines = {re.sub(r"^ *\d+\. ", "", text): "said" for text in said.getvalue().splitlines()}
    after = dict(_leaves(OmegaConf.to_container(config)))
    return before, lines | {key: value for key, value in after.items() if before.get(key) != value}


def _leaves(node: Config, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        yield from _leaves(value, f"{path}{key}.") if isinstance(value, dict) and value else [(f"{path}{key}", value)]
