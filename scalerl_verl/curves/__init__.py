# SPDX-License-Identifier: Apache-2.0
"""Runs as curves: readers of their logs, plots, and the commands fit, compare, predict, backtest and plot."""
