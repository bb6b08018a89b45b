# SPDX-License-Identifier: Apache-2.0
"""Errors a user can act on: each says what was given, what is allowed and what to change."""

from __future__ import annotations

from collections.abc import Sequence


class ScaleRLError(Exception):
    """Base of all errors raised by this package on purpose."""


class ScaleRLConfigError(ScaleRLError, ValueError):
    """The composed configuration contradicts itself or this machine; lists every problem found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(self.problems, 1))
        super().__init__(f"scalerl_verl refuses to start this run:\n{lines}")

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        # Ray pickles exceptions; the default would pass the rendered text as `problems`.
        return type(self), (self.problems,)


class PatchError(ScaleRLError, RuntimeError):
    """An upstream symbol we depend on is missing, changed or not patched in this process."""


class WeightSyncError(ScaleRLError, RuntimeError):
    """The generator did not take the trainer's weights."""


class TruncationError(ScaleRLError, RuntimeError):
    """Too many responses were truncated, and the run has on_alarm=stop."""


class GeneratorsLostError(ScaleRLError, RuntimeError):
    """No generator is left to go on with."""


class NoGeneratorError(ScaleRLError, RuntimeError):
    """No generator takes requests at the moment; one may come back."""


class StalenessError(ScaleRLError, RuntimeError):
    """Data of a training batch are older than the run allows, or do not say how old they are."""


class RequestFailedError(ScaleRLError, RuntimeError):
    """A request gave no result in all of its attempts."""


class RewardError(ScaleRLError, ValueError):
    """A reward function returned no finite number."""


class GenerationFailedError(ScaleRLError, RuntimeError):
    """Many prompt groups in a row failed and none finished: the fault is not in single prompts."""


class NoSignalError(ScaleRLError, RuntimeError):
    """Dynamic sampling rejected group after group: all responses of each have the same reward."""


class HeadError(ScaleRLError, RuntimeError):
    """The FP32 head cannot be put on this model, or is not what computes its log-probs."""
