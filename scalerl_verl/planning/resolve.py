# SPDX-License-Identifier: Apache-2.0
"""From ``recipe=NAME`` and overrides to verl's composed config, without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, open_dict

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import PRESET_GROUP

if TYPE_CHECKING:
    from scalerl_verl.config.preset_report import Difference

CONFIG = "config.yaml"
MODEL = "model.json"
PRESETS = Path(__file__).resolve().parents[1] / "configs" / PRESET_GROUP


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


@dataclass(frozen=True)
class Primary:
    """The file that Hydra begins with: what `--config-path`, `--config-dir` and `--config-name` of a launch name.

    Args:
        folder: None: verl's own.
        name: with or without `.yaml`.
        beside: a folder in which Hydra looks, too.

    Raises:
        ScaleRLConfigError: a folder that is relative or does not exist.
    """

    folder: str | None = None
    name: str = "ppo_trainer"
    beside: str | None = None

    def __post_init__(self) -> None:
        if self.beside is not None and not Path(self.beside).is_dir():
            raise ScaleRLConfigError([f"--config-dir {self.beside} is no folder: give the folder of your YAML"])
        if self.folder is None:
            return
        if not Path(self.folder).is_absolute():  # Hydra would look for it below the folder of main_ppo.py
            wanted = Path(self.folder).resolve()
            raise ScaleRLConfigError([f"--config-path {self.folder}: give the absolute path, --config-path {wanted}"])
        if not Path(self.folder).is_dir():
            raise ScaleRLConfigError([f"--config-path {self.folder} is no folder: give the folder of your YAML"])

    @property
    def place(self) -> tuple[str | None, list[str]]:
        """The folder to begin in, None for verl's own, and the override that makes Hydra look elsewhere, too.

        Hydra finds no first file by an override of its search path: where that file is the user's, verl's are found so.
        """
        if self.beside is None:
            return self.folder, []
        beside = Path(self.beside).resolve()
        if self.folder is None and (beside / f"{self.name.removesuffix('.yaml')}.yaml").is_file():
            return str(beside), ["hydra.searchpath=['pkg://verl.trainer.config']"]
        return self.folder, [f"hydra.searchpath=['file://{beside}']"]


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """verl's config with overrides of Hydra's grammar.

    Raises:
        ScaleRLConfigError: what Hydra refuses.
    """
    with _composed(overrides, Primary()) as (config, _):
        return config


def compose_and_compare(overrides: Sequence[str], primary: Primary = Primary()) -> tuple[DictConfig, list[Difference]]:
    """The same, and where it is not what its presets and files say.

    Raises:
        ScaleRLConfigError: what Hydra refuses.
    """
    from scalerl_verl.config.preset_report import find_differences

    with _composed(overrides, primary) as (config, hydra):
        return config, find_differences(config, hydra)


@contextmanager
def _composed(overrides: Sequence[str], primary: Primary) -> Iterator[tuple[DictConfig, DictConfig]]:
    """The config and Hydra's own section of it, while Hydra knows where its files are."""
    import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder, more = primary.place
    if folder is None:
        search_path = initialize_config_module("verl.trainer.config", version_base=None)
    else:
        search_path = initialize_config_dir(folder, version_base=None)
    with search_path:
        try:
            config = compose(primary.name, overrides=[*overrides, *more], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:  # null for a section is a bare ValueError
            raise ScaleRLConfigError([f"the config cannot be composed: {error}"]) from error
        with open_dict(config):
            hydra = config.pop("hydra")
        yield config, hydra
