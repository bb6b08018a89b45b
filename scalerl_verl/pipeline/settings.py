# SPDX-License-Identifier: Apache-2.0
"""``trainer.v1.pipeline_rl`` and ``trainer.v1.ppo_off_policy`` as frozen dataclasses; unknown keys are errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import read_section

PIPELINE_SECTION = "trainer.v1.pipeline_rl"
OFF_POLICY_SECTION = "trainer.v1.ppo_off_policy"
KV_ON_UPDATE = ("keep", "recompute")
STAGING = ("device", "host", "none")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class PipelineSettings:
    """``trainer.v1.pipeline_rl``.

    Args:
        max_staleness: k; a token trains a policy that is at most k versions newer than the one that sampled it. 0 is
            exactly on-policy; the paper finds 4 and 8 alike and takes 8.
        kv_on_update: ``keep`` lets requests go on with the KV of the old weights; ``recompute`` computes it again
            under the new ones, which costs a prefill of everything that is in flight.
        staging: where a generator collects new weights while it generates: ``device`` (needs room for a second copy of
            the model beside vLLM), ``host``, or ``none``: it pauses for the whole transfer.
        request_timeout_s: seconds after which a request without a result is aborted and sent again; has to exceed the
            time of the longest response. Waiting for a slot of a generator that goes on does not count.
        transfer_timeout_s: seconds after which a transfer of weights that has not ended counts as hung, by a peer that
            died in it or a network that is gone: generators that do not answer are left out, and without any the run
            ends. The same limit holds for ending the process group of a transfer that failed.
        max_attempts: how often a request, and then its group, is tried before it is given up.
        max_strikes: how often in a row a generator whose process may live cannot be reached, or does not answer, before
            it is left out; it is left alone for 10, 20, 40, ... seconds in between. One that died is left out at once.
        parameter_sync_step: 1; verl reads this key of the section of every trainer.
    """

    max_staleness: int = 8
    kv_on_update: str = "keep"
    staging: str = "device"
    request_timeout_s: float = 3600.0
    transfer_timeout_s: float = 900.0
    max_attempts: int = 3
    max_strikes: int = 5
    parameter_sync_step: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not _is_count(self.max_staleness, 0):
            problems.append(f"max_staleness={self.max_staleness!r} must be a whole number, 0 (on-policy) or more")
        for key, allowed in (("kv_on_update", KV_ON_UPDATE), ("staging", STAGING)):
            if getattr(self, key) not in allowed:
                problems.append(f"{key}={getattr(self, key)!r}: use one of {', '.join(allowed)}")
        for key in ("request_timeout_s", "transfer_timeout_s"):
            limit = getattr(self, key)
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit) or limit <= 0:
                problems.append(f"{key}={limit!r} must be a positive number of seconds")
        for key in ("max_attempts", "max_strikes"):
            if not _is_count(getattr(self, key), 1):
                problems.append(f"{key}={getattr(self, key)!r} must be a whole number, 1 or more")
        if self.parameter_sync_step != 1:
            problems.append(
                f"parameter_sync_step={self.parameter_sync_step!r}: every optimizer step is a version of its own that "
                "goes to the generators at once; leave it 1"
            )
        if problems:
            raise ScaleRLConfigError([f"{PIPELINE_SECTION}.{problem}" for problem in problems])

    @property
    def recomputes(self) -> bool:
        """Whether running requests compute their KV again at an update."""
        return self.kv_on_update == "recompute"


@dataclass(frozen=True)
class OffPolicySettings:
    """``trainer.v1.ppo_off_policy``.

    Args:
        num_updates: k; optimizer steps on each generated batch, each on a k-th part of its prompts.
        parameter_sync_step: 1; verl reads this key of the section of every trainer.
    """

    num_updates: int = 8
    parameter_sync_step: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not _is_count(self.num_updates, 1):
            problems.append(f"{OFF_POLICY_SECTION}.num_updates={self.num_updates!r} must be a whole number, 1 or more")
        if self.parameter_sync_step != 1:
            problems.append(
                f"{OFF_POLICY_SECTION}.parameter_sync_step={self.parameter_sync_step!r}: the updates on a batch are "
                f"{OFF_POLICY_SECTION}.num_updates; leave this key 1"
            )
        if problems:
            raise ScaleRLConfigError(problems)


def pipeline_settings(config: Any) -> PipelineSettings:
    """The settings of a composed config (a DictConfig or what Ray made of it)."""
    return read_section(PipelineSettings, PIPELINE_SECTION, _plain(config.trainer.v1.get("pipeline_rl")))


def off_policy_settings(config: Any) -> OffPolicySettings:
    """The settings of a composed config (a DictConfig or what Ray made of it)."""
    return read_section(OffPolicySettings, OFF_POLICY_SECTION, _plain(config.trainer.v1.get("ppo_off_policy")))


def _plain(section: Any) -> Mapping[str, Any] | None:
    from omegaconf import DictConfig, OmegaConf

    return OmegaConf.to_container(section, resolve=True) if isinstance(section, DictConfig) else section
