# SPDX-License-Identifier: Apache-2.0
"""Whether a response passed: one definition a run, for pass rates, no-positive-resampling and the length penalty.

Shape legend: R responses.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalerl_verl.names import ALGORITHM_SECTION, PASS_KEY
from scalerl_verl.names.keys import KEYS, PASSES, PASSING
from scalerl_verl.names.kinds import wrong_values

REWARD = "reward"
"""The key that stands for the reward itself."""
DEFAULT_KEYS = ("acc", "score")
_KINDS = {**KEYS[ALGORITHM_SECTION], "pass_threshold": PASSES}


@dataclass(frozen=True)
class PassRule:
    """``algorithm.scalerl.pass_key`` and ``.pass_threshold``: a response passes if its value is above the threshold.

    Each response is judged by itself, whatever the others hold. By default the value is what the reward function
    returned as ``acc``, in a row without it what it returned as ``score``, and without both the reward. verl fills the
    gaps of rows with None: None is a value that the row does not have.

    The default threshold fits right answers that are worth 1 and wrong ones that are worth 0 or -1 (of +-1 it takes
    the same ones as reward > 0, arXiv 2510.13786, section 2), and keeps a bonus for the format below 0.5 from turning a
    wrong answer into a pass.

    Args:
        key: what the reward function calls the value; ``reward``: the reward itself. None: as said above.
        threshold: a value above it passes.

    Raises:
        ValueError: naming every argument that is not allowed.
    """

    key: str | None = None
    threshold: float = PASSING

    def __post_init__(self) -> None:
        problems = wrong_values({"pass_key": self.key, "pass_threshold": self.threshold}, _KINDS)
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def keys(self) -> tuple[str, ...]:
        """What may be read of the reward function's result, the first that a row has."""
        if self.key is None:
            return DEFAULT_KEYS
        return () if self.key == REWARD else (self.key,)

    def describe(self) -> str:
        """The definition in a sentence."""
        limit = f"above {self.threshold:g}"
        if self.key is not None:
            return f"a response passes if its {self.key} is {limit}"
        return f"a response passes if its acc is {limit}, without acc its score, without both its reward"

    def values(self, rewards_R: ArrayLike, given_R: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """The number by which each response is judged, [R] float64.

        Args:
            rewards_R: the reward function's rewards, before anything is added to them, [R].
            given_R: what the reward function returned for each (verl's ``reward_extra_info``); empty if a number.

        Raises:
            ValueError: a value that is no finite number, True or False, or a row without the key that was asked for.
        """
        rewards = np.asarray(rewards_R, dtype=np.float64).tolist()
        if len(rewards) != len(given_R):
            raise ValueError(f"{len(rewards)} rewards and {len(given_R)} results of a reward function: pass one a row")
        values = (self._value(reward, given) for reward, given in zip(rewards, given_R, strict=True))
        return np.fromiter(values, dtype=np.float64, count=len(rewards))

    def judge(self, rewards_R: ArrayLike, given_R: Sequence[Mapping[str, Any]]) -> NDArray[np.bool_]:
        """Whether each response passed, [R] bool; arguments and errors as of `values`."""
        return self.values(rewards_R, given_R) > self.threshold

    def _value(self, reward: float, given: Mapping[str, Any]) -> float:
        for key in self.keys:
            value = given.get(key)
            if value is not None:
                return _as_number(value, key)
        if self.key in (None, REWARD):
            return _as_number(reward, REWARD)
        found = ", ".join(sorted(str(key) for key, value in given.items() if value is not None)) or "only the reward"
        raise ValueError(
            f"a response has no {self.key!r}, by which {PASS_KEY} judges it (the reward function "
            f"returned {found}): return it for every response, or choose another pass_key (null: acc, else score, "
            "else the reward)"
        )


def _as_number(value: Any, key: str) -> float:
    """A finite number, True or False, also as a scalar of NumPy or a tensor of one element."""
    inner = value
    if hasattr(value, "item"):
        with contextlib.suppress(ValueError, RuntimeError, TypeError):  # of several elements or none
            inner = value.item()
    number = math.nan
    if isinstance(inner, numbers.Real):
        with contextlib.suppress(OverflowError):
            number = float(inner)
    if math.isfinite(number):
        return number
    raise ValueError(
        f"the {key} of a response is {reprlib.repr(value)}, which neither passes nor fails: a reward function must "
        f"return a finite number, True or False there (leave {key} out, or None, where it does not judge), or set "
        f"{PASS_KEY} to what does judge"
    )
