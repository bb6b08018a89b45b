# SPDX-License-Identifier: Apache-2.0
"""How often the responses to each prompt passed.

Shape legend: B rows (responses).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalerl_verl.advantage.sessions import index_sessions


@dataclass(frozen=True)
class Visit:
    """What is known of one prompt.

    Attributes:
        step: training step in which the prompt of the latest visit was handed to the generators.
        passed: responses of the latest visit that passed.
        responses: responses of the latest visit.
        all_passed: the same over all visits.
        all_responses: the same over all visits.
    """

    step: int
    passed: int
    responses: int
    all_passed: int
    all_responses: int


class PassHistory:
    """Pass counts per prompt id.

    The order in which results arrive does not matter: a visit is dated by the step in which the prompt was handed out,
    the one with the greatest step is the latest, and results of one step are added up. Two rows of the data with the
    same id are one prompt; drawn in the same step, they are one visit.
    """

    def __init__(self) -> None:
        self._visits: dict[str, Visit] = {}

    def __len__(self) -> int:
        return len(self._visits)

    def get(self, prompt_id: str) -> Visit | None:
        """What is known of the prompt; None if no result of it was recorded yet."""
        return self._visits.get(prompt_id)

    def record(self, prompt_id: str, step: int, passed: int, responses: int) -> None:
        """Add results of a prompt that was handed out in ``step``.

        Raises:
            ValueError: counts that cannot be.
        """
        if not 0 <= passed <= responses or responses < 1:
            raise ValueError(
                f"{passed} of {responses} responses passed: record at least one response, of which 0 to all passed"
            )
        known = self._visits.get(prompt_id)
        if known is None:
            self._visits[prompt_id] = Visit(step, passed, responses, passed, responses)
            return
        latest = (known.step, known.passed, known.responses)
        if step > known.step:
            latest = (step, passed, responses)
        elif step == known.step:
            latest = (step, known.passed + passed, known.responses + responses)
        self._visits[prompt_id] = Visit(*latest, known.all_passed + passed, known.all_responses + responses)

    def forget(self, prompt_id: str) -> None:
        """Treat the prompt as never seen."""
        self._visits.pop(prompt_id, None)

    def state_dict(self) -> dict[str, Any]:
        """A copy: ids and an int64 array [prompts, 5] in the order of the fields of `Visit`."""
        rows = [(v.step, v.passed, v.responses, v.all_passed, v.all_responses) for v in self._visits.values()]
        return {"ids": list(self._visits), "counts": np.array(rows, dtype=np.int64).reshape(-1, 5)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything by ``state``."""
        pairs = zip(state["ids"], state["counts"].tolist(), strict=True)
        self._visits = {prompt_id: Visit(*counts) for prompt_id, counts in pairs}


def tally_visits(
    prompt_ids_B: Sequence[str],
    session_keys_B: Sequence[str],
    steps_B: Sequence[int],
    passed_B: ArrayLike,
    trains_B: ArrayLike,
) -> dict[tuple[str, int], tuple[int, int]]:
    """Count, per prompt and step of its hand-out, the responses that passed and all responses.

    A session (one attempt of an agent) that left several rows counts once, by its last output, if any of its rows
    trains. Groups may be incomplete: what is there counts.

    Args:
        prompt_ids_B: stable id of the prompt of each row, [B].
        session_keys_B: key of each row, ``<prompt uid>_<session>_<index in the session>``, [B].
        steps_B: training step in which the row's prompt was handed to the generators, [B].
        passed_B: whether each row passed (see `PassRule`), [B] bool.
        trains_B: False for padding rows and rows without an unmasked token, which are ignored, [B] bool.

    Returns:
        (prompt id, step) -> (responses that passed, responses).

    Raises:
        ValueError: lengths differ, or as `index_sessions`.
    """
    all_passed: NDArray[np.bool_] = np.asarray(passed_B, dtype=np.bool_)
    trains: NDArray[np.bool_] = np.asarray(trains_B, dtype=np.bool_)
    lengths = {len(prompt_ids_B), len(session_keys_B), len(steps_B), len(all_passed), len(trains)}
    if len(lengths) != 1:
        raise ValueError(f"ids, keys, steps, passes and mask describe {sorted(lengths)} rows: pass one of each a row")
    sessions = index_sessions(session_keys_B)
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for row in sessions.final_row_S[sessions.has_any(trains)].tolist():
        key = (prompt_ids_B[row], int(steps_B[row]))
        passed, responses = counts.get(key, (0, 0))
        counts[key] = (passed + int(all_passed[row]), responses + 1)
    return counts
