# SPDX-License-Identifier: Apache-2.0
"""Readers of runs' logs: formats, runs and segments, which metric and which x."""
