# SPDX-License-Identifier: Apache-2.0
"""Statistics of the lengths of one batch, and the alarm that too many responses are cut.

Shape legend: R responses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalerl_verl.interruption.response import INTERRUPTED, NATURAL, NO_THINKING, UNCLOSED
from scalerl_verl.names import ALARM_SECTION, ESTIMATOR, EXCLUDE_TRUNCATED, SHAPING_SECTION
from scalerl_verl.names.keys import defaults, wrong_fields

_DEFAULT = defaults(ALARM_SECTION)


def summarize_truncation(truncated_R: NDArray[np.bool_], prompt_ids_R: Sequence[Hashable]) -> dict[str, float]:
    """Truncated responses as a fraction of all, and by prompt.

    Args:
        truncated_R: responses that ran out of tokens, [R] bool.
        prompt_ids_R: prompt of each.

    Returns:
        Metric name without prefix -> value; empty for no response. Names are such that verl, which combines the
        mini-batches of a step by words in the name, takes the greatest of maxima and averages the rest.
    """
    if not truncated_R.size:
        return {}
    by_prompt: dict[Hashable, list[bool]] = {}
    for prompt, truncated in zip(prompt_ids_R, truncated_R.tolist(), strict=True):
        by_prompt.setdefault(prompt, []).append(truncated)
    fractions = [float(np.mean(flags)) for flags in by_prompt.values()]
    return {
        "truncated_fraction": float(truncated_R.mean()),
        "prompts_truncated_fraction": float(np.mean([fraction > 0 for fraction in fractions])),
        "truncated_fraction_prompt_max": max(fractions),
    }


def summarize_records(records: Sequence[Mapping[str, Any]], rewards_R: NDArray[np.float64]) -> dict[str, float]:
    """Outcomes, lengths and rewards of responses of the loop ``forced_interruption``.

    Args:
        records: `LengthRecord.as_dict` of each response.
        rewards_R: their rewards, [R] float64.

    Returns:
        Metric name without prefix -> value; a mean over no response is left out.
    """
    if not records:
        return {}
    outcomes = np.array([record["outcome"] for record in records])
    found = {
        f"{name}_fraction": float((outcomes == outcome).mean())
        for name, outcome in (
            ("interrupted", INTERRUPTED),
            ("natural_close", NATURAL),
            ("unclosed", UNCLOSED),
            ("no_thinking", NO_THINKING),
        )
    }
    for key in ("thinking_tokens", "answer_tokens"):
        found[f"{key}_mean"] = float(np.mean([record[key] for record in records]))
    found["injected_tokens_sum"] = float(sum(record["injected_tokens"] for record in records))
    for name, outcome in (("interrupted", INTERRUPTED), ("natural", NATURAL)):
        if (outcomes == outcome).any():
            found[f"reward_{name}_mean"] = float(rewards_R[outcomes == outcome].mean())
    continued = sum(record["continued_tokens"] for record in records)
    if continued:
        found["continuation_cached_fraction"] = sum(record["cached_tokens"] for record in records) / continued
    return found


@dataclass(frozen=True)
class AlarmSettings:
    """``algorithm.scalerl.truncation_alarm``.

    Args:
        fraction: fraction of truncated responses above which the alarm is raised. The paper saw instability above 10 to
            15 %; healthy runs stayed under 5 %.
        window_batches: number of batches that the fraction is taken over.
        on_alarm: ``warn``: a line in the log; ``stop``: end the run.
    """

    fraction: float = _DEFAULT["fraction"]
    window_batches: int = _DEFAULT["window_batches"]
    on_alarm: str = _DEFAULT["on_alarm"]

    def __post_init__(self) -> None:
        if problems := wrong_fields(self, ALARM_SECTION):
            raise ValueError("\n".join(problems))


class TruncationAlarm:
    """Truncated responses over the last batches; raised when they pass a fraction of a full window."""

    def __init__(self, settings: AlarmSettings) -> None:
        self.settings = settings
        self._batches: deque[tuple[int, int]] = deque(maxlen=settings.window_batches)
        self._was_raised = False

    @property
    def fraction(self) -> float:
        """Truncated responses of the window, as a fraction."""
        total = sum(size for _, size in self._batches)
        return sum(truncated for truncated, _ in self._batches) / total if total else 0.0

    @property
    def raised(self) -> bool:
        """Whether a full window has passed the fraction."""
        return len(self._batches) == self.settings.window_batches and self.fraction > self.settings.fraction

    def observe(self, num_truncated: int, num_responses: int) -> bool:
        """Add a batch.

        Returns:
            Whether the alarm was raised just now: True once, until it has been down again.
        """
        self._batches.append((num_truncated, num_responses))
        is_new = self.raised and not self._was_raised
        self._was_raised = self.raised
        return is_new

    def state_dict(self) -> dict[str, Any]:
        """The window, as JSON types: (truncated, all) responses of each batch, oldest first."""
        return {"batches": [list(batch) for batch in self._batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the window of `state_dict`, as far as it fits into this alarm's.

        An alarm that is up in it is raised anew by the next batch that keeps it up: a restarted run says so, too.

        Raises:
            ValueError: something else than a state of this class.
        """
        batches = state["batches"] if isinstance(state, Mapping) and set(state) == {"batches"} else None
        if not isinstance(batches, list) or not all(_is_count(batch) for batch in batches):
            raise ValueError(f"{state!r} is no window of a truncation alarm: [truncated, all] of each batch")
        self._batches.clear()
        self._batches.extend((truncated, size) for truncated, size in batches)
        self._was_raised = False

    def message(self) -> str:
        """What to say when it is raised."""
        settings = self.settings
        return (
            f"{self.fraction:.1%} of the responses of the last {settings.window_batches} batches were truncated (alarm "
            f"above {settings.fraction:.1%}): in the ScaleRL paper this went with instability, healthy runs stay under "
            "5 %. Raise data.max_response_length, end them before (+scalerl=interruption), or, with the estimator "
            f"{ESTIMATOR}, leave truncated responses out (++{SHAPING_SECTION}.{EXCLUDE_TRUNCATED}={{}})"
        )


def _is_count(batch: Any) -> bool:
    return isinstance(batch, list) and [type(number) for number in batch] == [int, int] and 0 <= batch[0] <= batch[1]
