# SPDX-License-Identifier: Apache-2.0
"""Whether the metrics of a run are those that `scalerl_verl.metrics` describes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from scalerl_verl.metrics import METRICS

_PLACEHOLDER = re.compile(r"<\w+>")
_PATTERN = re.compile("|".join(".+".join(re.escape(part) for part in _PLACEHOLDER.split(name)) for name in METRICS))


def undocumented(metrics: Iterable[str]) -> list[str]:
    """Names of ours, with their prefix, that are not listed."""
    ours = {name for name in metrics if name.startswith("scalerl/")}
    return sorted(name for name in ours if not _PATTERN.fullmatch(name.removeprefix("scalerl/")))
