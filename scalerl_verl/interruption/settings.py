# SPDX-License-Identifier: Apache-2.0
"""``algorithm.scalerl.interruption`` and ``.truncation_alarm``: reading them, and the start-up checks of the loop.

These stand under ``algorithm``, where verl lets keys pass that it does not know; its rollout section refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.interruption.budgets import InterruptionSettings, resolve_budgets
from scalerl_verl.interruption.lengths import AlarmSettings
from scalerl_verl.interruption.markers import ThinkingScript
from scalerl_verl.names import AGENT_LOOP, ALARM_SECTION, INTERRUPTION_LOOP, MODEL, ROLLOUT, VLLM, select
from scalerl_verl.names import INTERRUPTION_SECTION as SECTION
from scalerl_verl.names.keys import read_section
from scalerl_verl.names.numbers import number
from scalerl_verl.names.rules import read_by, under


def asks_for_interruption(config: DictConfig) -> bool:
    """Whether a composed config names our agent loop."""
    return bool(select(config, AGENT_LOOP) == INTERRUPTION_LOOP)


def read_settings(section: Any) -> InterruptionSettings:
    """The settings of a section ``algorithm.scalerl.interruption`` (or of its absence).

    Raises:
        ScaleRLConfigError: an unknown key or value.
    """
    return read_section(InterruptionSettings, SECTION, section)


def read_alarm(section: Any) -> AlarmSettings:
    """The settings of a section ``algorithm.scalerl.truncation_alarm`` (or of its absence).

    Raises:
        ScaleRLConfigError: an unknown key or value.
    """
    return read_section(AlarmSettings, ALARM_SECTION, section)


def _unread(config: DictConfig) -> Iterator[str]:
    if not asks_for_interruption(config) and OmegaConf.select(config, SECTION) is not None:
        reader, given = f"the agent loop {INTERRUPTION_LOOP}", select(config, AGENT_LOOP)
        yield read_by(SECTION, reader, AGENT_LOOP, INTERRUPTION_LOOP, given)


def _rollout(config: DictConfig) -> Iterator[str]:
    for key in ("tool_config_path", "function_tool_path"):
        if select(config, f"{ROLLOUT}.multi_turn.{key}"):
            yield (
                f"{ROLLOUT}.multi_turn.{key} is set, but {INTERRUPTION_LOOP} answers in a single turn and would never "
                f"call a tool: remove the tools, or set {AGENT_LOOP}=tool_agent (prompts with tools can name their own "
                "loop in a column agent_name)"
            )
    if select(config, f"{ROLLOUT}.enable_rollout_routing_replay", False):
        yield (
            f"{ROLLOUT}.enable_rollout_routing_replay=True: an interrupted response comes from several requests, and "
            "this loop does not join the routing that each of them recorded; set it False, or "
            f"{AGENT_LOOP}=single_turn_agent"
        )
    # verl lets vLLM's own key override its own, whatever that says.
    own, engine = (f"{section}.enable_prefix_caching" for section in (ROLLOUT, VLLM))
    path = own if select(config, engine) is None else engine
    if not select(config, path, True):
        yield f"{path}=False: every interrupted response would be prefilled a second time; set it True"


RULES = (_unread, under(asks_for_interruption, _rollout))
"""Contradictions of the loop with the rest of the config (not within its section, which is reported with it)."""


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
    try:
        settings = read_settings(OmegaConf.select(config, SECTION))
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
            f"the tokenizer of {path}, whose markers {INTERRUPTION_LOOP} needs, cannot be loaded: "
            f"{type(error).__name__}: {error}"
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
            f"{AGENT_LOOP}={INTERRUPTION_LOOP} needs a model that marks its thinking, but {settings.end_marker!r} is "
            "neither a token nor in the chat template of this one. If it uses other markers, set "
            f"{SECTION}.start_marker and .end_marker; if it was trained to write these as plain text, set "
            f"{SECTION}.plain_text_markers=True; if it does not think, set {AGENT_LOOP}=single_turn_agent"
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
