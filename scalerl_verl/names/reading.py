# SPDX-License-Identifier: Apache-2.0
"""Reading a composed config: one value, a list, a section; `keys` reads a section of ours as its settings."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Any


def select(config: Any, path: str, default: Any = None) -> Any:
    """``config.a.b.c`` of a DictConfig, or ``default`` if any part is missing, null or no section."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigTypeError

    try:
        value = OmegaConf.select(config, path, default=default)
    except ConfigTypeError:  # a list where a section is meant
        return default
    return default if value is None else value


def select_list(config: Any, path: str) -> list[str]:
    """Values of a key that takes one or a list of them, such as file names; empty if it is missing or null."""
    from omegaconf import ListConfig

    value = select(config, path)
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list | tuple | ListConfig) else [str(value)]


def unknown_keys(section: str, given: Iterable[Any], known: Collection[str]) -> list[str]:
    """What to say of keys of a section that do not exist, a line each; the one that was probably meant is named."""
    problems = []
    for key in sorted(set(map(str, given)) - set(known)):
        near = difflib.get_close_matches(key, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        problems.append(f"{section}.{key} does not exist: the keys are {', '.join(known)}{meant}")
    return problems


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Path and value of everything below a path of a plain config; an empty section has nothing."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(f"{path}.{key}".lstrip("."), inner)
    else:
        yield path, value


def plain(section: Any) -> Any:
    """A section as what Python has: references resolved, a dict for a DictConfig."""
    from omegaconf import DictConfig, OmegaConf

    return OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else section
