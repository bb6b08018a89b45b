# SPDX-License-Identifier: Apache-2.0
"""Is the installed upstream what the patches were written for? Asked in the driver, before Ray starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from scalerl_verl.errors import PatchError
from scalerl_verl.upstream.activation import ALLOW_UNKNOWN_ENV, is_cpu_platform
from scalerl_verl.upstream.spec import PatchSpec, installed_version, source_problem
from scalerl_verl.upstream.static_source import read_source
from scalerl_verl.upstream.versions import POLICIES, mismatch

_reasons: list[str] = []


def stay_out(reason: str) -> None:
    """Note why runs that use our names have to be refused here; warns once a process, Ray's workers excepted."""
    if not _reasons and Path(sys.argv[0]).name != "default_worker.py":
        text = f"[scalerl_verl] {reason}: runs that use its names are refused, others go on"
        print(text, file=sys.stderr, flush=True)
    _reasons.append(reason)


def check_sources(specs: Iterable[PatchSpec]) -> None:
    """Look at every symbol that this run would have patched, in any process, without importing one.

    Args:
        specs: every symbol that this package touches.

    Raises:
        PatchError: all that differ from what the patches were written for.
    """
    found, due = list(_reasons), _due(specs)
    if os.environ.get(ALLOW_UNKNOWN_ENV) != "1":
        found += [reason for reason in map(static_mismatch, due) if reason is not None]
    if found:
        versions = [POLICIES[name].describe() for name in sorted({spec.distribution for spec in due})]
        raise PatchError(
            "scalerl_verl refuses to start this run, the installed verl or vLLM is not what its patches were written "
            "for:\n  "
            + "\n  ".join(dict.fromkeys(found))
            + f"\nInstall {' and '.join(versions)} with the sources that 'scalerl doctor' lists, remove our names from "
            f"the run, or set {ALLOW_UNKNOWN_ENV}=1 to patch unknown sources at your own risk."
        )


def _due(specs: Iterable[PatchSpec]) -> list[PatchSpec]:
    """Patches of a run that uses our names; vLLM's only where vLLM is installed."""
    has_vllm = installed_version("vllm") is not None
    return [
        spec
        for spec in specs
        if (spec.when != "cpu" or is_cpu_platform()) and (spec.distribution == "verl" or has_vllm)
    ]


def static_mismatch(spec: PatchSpec) -> str | None:
    """Why the installed upstream is not what ``spec`` was written for, as far as its file says it; None if it is."""
    return find_mismatch(spec, lambda: read_source(spec.module, spec.target))


def find_mismatch(spec: PatchSpec, find_text: Callable[[], str | None]) -> str | None:
    """Why the installed upstream is not what ``spec`` was written for; None if it is.

    Args:
        spec: what was bound.
        find_text: source of the symbol, None where there is none to compare; raises ModuleNotFoundError or
            AttributeError where there is no such symbol.
    """
    version = installed_version(spec.distribution)
    if version is None:
        return f"{spec.distribution} is not installed"
    if (differs := mismatch(spec.distribution, version)) is not None:
        return differs
    try:
        text = find_text()
    except ModuleNotFoundError:
        return f"{spec.module} does not exist in {spec.distribution} {version}"
    except AttributeError:
        return f"{spec.module}.{spec.target} does not exist in {spec.distribution} {version}"
    if text is None:  # a value, or at most inherited: nothing to compare a source with
        problem = f"{spec.module}.{spec.target} is not defined there any more" if spec.sources else None
    else:
        problem = source_problem(spec, text)
    return None if problem is None else f"{problem} in {spec.distribution} {version}"
