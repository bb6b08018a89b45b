# SPDX-License-Identifier: Apache-2.0
"""Group-centred advantages, zero-variance filtering and weights per row; NumPy only in the arithmetic."""

from scalerl_verl.advantage.estimator import ADV_NORMS, ZERO_VARIANCE_MODES, AdvantageResult, scalerl_advantages
from scalerl_verl.advantage.sessions import Sessions, index_sessions, session_advantages
from scalerl_verl.advantage.weights import row_weights
from scalerl_verl.advantage.zero_variance import (
    GroupKind,
    GroupStats,
    classify_groups,
    index_groups,
    rounding_error,
)

__all__ = [
    "ADV_NORMS",
    "ZERO_VARIANCE_MODES",
    "AdvantageResult",
    "GroupKind",
    "GroupStats",
    "Sessions",
    "classify_groups",
    "index_groups",
    "index_sessions",
    "rounding_error",
    "row_weights",
    "scalerl_advantages",
    "session_advantages",
]
