# SPDX-License-Identifier: Apache-2.0
"""Findings for a person: the verdict of each version, then what differs."""

from __future__ import annotations

from collections.abc import Sequence

from tests.upstream.watch.compare import Findings
from tests.upstream.watch.patches import PatchOutcome

Looked = tuple[Findings, list[PatchOutcome]]


def verdict(findings: Findings) -> str:
    """One line."""
    label = findings.tree.label
    if findings.is_clean:
        return f"{label}: nothing changed, all {findings.bound} bound symbols are known"
    parts = [f"{len(findings.changed)} of {findings.bound} bound symbols differ"]
    parts += [f"imports missing: {len(findings.missing)}"] if findings.missing else []
    parts += [f"imported names with other arguments: {len(findings.signatures)}"] if findings.signatures else []
    return f"{label}: changed. {', '.join(parts)}"


def details(findings: Findings, outcomes: Sequence[PatchOutcome], with_diff: bool) -> list[str]:
    """Everything that differs; empty where nothing does and no diff was tried."""
    lines: list[str] = []
    for change in findings.changed:
        lines.append(f"  {change.what}")
        lines += [f"      {line}" for line in change.diff.splitlines()] if with_diff else []
    for name, files in findings.missing.items():
        lines.append(f"  {name}: is imported by {', '.join(files)} and is not there")
    lines += [f"  {name}: arguments {text}" for name, text in findings.signatures.items()]
    for outcome in outcomes:
        how = "applies" if outcome.applies else "does not apply"
        test = f", its test {outcome.test}" if outcome.test in ("passed", "failed") else ""
        lines.append(f"  patches/{outcome.name}: {how}{test}{_because(outcome)}")
    return lines


def _because(outcome: PatchOutcome) -> str:
    return f" ({outcome.detail})" if outcome.detail else ""


def render(looked: Sequence[Looked], with_diff: bool) -> str:
    """Verdicts first, then a block for each version."""
    lines = [verdict(findings) for findings, _ in looked]
    for findings, outcomes in looked:
        block = details(findings, outcomes, with_diff)
        if block:
            lines += ["", f"{findings.tree.label}:", *block]
    return "\n".join(lines)
