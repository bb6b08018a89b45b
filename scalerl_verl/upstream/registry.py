# SPDX-License-Identifier: Apache-2.0
"""Apply and require patches; the state of each one in this process."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from scalerl_verl.errors import PatchError
from scalerl_verl.upstream.activation import ALLOW_UNKNOWN_ENV, applies, is_active, is_checked
from scalerl_verl.upstream.import_hooks import after_import, is_imported
from scalerl_verl.upstream.source_check import find_mismatch, stay_out
from scalerl_verl.upstream.spec import PatchSpec, is_bound, resolve, source_text
from scalerl_verl.upstream.versions import POLICIES


@dataclass
class PatchState:
    """Status of one patch in this process.

    ``waiting``: its module is not imported yet; ``applied``; ``dormant``: the run does not ask for it;
    ``refused``: the installed upstream does not match; ``unmatched``: neither does what a guard was written for, in a
    process of a run without our names, which goes on.
    """

    spec: PatchSpec
    status: str = "waiting"
    detail: str = ""
    late: bool = False


_states: dict[str, PatchState] = {}
on_change: list[Callable[[], None]] = []
"""Called after a patch was applied, for whoever reports what this process runs with."""


def states() -> dict[str, PatchState]:
    """Patch name -> state in this process (a copy)."""
    return dict(_states)


def install(specs: Iterable[PatchSpec]) -> None:
    """Schedule patches: each is applied at the end of its module's import. Idempotent."""
    for spec in specs:
        if spec.name in _states:
            continue
        _states[spec.name] = PatchState(spec)
        # Whoever imported the module before us has bound the original names already.
        late = is_imported(spec.module)
        after_import(spec.module, functools.partial(_on_import, spec, late=late))


def activate() -> None:
    """Apply the patches whose modules were imported before this process knew that the run asks for them."""
    for state in _states.values():
        if state.status == "dormant" and applies(state.spec.when):
            after_import(state.spec.module, functools.partial(_on_import, state.spec, late=True))


def _on_import(spec: PatchSpec, module: ModuleType, late: bool = False) -> None:
    state = _states[spec.name]
    if not applies(spec.when):
        state.status = "dormant"
        return
    reason = _mismatch(spec, module) if spec.guard and not is_active() else None
    if reason is not None and os.environ.get(ALLOW_UNKNOWN_ENV) != "1":
        _pass_through(state, module, reason)
        return
    apply(spec, module)
    state.late = late and not spec.late_ok
    for callback in on_change:
        callback()


def _pass_through(state: PatchState, module: ModuleType, reason: str) -> None:
    """Leave a run without our names alone; the guard still looks, so that one that uses them is refused."""
    state.status, state.detail = "unmatched", reason
    with contextlib.suppress(AttributeError):
        owner, attribute, original = resolve(module, state.spec.target)
        setattr(owner, attribute, state.spec.build(original, module))
    stay_out(reason)


def _mismatch(spec: PatchSpec, module: ModuleType) -> str | None:
    """Why the installed upstream is not what ``spec`` was written for; None if it is."""

    def text_now() -> str | None:
        _, _, value = resolve(module, spec.target)
        return source_text(value) if is_bound(spec) else None

    return find_mismatch(spec, text_now)


def apply(spec: PatchSpec, module: ModuleType) -> None:
    """Apply one patch now.

    Raises:
        PatchError: version or source differ from what the patch was written for.
    """
    state = _states.setdefault(spec.name, PatchState(spec))
    if state.status == "applied":
        return
    reason = _mismatch(spec, module)
    allowed = os.environ.get(ALLOW_UNKNOWN_ENV) == "1"
    if reason is not None and not (allowed and hasattr(module, spec.target.split(".")[0])):
        state.status, state.detail = "refused", reason
        raise PatchError(
            f"scalerl_verl cannot apply its patch '{spec.name}': {reason}. Install "
            f"{POLICIES[spec.distribution].describe()}, or set {ALLOW_UNKNOWN_ENV}=1 to apply it unchecked at your own "
            "risk."
        )
    owner, attribute, original = resolve(module, spec.target)
    replacement = spec.build(original, module)
    if replacement is not original:
        setattr(owner, attribute, replacement)
    state.status, state.detail = "applied", reason or ""


def require_active(*names: str) -> None:
    """Check that patches are applied in this process.

    Raises:
        PatchError: naming each patch that is not applied and why.
    """
    missing = []
    for name in names:
        state = _states.get(name)
        if state is None:
            missing.append(f"{name}: unknown in this process (was the verl plugin loaded here?)")
        elif state.status != "applied":
            imported = "imported" if is_imported(state.spec.module) else "not imported"
            missing.append(f"{name}: {state.status} {state.detail} ({state.spec.module} is {imported})")
        elif state.late:
            missing.append(f"{name}: applied too late, {state.spec.module} had been imported before")
    if missing:
        raise PatchError(
            "scalerl_verl is not active where this run needs it:\n  "
            + "\n  ".join(missing)
            + "\nLaunch through python -m verl.trainer.main_ppo, which runs the start-up check; 'scalerl doctor' shows "
            "the details."
        )


def require_checked_run(name: str) -> None:
    """Check that the start-up check passed in this run.

    Args:
        name: what of ours is about to be used, for the message.

    Raises:
        PatchError: it did not, for example because another entry point than main_ppo launched the run.
    """
    if not is_checked():
        raise PatchError(
            f"{name} is used in a run whose configuration scalerl_verl has not checked: other settings could silently "
            "disable it. Launch through python -m verl.trainer.main_ppo (V1 trainers)."
        )
