# SPDX-License-Identifier: Apache-2.0
"""Which prompts leave the data at the beginning of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scalerl_verl.curriculum.history import PassHistory, Visit

HISTORIES: tuple[str, ...] = ("latest", "cumulative")


@dataclass(frozen=True)
class ResamplingRules:
    """When a prompt is mastered, and what happens then.

    Args:
        threshold: a pass rate from here on is mastered, in (0, 1]; the paper uses 0.9.
        history: the pass rate is that of the ``latest`` visit, or ``cumulative`` over all visits.
        first_epoch: first epoch that filters, counted from 1; 2 at the least, because the first has no history.
        min_prompts: filtering never leaves fewer distinct prompts than this (or than the data has).
        min_responses: fewer responses do not make a prompt mastered, however many of them passed. A prompt that passes
            7 of 10 times passes a single response with probability .7, but 8 of 8 with .06. For a prompt that has fewer
            responses a visit than this, all of them are enough (unless ``cumulative`` adds them up).
        readmit_after_epochs: a dropped prompt returns after sitting out so many epochs, with its history forgotten, so
            that only its next visit decides. None: never.

    Raises:
        ValueError: naming every argument that is not allowed.
    """

    threshold: float = 0.9
    history: str = "latest"
    first_epoch: int = 2
    min_prompts: int = 1
    min_responses: int = 1
    readmit_after_epochs: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not _is_number(self.threshold) or not 0 < self.threshold <= 1:
            problems.append(f"threshold={self.threshold!r}: use a pass rate above 0 and at most 1 (the paper: 0.9)")
        if self.history not in HISTORIES:
            problems.append(f"history={self.history!r}: use one of {', '.join(HISTORIES)}")
        if not _is_count(self.first_epoch, 2):
            problems.append(
                f"first_epoch={self.first_epoch!r}: use a whole number from 2 (the first epoch has no history)"
            )
        for name in ("min_prompts", "min_responses"):
            if not _is_count(getattr(self, name), 1):
                problems.append(f"{name}={getattr(self, name)!r}: use a whole number from 1")
        if self.readmit_after_epochs is not None and not _is_count(self.readmit_after_epochs, 1):
            problems.append(f"readmit_after_epochs={self.readmit_after_epochs!r}: use a whole number from 1, or null")
        if problems:
            raise ValueError("\n".join(problems))

    def is_mastered(self, passed: int, responses: int, group_size: int | None = None) -> bool:
        """Whether so many responses passed out of so many that the prompt need not be drawn again.

        Args:
            passed: responses that passed.
            responses: of so many.
            group_size: responses of a visit that the prompt asks for; None: as many as the run generates for any.
        """
        needed = self.min_responses
        if group_size is not None and self.history == "latest":
            needed = min(needed, group_size)
        return responses >= needed and passed / responses >= self.threshold


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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
    if history == "latest":
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
