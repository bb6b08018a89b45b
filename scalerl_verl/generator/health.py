# SPDX-License-Identifier: Apache-2.0
"""Ends a run of verl's asynchronous modes when an engine of it has died.

Each request to a dead engine fails at once, verl replaces the failed prompt by a fresh one, and this goes on without
end. pipeline_rl leaves such an engine out instead.
"""

from __future__ import annotations

import time
from typing import Any

import ray

from scalerl_verl.errors import GeneratorsLostError
from scalerl_verl.generator.replicas import replicas_of
from scalerl_verl.names import PIPELINE_RL, TRAINER_MODE

INTERVAL_S = 10.0
"""Between two questions. Each is a call to an actor, and failed prompts may be replaced every few milliseconds."""
ANSWER_S = 30.0
"""A server that does not answer in this time is busy, which is no reason to end the run."""


class EngineWatch:
    """Asks the servers whether their engines live, at most every `INTERVAL_S`."""

    def __init__(self) -> None:
        self._asked_at = time.monotonic()

    def look(self, trainer: Any) -> None:
        """Ask, if it is time.

        Args:
            trainer: verl's V1 trainer, initialised.

        Raises:
            GeneratorsLostError: which generator died, and of what.
        """
        if time.monotonic() - self._asked_at < INTERVAL_S:
            return
        from scalerl_verl.generator.server import ScaleRLReplica

        questions = {
            server.check_alive.remote(): replica.replica_rank
            for replica in replicas_of(trainer)
            if isinstance(replica, ScaleRLReplica)
            for server in replica.servers
        }
        answered, _ = ray.wait(list(questions), num_returns=len(questions), timeout=ANSWER_S) if questions else ([], [])
        for answer in answered:
            try:
                ray.get(answer)
            except ray.exceptions.ActorUnavailableError:
                continue  # it may come back
            except ray.exceptions.RayError as error:
                raise GeneratorsLostError(
                    f"generator {questions[answer]} is dead, and every request to it fails: look for the first error "
                    f"of its vLLM engine ({str(error).strip().splitlines()[-1]}). A run goes on from its last "
                    f"checkpoint; {TRAINER_MODE}={PIPELINE_RL} goes on without the generator"
                ) from error
        self._asked_at = time.monotonic()
