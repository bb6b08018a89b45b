# SPDX-License-Identifier: Apache-2.0
"""Folders of the repository."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RECIPES = REPO / "recipes"
