# SPDX-License-Identifier: Apache-2.0
"""From ``recipe=NAME`` and overrides to verl's composed config, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from scalerl_verl.errors import ScaleRLConfigError

CONFIG = "config.yaml"
MODEL = "model.json"
PRESETS = Path(__file__).resolve().parents[1] / "configs" / "scalerl"


@dataclass(frozen=True)
class Recipe:
    """What ``recipe=`` names.

    Args:
        overrides: Hydra's, that compose it.
        model_file: shape of its model, where the model itself is made by the recipe; None: none stored.
    """

    overrides: tuple[str, ...]
    model_file: Path | None = None


def find_recipe(name: str) -> Recipe:
    """A recipe's folder (or a config file in one), or one of our presets.

    Args:
        name: path of a folder with a `config.yaml`, or of a YAML file there; a name below `recipes/`; or a preset.

    Raises:
        ScaleRLConfigError: nothing of that name.
    """
    for path in (Path(name).expanduser(), Path("recipes") / name):
        file = path / CONFIG if path.is_dir() else path
        if file.is_file() and file.suffix == ".yaml":
            folder = file.resolve().parent
            model = folder / MODEL
            overrides = (f"hydra.searchpath=['file://{folder.parent}']", f"+{folder.name}={file.stem}")
            return Recipe(overrides, model if model.is_file() else None)
    if (PRESETS / f"{name}.yaml").is_file():
        return Recipe((f"+scalerl={name}",))
    presets = ", ".join(sorted(path.stem for path in PRESETS.glob("*.yaml")))
    raise ScaleRLConfigError(
        [f"recipe={name} is no folder with a {CONFIG}, none below recipes/, and no preset: presets are {presets}"]
    )


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """verl's config with overrides of Hydra's grammar.

    Raises:
        ScaleRLConfigError: what Hydra refuses.
    """
    import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # null for a section is a bare ValueError
        raise ScaleRLConfigError([f"the config cannot be composed: {error}"]) from error
