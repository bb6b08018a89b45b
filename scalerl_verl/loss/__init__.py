# SPDX-License-Identifier: Apache-2.0
"""Policy losses per token and their aggregation to a scalar; PyTorch only."""

from scalerl_verl.loss.aggregation import AGG_MODES, aggregate_loss
from scalerl_verl.loss.cispo import cispo_metrics, cispo_token_loss
from scalerl_verl.loss.mismatch import mismatch_metrics
from scalerl_verl.loss.ratios import SEQUENCE_TRUNCATIONS

__all__ = [
    "AGG_MODES",
    "SEQUENCE_TRUNCATIONS",
    "aggregate_loss",
    "cispo_metrics",
    "cispo_token_loss",
    "mismatch_metrics",
]
