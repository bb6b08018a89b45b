# SPDX-License-Identifier: Apache-2.0
"""Run a recipe: what run.sh starts."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose modules have plain names

from recipes.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
