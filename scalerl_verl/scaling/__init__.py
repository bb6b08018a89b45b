# SPDX-License-Identifier: Apache-2.0
"""Compute-performance curves: the sigmoid of ScaleRL and its fit."""

from scalerl_verl.scaling.sigmoid import FitRefused, SigmoidFit, fit_sigmoid, sigmoid

__all__ = ["FitRefused", "SigmoidFit", "fit_sigmoid", "sigmoid"]
