# SPDX-License-Identifier: Apache-2.0
"""What may change rewards, or leave responses out of training, before advantages are computed.

A length penalty is a `RewardShaping` that changes rewards; a truncation rule is one that leaves responses out. Register
a class under a name, and ``algorithm.scalerl.reward_shaping.NAME`` in the config applies it; none is the default.

Shape legend: R responses (one row each, or the rows of one session of an agent loop).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Responses:
    """The responses of one batch, without padding rows.

    Attributes:
        rewards_R: reward of each response, as the shapings before this one left it, [R] float64.
        passed_R: whether each is right, judged by what the reward function gave before any shaping (see `PassRule`),
            [R] bool.
        num_sampled_R: tokens that the policy sampled and that train (mask 1), over all outputs, [R] int64.
        length_R: tokens of the last output, injected ones and those of tools included, [R] int64.
        at_limit_R: the last output has ``max_length`` tokens or fills the engine's context: it was cut, or ended right
            there, [R] bool.
        max_length: ``data.max_response_length``, tokens.
        prompt_ids_R: id of the prompt of each response: equal ids are one group.
        extra_fields_R: what the agent loop recorded of the last output (``AgentLoopOutput.extra_fields``).
    """

    rewards_R: NDArray[np.float64]
    passed_R: NDArray[np.bool_]
    num_sampled_R: NDArray[np.int64]
    length_R: NDArray[np.int64]
    at_limit_R: NDArray[np.bool_]
    max_length: int
    prompt_ids_R: Sequence[str]
    extra_fields_R: Sequence[Mapping[str, Any]]


class RewardShaping:
    """Base class; as it is, it changes nothing. A subclass is a frozen dataclass whose fields are its options.

    Attributes:
        leaves_out: whether `trains` may say False. Only the estimator ``scalerl`` takes responses out of group
            statistics and denominators, so others are refused at start.
    """

    leaves_out: ClassVar[bool] = False

    def shape(self, responses: Responses) -> NDArray[np.float64]:
        """Rewards that the advantages are made of, [R] float64."""
        return responses.rewards_R

    def trains(self, responses: Responses) -> NDArray[np.bool_]:
        """False for responses that enter neither the loss, nor a denominator, nor their group's mean, [R] bool."""
        return np.ones(responses.rewards_R.shape, dtype=np.bool_)


_REGISTRY: dict[str, type[RewardShaping]] = {}
_KINDS = {float: "a number", int: "a whole number", bool: "True or False", type(None): "null"}
_Shaping = TypeVar("_Shaping", bound=type[RewardShaping])


def register_reward_shaping(name: str) -> Callable[[_Shaping], _Shaping]:
    """Class decorator: make a `RewardShaping` available under ``name``.

    Raises:
        ValueError: another class has the name.
    """

    def register(cls: _Shaping) -> _Shaping:
        other = _REGISTRY.setdefault(name, cls)
        if other is not cls:
            raise ValueError(f"reward shaping {name!r} is {other.__qualname__} already: register another name")
        return cls

    return register


def make_reward_shapings(section: Mapping[str, Mapping[str, Any] | None] | None) -> dict[str, RewardShaping]:
    """Build what ``algorithm.scalerl.reward_shaping`` asks for.

    Args:
        section: name -> options (null for none), applied in this order.

    Returns:
        Name -> shaping; empty for no section.

    Raises:
        ValueError: unknown names or options, missing ones, ones of another type than their field (float, int and bool
            are looked at), or values that a shaping refuses; a line each.
    """
    if not isinstance(section, Mapping | None):
        raise ValueError(f"reward_shaping={section!r} must map names to their options, such as {{NAME: {{}}}}")
    made: dict[str, RewardShaping] = {}
    problems: list[str] = []
    for name, options in (section or {}).items():
        try:
            made[name] = _make(name, options)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return made


def _make(name: str, options: Mapping[str, Any] | None) -> RewardShaping:
    cls = _REGISTRY.get(name)
    if cls is None:
        known_names = ", ".join(sorted(_REGISTRY)) or "none in this version"
        raise ValueError(f"reward_shaping.{name} does not exist; the names are: {known_names}")
    if not isinstance(options, Mapping | None):
        raise ValueError(f"reward_shaping.{name}={options!r} must be a section of its options; {{}} for none")
    given = dict(options or {})
    fields: list[dataclasses.Field[Any]] = []
    if dataclasses.is_dataclass(cls):
        fields = [field for field in dataclasses.fields(cls) if field.init]
    known = [field.name for field in fields]
    problems = [
        f"reward_shaping.{name}.{key} does not exist; the options are: {', '.join(known) or 'none'}"
        for key in sorted(set(given) - set(known), key=str)
    ]
    for field in fields:
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            problems.append(f"reward_shaping.{name}.{field.name} is missing and has no default: set it")
    problems += _wrong_types(cls, name, {key: value for key, value in given.items() if key in known})
    if problems:
        raise ValueError("\n".join(problems))
    try:
        return cls(**given)
    except TypeError as error:
        raise ValueError(f"reward_shaping.{name}={given} is refused: {error}") from error


def _wrong_types(cls: type[RewardShaping], name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """What to say of options that are not the number or truth value that their field is declared to be."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a declaration that cannot be evaluated here says nothing about its options
        return
    for key, value in options.items():
        union = typing.get_origin(hints[key]) in (typing.Union, types.UnionType)
        allowed = typing.get_args(hints[key]) if union else (hints[key],)
        if not set(allowed) <= {float, int, bool, type(None)}:
            continue
        fits = type(value) in allowed or (type(value) is int and float in allowed)
        if not fits:
            kinds = " or ".join(_KINDS[kind] for kind in allowed)
            yield f"reward_shaping.{name}.{key}={value!r} must be {kinds}"


def shape_rewards(
    shapings: Mapping[str, RewardShaping], responses: Responses
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Apply all shapings in turn, each to the rewards that the one before left.

    Args:
        shapings: as `make_reward_shapings` builds them.
        responses: with the rewards of the reward function.

    Returns:
        Rewards [R] float64, and the responses that all of them let train [R] bool.

    Raises:
        ValueError: a shaping returned another shape or a non-finite reward, or leaves responses out although its class
            does not say so.
    """
    trains_R = np.ones(responses.rewards_R.shape, dtype=np.bool_)
    for name, shaping in shapings.items():
        rewards_R = np.asarray(shaping.shape(responses), dtype=np.float64)
        lets_train_R = np.asarray(shaping.trains(responses))
        if rewards_R.shape != trains_R.shape or lets_train_R.shape != trains_R.shape:
            raise ValueError(
                f"reward shaping {name!r} returned shapes {rewards_R.shape} and {lets_train_R.shape} for "
                f"{trains_R.size} responses: return one value per response"
            )
        if not np.isfinite(rewards_R[np.isfinite(responses.rewards_R)]).all():
            raise ValueError(f"reward shaping {name!r} made a finite reward non-finite: correct its formula")
        if not shaping.leaves_out and not lets_train_R.all():
            raise ValueError(f"reward shaping {name!r} leaves responses out: set leaves_out = True in its class")
        trains_R &= lets_train_R.astype(np.bool_)
        responses = dataclasses.replace(responses, rewards_R=rewards_R)
    return responses.rewards_R, trains_R
