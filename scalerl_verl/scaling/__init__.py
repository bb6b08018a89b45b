# SPDX-License-Identifier: Apache-2.0
"""Compute-performance curves: fit/ (the arithmetic), logs/ (readers of runs), the commands and their reports.

What `scalerl_verl.scaling.fit` offers can be taken from here; SciPy is imported when it is.
"""

from importlib import import_module
from typing import Any

__all__ = ["CurveFit", "FitRefused", "Grid", "Points", "Trouble", "fit_curve", "sigmoid"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.fit"), name)
