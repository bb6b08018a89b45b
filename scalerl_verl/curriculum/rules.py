# SPDX-License-Identifier: Apache-2.0
"""Which prompts leave the data at the beginning of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scalerl_verl.curriculum.history import PassHistory, Visit
from scalerl_verl.names import LATEST, SAMPLER_SECTION
from scalerl_verl.names.keys import defaults, wrong_fields

_DEFAULT = defaults(SAMPLER_SECTION)


@dataclass(frozen=True)
class ResamplingRules:
    """When a prompt is mastered, and what happens then.

    Args:
        threshold: a pass rate from here on is mastered, in (0, 1]; the paper uses 0.9.
        history: the pass rate is that of the ``latest`` visit, or ``cumulative`` over all visits.
        first_epoch: first epoch that filters, counted from 1. It is 2 or more, because the first epoch has no history.
        min_prompts: filtering leaves at least this number of distinct prompts (or all, if the data has fewer).
        min_responses: responses that a prompt needs to count as mastered, however many of them passed. A prompt that
            passes 7 of 10 times passes a single response with probability .7, but 8 of 8 with .06. For a prompt that
            has fewer responses a visit than this, all of them are enough (unless ``cumulative`` adds them up).
        readmit_after_epochs: a dropped prompt returns after sitting out so many epochs, with its history forgotten, so
            that only its next visit decides. null: never.

    Raises:
        ValueError: naming every argument that is not allowed.
    """

    threshold: float = _DEFAULT["threshold"]
    history: str = _DEFAULT["history"]
    first_epoch: int = _DEFAULT["first_epoch"]
    min_prompts: int = _DEFAULT["min_prompts"]
    min_responses: int = _DEFAULT["min_responses"]
    readmit_after_epochs: int | None = _DEFAULT["readmit_after_epochs"]

    def __post_init__(self) -> None:
        if problems := wrong_fields(self, SAMPLER_SECTION):
            raise ValueError("\n".join(problems))

    def is_mastered(self, passed: int, responses: int, group_size: int | None = None) -> bool:
        """Whether so many responses passed out of so many that the prompt need not be drawn again.

        Args:
            passed: responses that passed.
            responses: of so many.
            group_size: responses of a visit that the prompt asks for; None: as many as the run generates for any.
        """
        needed = self.min_responses
        if group_size is not None and self.history == LATEST:
            needed = min(needed, group_size)
        return responses >= needed and passed / responses >= self.threshold


@dataclass(frozen=True)
class DroppedPrompt:
    """A prompt that leaves the data, and the counts that decided it.

    Attributes:
        prompt_id: stable id.
        passed: responses that passed, over the latest visit or all visits as the rules say.
        responses: responses of the same.
        step: step in which the prompt was last handed out.
    """

    prompt_id: str
    passed: int
    responses: int
    step: int

    @property
    def pass_rate(self) -> float:
        """Share of the responses that passed."""
        return self.passed / self.responses


def _judged(prompt_id: str, visit: Visit, history: str) -> DroppedPrompt:
    if history == LATEST:
        return DroppedPrompt(prompt_id, visit.passed, visit.responses, visit.step)
    return DroppedPrompt(prompt_id, visit.all_passed, visit.all_responses, visit.step)


def choose_drops(
    active_ids: Iterable[str],
    history: PassHistory,
    rules: ResamplingRules,
    group_sizes: Mapping[str, int] = MappingProxyType({}),
) -> tuple[list[DroppedPrompt], list[DroppedPrompt]]:
    """Return the mastered prompts that leave, and those that stay only because of the floor.

    Mastered is a prompt with a recorded pass rate >= ``threshold`` over ``min_responses`` or more. If all of them
    together would leave fewer than ``min_prompts``, those with the lowest pass rate stay, among equal ones the least
    recently handed out, then by id.

    Args:
        active_ids: distinct ids of the prompts that are still drawn, in any order.
        history: pass counts.
        rules: threshold, history and floor.
        group_sizes: responses a visit, of prompts that ask for a number of their own.

    Returns:
        (leaving, kept by the floor), highest pass rate first: the same for every order of ``active_ids``.
    """

    def is_mastered(prompt: DroppedPrompt) -> bool:
        return rules.is_mastered(prompt.passed, prompt.responses, group_sizes.get(prompt.prompt_id))

    active = list(active_ids)
    known = ((prompt_id, history.get(prompt_id)) for prompt_id in active)
    judged = [_judged(prompt_id, visit, rules.history) for prompt_id, visit in known if visit is not None]
    mastered = [prompt for prompt in judged if is_mastered(prompt)]
    mastered.sort(key=lambda prompt: (-prompt.pass_rate, -prompt.step, prompt.prompt_id))
    allowed = max(0, len(active) - rules.min_prompts)
    return mastered[:allowed], mastered[allowed:]
