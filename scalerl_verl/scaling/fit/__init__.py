# SPDX-License-Identifier: Apache-2.0
"""Compute-performance curves: the sigmoid of ScaleRL, its fit, and how sure it is."""

from scalerl_verl.scaling.fit.curve import sigmoid
from scalerl_verl.scaling.fit.fitting import fit_curve
from scalerl_verl.scaling.fit.paper_grid import Grid
from scalerl_verl.scaling.fit.points import FitRefused, Points
from scalerl_verl.scaling.fit.result import CurveFit, Trouble

__all__ = ["CurveFit", "FitRefused", "Grid", "Points", "Trouble", "fit_curve", "sigmoid"]
