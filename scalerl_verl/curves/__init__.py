# SPDX-License-Identifier: Apache-2.0
"""Runs as curves: readers of their logs, plots, and the commands `scalerl fit | compare | predict | backtest | plot`."""
