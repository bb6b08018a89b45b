# SPDX-License-Identifier: Apache-2.0
"""``algorithm.scalerl.interruption`` and ``.truncation_alarm``: reading them, and the start-up checks of the loop.

These stand under ``algorithm``, where verl lets keys pass that it does not know; its rollout section refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.interruption.budgets import InterruptionSettings, resolve_budgets
from scalerl_verl.interruption.lengths import AlarmSettings
from scalerl_verl.interruption.markers import ThinkingScript
from scalerl_verl.names import (
    AGENT_LOOP,
    ALARM_SECTION,
    INTERRUPTION_LOOP,
    INTERRUPTION_SECTION,
    MODEL,
    ROLLOUT,
    VLLM,
    select,
)
from scalerl_verl.names.numbers import number
from scalerl_verl.names.reading import unknown_keys

LOOP_NAME = INTERRUPTION_LOOP
LOOP_KEY = AGENT_LOOP
SECTION = INTERRUPTION_SECTION
ALARM_SECTION = ALARM_SECTION
_Settings = TypeVar("_Settings")


def asks_for_interruption(config: DictConfig) -> bool:
    """Whether a composed config names our agent loop."""
    return bool(select(config, LOOP_KEY) == LOOP_NAME)


def read_settings(section: Any) -> InterruptionSettings:
    """The settings of a section ``algorithm.scalerl.interruption`` (or of its absence).

    Raises:
        ScaleRLConfigError: an unknown key or value.
    """
    return _read(InterruptionSettings, _names_of(InterruptionSettings), section, SECTION)


def read_alarm(section: Any) -> AlarmSettings:
    """The settings of a section ``algorithm.scalerl.truncation_alarm`` (or of its absence).

    Raises:
        ScaleRLConfigError: an unknown key or value.
    """
    return _read(AlarmSettings, _names_of(AlarmSettings), section, ALARM_SECTION)


def _names_of(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)]


def _read(cls: Callable[..., _Settings], known: Collection[str], section: Any, path: str) -> _Settings:
    if not isinstance(section, Mapping | None):
        raise ScaleRLConfigError([f"{path}={section!r} must be a section of its keys"])
    given = dict(section or {})
    problems = unknown_keys(path, given, known)
    # Tuples, so that the settings can be hashed.
    values = {key: tuple(given[key]) if isinstance(given[key], list) else given[key] for key in known if key in given}
    try:
        settings = cls(**values)
    except ValueError as error:
        problems += [f"{path}.{line}" for line in str(error).splitlines()]
    if problems:
        raise ScaleRLConfigError(problems)
    return settings


def find_problems(config: DictConfig) -> Iterator[str]:
    """Contradictions of the loop with the rest of the config (not within its section, which is reported with it)."""
    if not asks_for_interruption(config):
        if OmegaConf.select(config, SECTION) is not None:
            yield (
                f"{SECTION} is read by the agent loop {LOOP_NAME} only, but {LOOP_KEY}={select(config, LOOP_KEY)}: set "
                f"{LOOP_KEY}={LOOP_NAME} or delete the section (~{SECTION})"
            )
        return
    for key in ("tool_config_path", "function_tool_path"):
        if select(config, f"{ROLLOUT}.multi_turn.{key}"):
            yield (
                f"{ROLLOUT}.multi_turn.{key} is set, but {LOOP_NAME} answers in a single turn and would never call a "
                f"tool: remove the tools, or set {LOOP_KEY}=tool_agent (prompts with tools can name their own loop in "
                "a column agent_name)"
            )
    if select(config, f"{ROLLOUT}.enable_rollout_routing_replay", False):
        yield (
            f"{ROLLOUT}.enable_rollout_routing_replay=True: an interrupted response comes from several requests, "
            f"whose routing verl cannot put together; set it False, or {LOOP_KEY}=single_turn_agent"
        )
    caching = select(config, f"{VLLM}.enable_prefix_caching")
    if caching is False or not select(config, f"{ROLLOUT}.enable_prefix_caching", True):
        yield (
            f"{ROLLOUT}.enable_prefix_caching=False: every interrupted response would be prefilled a second time; set "
            "it True"
        )


def make_script(tokenizer: Any, settings: InterruptionSettings) -> ThinkingScript:
    """Markers and phrase in the tokens of a transformers tokenizer."""
    return ThinkingScript(
        settings,
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        decode=lambda ids: str(
            tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        ),
    )


def find_model_problems(config: DictConfig) -> Iterator[str]:
    """Whether the model thinks, can write the phrase, and the budgets fit: needs its tokenizer."""
    if not asks_for_interruption(config):
        return
    path = str(select(config, f"{MODEL}.tokenizer_path") or select(config, f"{MODEL}.path", ""))
    if not path or "://" in path or (path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir()):
        return  # missing, which another check reports, or remote, which this machine cannot look into
    section = OmegaConf.select(config, SECTION)
    try:
        settings = read_settings(OmegaConf.to_container(section, resolve=True) if section is not None else None)
    except ScaleRLConfigError:
        return  # reported with the section
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path,
            trust_remote_code=bool(select(config, f"{MODEL}.trust_remote_code", False)),
        )
    except Exception as error:  # noqa: BLE001 - broken files fail in any way, in tokenizers by a bare Exception
        yield (
            f"the tokenizer of {path}, whose markers {LOOP_NAME} needs, cannot be loaded: {type(error).__name__}: "
            f"{error}"
        )
        return
    yield from find_tokenizer_problems(
        tokenizer,
        settings,
        total=number(config, f"{ROLLOUT}.response_length"),
        template=select(config, f"{MODEL}.custom_chat_template"),
    )


def find_tokenizer_problems(
    tokenizer: Any, settings: InterruptionSettings, total: int, template: str | None = None
) -> Iterator[str]:
    """What stands in the way of interrupting responses in this tokenizer's tokens.

    Args:
        tokenizer: of transformers.
        settings: as configured.
        total: tokens of a response at most.
        template: chat template in place of the tokenizer's.
    """
    script = make_script(tokenizer, settings)
    templates = template or tokenizer.chat_template or ""
    known = len(script.end_ids) == 1 or settings.end_marker in str(templates)
    if not known and not settings.plain_text_markers:
        yield (
            f"{LOOP_KEY}={LOOP_NAME} needs a model that marks its thinking, but {settings.end_marker!r} is neither a "
            "token nor in the chat template of this one. If it uses other markers, set "
            f"{SECTION}.start_marker and .end_marker; if it was trained to write these as plain text, set "
            f"{SECTION}.plain_text_markers=True; if it does not think, set {LOOP_KEY}=single_turn_agent"
        )
        return
    problem = script.problem()
    if problem:
        yield f"{SECTION}.{problem}"
        return
    for validation in (False, True):
        try:
            resolve_budgets(settings, total, len(script.phrase_ids), script.grace_tokens, validation)
        except ValueError as error:
            yield f"{SECTION}.{error}"
            return
