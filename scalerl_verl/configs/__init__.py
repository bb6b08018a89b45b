# SPDX-License-Identifier: Apache-2.0
"""Hydra presets: only our deltas over verl's defaults."""
