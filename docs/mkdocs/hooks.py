# SPDX-License-Identifier: Apache-2.0
"""Hooks of the site: pages that are there only once something has been recorded take their place in the navigation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RECORDED = {"Running": [{"Evidence": "evidence.md"}]}
"""Section of the navigation -> its last pages, if their files exist."""


def on_config(config: Any) -> Any:
    """Add the recorded pages that exist."""
    for section in config.nav:
        for name, pages in section.items():
            if isinstance(pages, list):
                found = [page for page in RECORDED.get(name, []) if Path(config.docs_dir, *page.values()).is_file()]
                pages.extend(page for page in found if page not in pages)
    return config
