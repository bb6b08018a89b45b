# SPDX-License-Identifier: Apache-2.0
"""Policy losses per token and their aggregation to a scalar; PyTorch only."""

from scalerl_verl.losses.aggregation import AGG_MODES, aggregate_loss
from scalerl_verl.losses.cispo import cispo_metrics, cispo_token_loss

__all__ = ["AGG_MODES", "aggregate_loss", "cispo_metrics", "cispo_token_loss"]
