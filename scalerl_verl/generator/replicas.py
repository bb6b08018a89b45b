# SPDX-License-Identifier: Apache-2.0
"""The generators of a run."""

from __future__ import annotations

from typing import Any


def replicas_of(trainer: Any) -> list[Any]:
    """verl's replicas that generate for the policy, standalone ones included.

    Args:
        trainer: verl's V1 trainer of any mode, initialised.
    """
    return [replica for manager in trainer._rollout_server_managers() for replica in manager.get_replicas()]
