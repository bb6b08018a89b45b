# SPDX-License-Identifier: Apache-2.0
"""The keys of our own sections of the config: default and allowed values, once for every reader.

What a key means stands in the docstring of the class that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from scalerl_verl import names
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names.kinds import Kind, Number, Value, is_number, is_text, one_of, text, whole, within, wrong_values
from scalerl_verl.names.reading import plain, select, unknown_keys

Settings = TypeVar("Settings")
PASSING = 0.5
PASSES = within(PASSING, lambda value: math.isfinite(value), "a finite number: a value above it passes")
"""What null at ``algorithm.scalerl.pass_threshold`` stands for."""
PAPER_PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
PAPER_TOTAL, PAPER_LOW, PAPER_HIGH, PAPER_ANSWER = 14_336, 10_000, 12_000, 2_048
"""arXiv 2510.13786: 12,288 thinking + 2,048 solution tokens, interrupted at a random position in [10k, 12k]."""


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def is_token_range(value: Any) -> bool:
    """Whether this is [low, high] with 0 <= low < 1 < high, both finite."""
    return _is_pair(value) and all(map(is_number, value)) and 0 <= value[0] < 1 < value[1] < math.inf


def _is_budget(value: Any) -> bool:
    whole_numbers = _is_pair(value) and all(isinstance(end, int) and not isinstance(end, bool) for end in value)
    return whole_numbers and 1 <= value[0] <= value[1]


def _seconds(default: float) -> Value:
    return within(default, lambda value: 0 < value < math.inf, _SECONDS)


def _switch(default: bool) -> Value:
    return Value(default, lambda value: isinstance(value, bool), "give True or False")


def _always_1(why: str) -> Value:
    return Value(1, lambda value: is_number(value) and value == 1, f"{why}; leave it 1")


_SECONDS = "a positive number of seconds"
_BUDGET = Value(None, _is_budget, "give [low, high], whole numbers of tokens with 1 <= low <= high, or null")
_TOKENS, _TOKENS_FROM_0 = whole(None, null=True), whole(None, 0, null=True)
_CAP = (
    "a finite number of 1 or more: it is the absolute cap of the importance ratio (5 means 5, not 1 + 5), and below 1 "
    f"it would cap the ratio of every token that both policies agree on; set it to {names.DEFAULT_EPS_MAX}"
)
_RANGE = (
    "give [low, high] with 0 <= low < 1 < high, such as [0.5,5.0], or null: tokens whose importance ratio lies outside "
    "are masked"
)
_SHARE = "a number above 0 and at most 1 (the paper: 0.9)"
KEYS: dict[str, dict[str, Kind]] = {
    names.LOSS_SECTION: {
        "eps_max": within(names.DEFAULT_EPS_MAX, lambda cap: 1 <= cap < math.inf, _CAP),
        "token_mask_range": Value(None, is_token_range, _RANGE),
        "sequence_truncation": one_of(
            None, names.PRODUCT, names.GEOMETRIC_MEAN, otherwise=", or null for a ratio per token"
        ),
    },
    names.ALGORITHM_SECTION: {
        "adv_norm": one_of(names.BATCH, names.BATCH, names.PROMPT, names.NONE),
        "zero_variance": one_of(names.DROP, names.DROP, names.KEEP),
        "reward_shaping": Value(),
        "interruption": Value(),
        "truncation_alarm": Value(),
        "pass_key": text(None, "a key of what the reward function returns, or null"),
        "pass_threshold": replace(PASSES, default=None, change=f"{PASSES.change}, or null"),
        "fast_frontend": _switch(False),
    },
    f"{names.SHAPING_SECTION}.{names.LENGTH_PENALTY}": {"max_length": _TOKENS, "cache_length": _TOKENS},
    names.INTERRUPTION_SECTION: {
        "thinking_budget": _BUDGET,
        "answer_budget": _TOKENS_FROM_0,
        "val_thinking_budget": _BUDGET,
        "val_answer_budget": _TOKENS_FROM_0,
        "phrase": Value(PAPER_PHRASE),
        "start_marker": Value("<think>", lambda value: value is None or is_text(value), "give a text, or null"),
        "end_marker": text("</think>", "a text such as </think>"),
        "plain_text_markers": _switch(False),
        "seed": Number(0),
    },
    names.ALARM_SECTION: {
        "fraction": within(0.1, lambda value: 0 < value < 1, "a number above 0 and below 1"),
        "window_batches": whole(10),
        "on_alarm": one_of(names.WARN, names.WARN, names.STOP),
    },
    names.SAMPLER_SECTION: {
        "class_path": Value(names.SAMPLER_CLASS),
        "threshold": within(0.9, lambda value: 0 < value <= 1, _SHARE),
        "history": one_of(names.LATEST, names.LATEST, names.CUMULATIVE),
        "first_epoch": whole(2, 2, note=" (the first epoch has no history)"),
        "min_prompts": whole(),
        "min_responses": whole(),
        "readmit_after_epochs": whole(None, null=True),
        "log_file": Value(None, lambda value: isinstance(value, str), "give the path of a file, or leave it out"),
    },
    names.PIPELINE_SECTION: {
        "max_staleness": whole(8, 0, note=" (0 is on-policy)"),
        "lead": one_of(names.ADAPTIVE, names.ADAPTIVE, names.FULL),
        "kv_on_update": one_of(names.KEEP, names.KEEP, names.RECOMPUTE),
        "staging": one_of(names.DEVICE, names.DEVICE, names.HOST, names.NONE),
        "request_timeout_s": _seconds(3600.0),
        "transfer_timeout_s": _seconds(900.0),
        "max_attempts": whole(3),
        "max_strikes": whole(5),
        "max_relaunches": whole(3, 0),
        "parameter_sync_step": _always_1(
            "every optimizer step is a version of its own that goes to the generators at once"
        ),
    },
    names.OFF_POLICY_SECTION: {
        "num_updates": whole(8),
        "parameter_sync_step": _always_1(f"the updates on a batch are {names.OFF_POLICY_SECTION}.num_updates"),
    },
    names.POLL_SECTION: {
        names.POLL_INTERVAL_KEY: _seconds(names.VERL_POLL_INTERVAL_S),
    },
}
"""Section -> key -> what may stand there."""


def default(path: str) -> Any:
    """What a key of ours is where nobody sets it."""
    section, _, key = path.rpartition(".")
    return KEYS[section][key].default


def defaults(section: str) -> dict[str, Any]:
    """Key -> what it is where nobody sets it."""
    return {key: kind.default for key, kind in KEYS[section].items()}


def value_of(config: Any, path: str) -> Any:
    """What stands at a key of ours, or its default; it may be wrong, which the check of its section says."""
    section, _, key = path.rpartition(".")
    return select(config, path, KEYS[section][key].default)


def read_section(cls: type[Settings], path: str, section: Any) -> Settings:
    """Build a dataclass of settings from a config section (or its absence).

    Args:
        cls: the dataclass, whose fields are keys of the section; what it refuses is a line each, without the section.
        path: the section's, one of `KEYS`.
        section: its content, a DictConfig or what somebody made of one.

    Raises:
        ScaleRLConfigError: no section, an unknown key or value.
    """
    given = plain(section)
    if not isinstance(given, Mapping | None):
        raise ScaleRLConfigError([f"{path}={given!r}: it is a section, set the keys below it"])
    given, kinds, own = given or {}, KEYS[path], {field.name for field in fields(cls)}  # type: ignore[arg-type]
    problems = unknown_keys(path, given, kinds)
    others = {key: value for key, value in given.items() if key in kinds and key not in own}
    problems += [f"{path}.{line}" for line in wrong_values(others, kinds)]
    # Tuples, so that the settings can be hashed.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key in own}
    try:
        settings = cls(**values)
    except ScaleRLConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems += [f"{path}.{line}" for line in str(error).splitlines()]
    if problems:
        raise ScaleRLConfigError(problems)
    return settings


def wrong_fields(settings: Any, section: str) -> list[str]:
    """``key=value: what to change`` for each field of a dataclass of settings that its section does not allow."""
    kinds = KEYS[section]
    return wrong_values({f.name: getattr(settings, f.name) for f in fields(settings) if f.name in kinds}, kinds)


def require_allowed(settings: Any, section: str) -> None:
    """Refuse a dataclass of settings with fields that its section does not allow.

    Raises:
        ScaleRLConfigError: names every one with its path.
    """
    if problems := wrong_fields(settings, section):
        raise ScaleRLConfigError([f"{section}.{problem}" for problem in problems])
