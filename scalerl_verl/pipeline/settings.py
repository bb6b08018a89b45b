# SPDX-License-Identifier: Apache-2.0
"""``trainer.v1.pipeline_rl`` and ``trainer.v1.ppo_off_policy`` as frozen dataclasses; unknown keys are errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scalerl_verl.names import ADAPTIVE, OFF_POLICY_SECTION, PIPELINE_RL, PIPELINE_SECTION, PPO_OFF_POLICY, RECOMPUTE
from scalerl_verl.names.keys import defaults, read_section, require_allowed

_PIPELINE, _OFF_POLICY = defaults(PIPELINE_SECTION), defaults(OFF_POLICY_SECTION)


@dataclass(frozen=True)
class PipelineSettings:
    """``trainer.v1.pipeline_rl``.

    Args:
        max_staleness: k; a token trains a policy that is at most k versions newer than the one that sampled it. 0 is
            exactly on-policy; the paper finds 4 and 8 alike and takes 8.
        lead: how many groups are started ahead of training: ``adaptive``, as few as keep the trainer busy, so that
            tokens are younger where the trainer is the limit; ``full``, as many as ``max_staleness`` allows.
        kv_on_update: ``keep`` lets requests go on with the KV of the old weights; ``recompute`` computes it again
            under the new ones, which costs a prefill of everything that is in flight.
        staging: where a generator collects new weights while it generates: ``device`` (needs room for a second copy of
            the model beside vLLM), ``host``, or ``none``: it pauses for the whole transfer.
        request_timeout_s: seconds after which a request without a result is aborted and sent again; has to exceed the
            time of the longest response. Waiting for a slot of a generator that goes on does not count.
        transfer_timeout_s: seconds after which a transfer of weights counts as hung: a process died in it, or the
            network is gone. Generators that do not answer are then left out. The run ends if all of them answer, since
            the fault is then elsewhere, or if none is left and none is launched again. The same limit holds for
            ending the process group of a transfer that failed.
        max_attempts: attempts at a request, and then at its group, before it is given up.
        max_strikes: failures in a row to reach a generator before it is left out. Between them the generator is left
            alone for 10, 20, 40, ... seconds. A generator whose process died is left out at once.
        max_relaunches: tries to launch a dead or hung generator again on free devices, for each generator in a run,
            also those that succeed. 0: none.
        parameter_sync_step: must be 1. verl reads this key in the section of every trainer.
    """

    max_staleness: int = _PIPELINE["max_staleness"]
    lead: str = _PIPELINE["lead"]
    kv_on_update: str = _PIPELINE["kv_on_update"]
    staging: str = _PIPELINE["staging"]
    request_timeout_s: float = _PIPELINE["request_timeout_s"]
    transfer_timeout_s: float = _PIPELINE["transfer_timeout_s"]
    max_attempts: int = _PIPELINE["max_attempts"]
    max_strikes: int = _PIPELINE["max_strikes"]
    max_relaunches: int = _PIPELINE["max_relaunches"]
    parameter_sync_step: int = _PIPELINE["parameter_sync_step"]

    def __post_init__(self) -> None:
        require_allowed(self, PIPELINE_SECTION)

    @property
    def adapts_lead(self) -> bool:
        """Whether the lead follows what the trainer needs."""
        return self.lead == ADAPTIVE

    @property
    def recomputes(self) -> bool:
        """Whether running requests compute their KV again at an update."""
        return self.kv_on_update == RECOMPUTE


@dataclass(frozen=True)
class OffPolicySettings:
    """``trainer.v1.ppo_off_policy``.

    Args:
        num_updates: k; optimizer steps on each generated batch, each on a k-th part of its prompts.
        parameter_sync_step: must be 1. verl reads this key in the section of every trainer.
    """

    num_updates: int = _OFF_POLICY["num_updates"]
    parameter_sync_step: int = _OFF_POLICY["parameter_sync_step"]

    def __post_init__(self) -> None:
        require_allowed(self, OFF_POLICY_SECTION)


def pipeline_settings(config: Any) -> PipelineSettings:
    """The settings of a composed config (a DictConfig or what Ray made of it)."""
    return read_section(PipelineSettings, PIPELINE_SECTION, config.trainer.v1.get(PIPELINE_RL))


def off_policy_settings(config: Any) -> OffPolicySettings:
    """The settings of a composed config (a DictConfig or what Ray made of it)."""
    return read_section(OffPolicySettings, OFF_POLICY_SECTION, config.trainer.v1.get(PPO_OFF_POLICY))
