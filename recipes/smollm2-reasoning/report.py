# SPDX-License-Identifier: Apache-2.0
"""Report a run, as the quickstart does: summary.json and learning_curve.png."""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose modules have plain names

from recipes.quickstart.report import main

if __name__ == "__main__":
    sys.exit(main())
