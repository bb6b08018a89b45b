# SPDX-License-Identifier: Apache-2.0
"""The steps by which Hydra made a run's config, in their order: files, our presets, overrides of the command line."""

from __future__ import annotations

import importlib.resources
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.names import PRESET_GROUP
from scalerl_verl.names.reading import leaves

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PRESETS = "scalerl_verl.configs"
VERL = "verl.trainer.config"
SHIPPED = ("ppo_trainer", "ppo_megatron_trainer", "legacy_reward_impl")
"""verl's own files in the first level of its folder, where users put their primary configs, too."""
DEFAULTS = "_generated_ppo_trainer.yaml"
"""verl's whole default config in one file."""
_PROVIDERS = ("hydra", "scalerl_verl")
"""Hydra's names of sources whose files name no preset by themselves: its own, and our presets."""
DELETED = object()
"""Value of a key that a step takes away."""
Kind = Literal["verl", "file", "preset", "command line"]


@dataclass(frozen=True)
class Layer:
    """One step of a composition.

    Args:
        kind: whose it is.
        name: as a user knows it: the preset asked for, the path of a file, the command line.
        values: config path -> value as written, or `DELETED`.
        config_path: Hydra's name of a file that is no preset.
        named_by: that of the file whose defaults list names the preset; of one on the command line, the primary's.
        typed: the preset stands on the command line.
    """

    kind: Kind
    name: str
    values: Mapping[str, Any]
    config_path: str = ""
    named_by: str = ""
    typed: bool = False


def read_layers(hydra: DictConfig) -> list[Layer]:
    """The steps of the run that Hydra composes in this process; none if no preset is among them.

    Args:
        hydra: the section `hydra` of that run.

    Raises:
        HydraException: the run does not compose any more.
        OSError: a file is gone.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    # Unresolved: an override may be a reference, of the run's config.
    given: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    overrides = [*given["hydra"], *given["task"]]
    if not _may_name_a_preset(hydra, overrides):
        return []
    loader = GlobalHydra.instance().config_loader()
    composed = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN)
    folders = [folder for source in hydra.runtime.config_sources for folder in _folders(source)]
    steps = [
        _Step(file.config_path, file.parent or "", file.package or "", bool(file.is_self), folder)
        for file in composed.defaults
        if not file.config_path.startswith("hydra/") and (folder := _find(file.config_path, folders)) is not None
    ]
    first = next((i for i, step in enumerate(steps) if step.is_preset), None)
    if first is None:
        return []
    # verl's defaults are there to be overridden.
    steps = [step for i, step in enumerate(steps) if i >= first or not step.is_verl]
    layers = [_preset(steps, i, overrides) if step.is_preset else _file(step) for i, step in enumerate(steps)]
    return [*layers, *_command_line(composed.config_overrides)]


def verl_defaults() -> dict[str, Any]:
    """Config path -> verl's own default; empty where verl does not ship the file that lists them."""
    with suppress(FileNotFoundError):
        return _read(importlib.resources.files(VERL) / DEFAULTS, "")
    return {}


def _may_name_a_preset(hydra: DictConfig, overrides: Sequence[str]) -> bool:
    """Whether the command line or a file of the user can; to compose again takes tenths of a second."""
    sources = [source for source in hydra.runtime.config_sources if source.provider not in _PROVIDERS]
    folders = [folder for source in sources for folder in _folders(source)]
    return any(PRESET_GROUP in text for text in overrides) or not all(_is_folder_of(VERL, path) for path in folders)


@dataclass(frozen=True)
class _Step:
    """A file in the order in which Hydra merges them, and the folder on its search path that has the file."""

    config_path: str
    parent: str
    package: str
    is_self: bool
    folder: Traversable

    @property
    def file(self) -> Traversable:
        return _file_of(self.config_path, self.folder)

    @property
    def is_preset(self) -> bool:
        return self.config_path.startswith(f"{PRESET_GROUP}/") and _is_folder_of(PRESETS, self.folder)

    @property
    def is_verl(self) -> bool:
        shipped = "/" in self.config_path or self.config_path in SHIPPED
        return shipped and _is_folder_of(VERL, self.folder)


def _folders(source: Any) -> Iterator[Traversable]:
    """The folder of one of Hydra's sources; none if it is not there, at which Hydra warns, or holds no files."""
    if source.schema == "file":
        yield Path(source.path)
    elif source.schema == "pkg":
        with suppress(ModuleNotFoundError):
            yield importlib.resources.files(source.path.replace("/", "."))


def _find(config_path: str, folders: Sequence[Traversable]) -> Traversable | None:
    """The folder of the file that Hydra reads: the first that has it. None: it is no file."""
    return next((folder for folder in folders if _file_of(config_path, folder).is_file()), None)


def _file_of(config_path: str, folder: Traversable) -> Traversable:
    # Hydra takes names with and without the ending.
    return folder.joinpath(f"{posixpath.normpath(config_path).removesuffix('.yaml')}.yaml")


def _is_folder_of(package: str, folder: Traversable) -> bool:
    # The folder and not the file: some installers link every single file to a cache.
    return Path(str(folder)).resolve() == Path(str(importlib.resources.files(package))).resolve()


def _file(step: _Step) -> Layer:
    values = _read(step.file, step.package)
    if step.is_verl:
        return Layer("verl", f"verl's {posixpath.normpath(step.config_path)}.yaml", values, step.config_path)
    name = str(step.file)
    with suppress(ValueError):  # it lies elsewhere
        name = str(Path(name).relative_to(Path.cwd()))
    return Layer("file", name, values, step.config_path)


def _preset(steps: Sequence[_Step], i: int, overrides: Sequence[str]) -> Layer:
    """A preset, named by the one that includes it: users know that one."""
    outer = i
    while (including := _including(steps, outer)) is not None:
        outer = including
    name = steps[outer].config_path.removeprefix(f"{PRESET_GROUP}/")
    typed = any(re.match(rf"\+?{PRESET_GROUP}(@[\w.]*)?=(.*\W)?{name}(\W|$)", text) for text in overrides)
    return Layer("preset", name, _read(steps[i].file, steps[i].package), named_by=steps[outer].parent, typed=typed)


def _including(steps: Sequence[_Step], i: int) -> int | None:
    """The preset whose defaults list names step `i`: its own part comes after what it includes."""
    return next((j for j in range(i + 1, len(steps)) if _includes(steps[j], steps[i])), None)


def _includes(step: _Step, included: _Step) -> bool:
    return step.is_preset and step.is_self and step.config_path == included.parent


def _command_line(overrides: Sequence[Any]) -> Iterator[Layer]:
    for override in overrides:
        values = {override.key_or_group: DELETED} if override.is_delete() else {}
        if not values:
            values = dict(leaves(override.key_or_group, override.value()))
        yield Layer("command line", "command line", values)


def _read(file: Traversable, package: str) -> dict[str, Any]:
    """Config path -> value as written, of a YAML file at its place in the config."""
    content: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")), resolve=False)
    content.pop("defaults", None)
    return dict(leaves(package, content))
