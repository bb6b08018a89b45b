# SPDX-License-Identifier: Apache-2.0
"""The keys of our own sections of the config: default and allowed values, once for every reader.

What a key means stands in the docstring of the class that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from scalerl_verl import names
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names.kinds import (
    INF,
    Choice,
    Fixed,
    Kind,
    Number,
    Other,
    is_text,
    real,
    switch,
    text,
    whole,
    wrong_values,
)

PASSING = 0.5
PASSES = real(PASSING, below=INF, note=": a value above it passes")
"""What null at ``algorithm.scalerl.pass_threshold`` stands for."""
PAPER_PHRASE = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
PAPER_TOTAL, PAPER_LOW, PAPER_HIGH, PAPER_ANSWER = 14_336, 10_000, 12_000, 2_048
"""arXiv 2510.13786: 12,288 thinking + 2,048 solution tokens, interrupted at a random position in [10k, 12k]."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def is_token_range(value: Any) -> bool:
    """Whether this is [low, high] with 0 <= low < 1 < high, both finite."""
    return _is_pair(value) and all(map(_is_number, value)) and 0 <= value[0] < 1 < value[1] < math.inf


def _is_budget(value: Any) -> bool:
    whole_numbers = _is_pair(value) and all(isinstance(end, int) and not isinstance(end, bool) for end in value)
    return whole_numbers and 1 <= value[0] <= value[1]


def _budget() -> Other:
    return Other(None, _is_budget, "[low, high], whole numbers of tokens with 1 <= low <= high")


def _seconds(default: float) -> Kind:
    return real(default, above=0, below=INF, unit="seconds")


_TOKENS_OR_NULL = whole(None, 0, null=True, unit="tokens")
_START = "a text such as <think>, or null"
_CAP = (
    ": it is the absolute cap of the importance ratio (5 means 5, not 1 + 5), and below 1 it would cap the ratio of "
    f"every token that both policies agree on; set it to {names.DEFAULT_EPS_MAX}"
)
KEYS: dict[str, dict[str, Kind]] = {
    names.LOSS_SECTION: {
        "eps_max": real(names.DEFAULT_EPS_MAX, 1, below=INF, note=_CAP),
        "token_mask_range": Other(
            None,
            is_token_range,
            "[low, high] with 0 <= low < 1 < high, such as [0.5,5.0] (tokens whose importance ratio lies outside are "
            "masked)",
        ),
        "sequence_truncation": Choice(
            None, (names.PRODUCT, names.GEOMETRIC_MEAN), note=", or null for a ratio per token"
        ),
    },
    names.ALGORITHM_SECTION: {
        "adv_norm": Choice(names.BATCH, (names.BATCH, names.PROMPT, names.NONE)),
        "zero_variance": Choice(names.DROP, (names.DROP, names.KEEP)),
        "reward_shaping": Other(),
        "interruption": Other(),
        "truncation_alarm": Other(),
        "pass_key": text(None, "a key of what the reward function returns"),
        "pass_threshold": replace(PASSES, default=None, null=True),
        "fast_frontend": switch(False),
    },
    f"{names.SHAPING_SECTION}.{names.LENGTH_PENALTY}": {
        "max_length": whole(None, null=True, unit="tokens"),
        "cache_length": whole(None, null=True, unit="tokens"),
    },
    names.INTERRUPTION_SECTION: {
        "thinking_budget": _budget(),
        "answer_budget": _TOKENS_OR_NULL,
        "val_thinking_budget": _budget(),
        "val_answer_budget": _TOKENS_OR_NULL,
        "phrase": Other(PAPER_PHRASE),
        "start_marker": Other("<think>", lambda value: value is None or is_text(value), _START),
        "end_marker": text("</think>", "a text such as </think>"),
        "plain_text_markers": switch(False),
        "seed": Number(0),
    },
    names.ALARM_SECTION: {
        "fraction": real(0.1, above=0, below=1),
        "window_batches": whole(10),
        "on_alarm": Choice(names.WARN, (names.WARN, names.STOP)),
    },
    names.SAMPLER_SECTION: {
        "threshold": real(0.9, above=0, most=1, note=" (the paper: 0.9)"),
        "history": Choice(names.LATEST, (names.LATEST, names.CUMULATIVE)),
        "first_epoch": whole(2, 2, note=" (the first epoch has no history)"),
        "min_prompts": whole(1),
        "min_responses": whole(1),
        "readmit_after_epochs": whole(None, null=True),
    },
    names.PIPELINE_SECTION: {
        "max_staleness": whole(8, 0, note=" (0 is on-policy)"),
        "kv_on_update": Choice(names.KEEP, (names.KEEP, names.RECOMPUTE)),
        "staging": Choice(names.DEVICE, (names.DEVICE, names.HOST, names.NONE)),
        "request_timeout_s": _seconds(3600.0),
        "transfer_timeout_s": _seconds(900.0),
        "max_attempts": whole(3),
        "max_strikes": whole(5),
        "parameter_sync_step": Fixed(
            1, "every optimizer step is a version of its own that goes to the generators at once"
        ),
    },
    names.OFF_POLICY_SECTION: {
        "num_updates": whole(8),
        "parameter_sync_step": Fixed(1, f"the updates on a batch are {names.OFF_POLICY_SECTION}.num_updates"),
    },
}
"""Section -> key -> what may stand there. Two more keys of the sampler's section are no rules: see its reader."""


def default(path: str) -> Any:
    """What a key of ours is where nobody sets it."""
    section, _, key = path.rpartition(".")
    return KEYS[section][key].default


def value_of(config: Any, path: str) -> Any:
    """What stands at a key of ours, or its default; it may be wrong, which the check of its section says."""
    section, _, key = path.rpartition(".")
    return names.select(config, path, KEYS[section][key].default)


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
