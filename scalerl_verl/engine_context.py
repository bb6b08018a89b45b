# SPDX-License-Identifier: Apache-2.0
"""The context of the generating engine: what it holds of a prompt and its response, and runs that do not fit into it.

verl's server cuts ``max_tokens`` to what is left of the context without a word, and reports the same reason for a
response that ended by itself and for one that was cut.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.names import MODEL, ROLLOUT, VLLM, select

LIMIT_KEYS = (f"{ROLLOUT}.max_model_len", f"{VLLM}.max_model_len")
"""Explicit limits: verl's server cuts by the first, vLLM by the second."""
_POSITIONS = "max_position_embeddings"
_logger = logging.getLogger(__name__)


def _whole(value: Any) -> int | None:
    """A number of tokens, or None for what is none (another check refuses it)."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def explicit_limits(config: Any) -> dict[str, int]:
    """Key -> tokens of every limit of the context that stands in the config."""
    if not isinstance(config, DictConfig):
        return {}
    found = {key: _whole(select(config, key)) for key in LIMIT_KEYS}
    return {key: limit for key, limit in found.items() if limit is not None}


def longest_sequence(config: Any) -> int | None:
    """Tokens of the longest prompt with the longest response, in training and validation alike; None if not given."""
    prompt, response = (_whole(select(config, f"{ROLLOUT}.{key}")) for key in ("prompt_length", "response_length"))
    return None if prompt is None or response is None else prompt + response


def model_positions(hf_config: Any) -> int | None:
    """Tokens that verl takes for the context of a model where nothing limits it: its ``max_position_embeddings``.

    verl does not scale them by the model's rope scaling, and refuses ``rollout.max_model_len`` above them; it takes
    them from the text part of a model of several.

    Args:
        hf_config: transformers' config, or the content of a ``config.json``.
    """
    for part in (hf_config, _get(hf_config, "text_config")):
        positions = _whole(_get(part, _POSITIONS))
        if positions is not None:
            return positions
    return None


def _get(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def engine_context(config: Any, hf_config: Any) -> int | None:
    """Tokens of prompt and response that the engine holds; None where neither config nor model say it.

    Args:
        config: the run's.
        hf_config: as of `model_positions`, or None if unknown.
    """
    limits = explicit_limits(config)
    if LIMIT_KEYS[0] not in limits:
        positions = None if hf_config is None else model_positions(hf_config)
        limits |= {_POSITIONS: positions} if positions is not None else {}
    return min(limits.values(), default=None)


def read_hf_config(config: Any) -> Any:
    """The model's config as verl will have it, overrides included; None if it is not on this machine.

    A folder is read, a model id is looked for in Hugging Face's cache; nothing is downloaded.
    """
    path = select(config, f"{MODEL}.hf_config_path") or select(config, f"{MODEL}.path")
    if not path or "://" in str(path):
        return None
    found = _load(str(path), bool(select(config, f"{MODEL}.trust_remote_code", False)))
    if found is None:
        return None
    overrides = OmegaConf.select(config, f"{MODEL}.override_config")
    given: Any = OmegaConf.to_container(overrides, resolve=True) if isinstance(overrides, DictConfig) else {}
    return {**found, **(given.get("model_config") or given)}


_loaded: dict[tuple[str, bool], dict[str, Any]] = {}


def _load(path: str, trust_remote_code: bool) -> dict[str, Any] | None:
    """A model's config, read once: every batch asks for it. What is not there yet may be later."""
    key = path, trust_remote_code
    if key not in _loaded:
        from transformers import AutoConfig

        folder = Path(path).expanduser()
        try:
            found = AutoConfig.from_pretrained(
                str(folder) if folder.is_dir() else path, trust_remote_code=trust_remote_code, local_files_only=True
            ).to_dict()
        except Exception:  # noqa: BLE001 - transformers fails in any way on a kind that it does not know
            found = _read_json(folder / "config.json")
        if found is None:
            return None
        _loaded[key] = found
    return _loaded[key]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the check of the model's folder says so
    return content if isinstance(content, dict) else None


def is_at_limit(tag: Mapping[str, Any], max_length: int, context: int | None) -> bool:
    """Whether a row has the greatest length allowed, or fills the engine's context: it was cut, or ended right there.

    Args:
        tag: verl's of the row.
        max_length: ``data.max_response_length``, tokens.
        context: tokens of prompt and response that the engine holds; None if unknown.
    """
    return int(tag["response_len"]) >= max_length or fills_context(tag, context)


def fills_context(tag: Mapping[str, Any], context: int | None) -> bool:
    """Whether prompt and response of a row fill the engine's context."""
    return context is not None and int(tag.get("seq_len", 0)) >= context


_warned: set[int | None] = set()


def warn_of_clamps(num_clamped: int, context: int | None, max_length: int) -> None:
    """Say once that the engine ended responses before their budget."""
    if not num_clamped or context in _warned:
        return
    _warned.add(context)
    held = f"{context} tokens" if context is not None else "fewer tokens than a response needs"
    _logger.warning(
        f"{num_clamped} responses of a batch were cut where the engine's context ended ({held}), before "
        f"data.max_response_length={max_length}; they count as truncated (scalerl/length/clamped_fraction). Raise "
        f"{LIMIT_KEYS[0]}, or lower data.max_prompt_length or data.max_response_length"
    )


def find_problems(config: DictConfig) -> Iterator[str]:
    """Limits in the config that are too short for a prompt and its response."""
    longest = longest_sequence(config)
    for key, limit in explicit_limits(config).items():
        if longest is not None and limit < longest:
            yield (
                f"{key}={limit} is less than data.max_prompt_length + data.max_response_length = {longest}: the engine "
                "would cut responses before their budgets end, and report them as complete; raise it"
            )


def find_model_problems(config: DictConfig) -> Iterator[str]:
    """A model whose context is too short; needs its ``config.json``."""
    longest = longest_sequence(config)
    hf_config = read_hf_config(config)
    positions = None if hf_config is None else model_positions(hf_config)
    if positions is None or longest is None:
        return
    limit = explicit_limits(config).get(LIMIT_KEYS[0])
    stretch = (
        f"if its rope scaling reaches further, set +{MODEL}.override_config.{_POSITIONS} to what it reaches "
        "(verl does not count rope scaling)"
    )
    if limit is None and positions < longest:
        yield (
            f"{LIMIT_KEYS[0]} is not set, so the engine takes the model's {_POSITIONS}={positions}, which is less than "
            f"data.max_prompt_length + data.max_response_length = {longest}: it would cut responses before their "
            f"budgets end, and report them as complete; lower the lengths, or {stretch}"
        )
    elif limit is not None and positions < limit:
        yield (
            f"{LIMIT_KEYS[0]}={limit} exceeds the model's {_POSITIONS}={positions}, which verl refuses when the "
            f"generators start: lower it, or {stretch}"
        )
