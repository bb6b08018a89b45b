# SPDX-License-Identifier: Apache-2.0
"""What a composed config, or a command line, asks for by our names, rightly spelt or not."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from scalerl_verl import names
from scalerl_verl.names import ACTIVE_ENV, ADV_ESTIMATOR, ALGORITHM_KEY, ESTIMATOR, HEAD_DTYPE, PLATFORM_ENV, V1, VALUES
from scalerl_verl.names.keys import KEYS
from scalerl_verl.names.reading import select

OWN_KEYS = tuple(KEYS[names.ALGORITHM_SECTION])
"""Keys of ``algorithm.scalerl``."""
FOR_ANY_ESTIMATOR = frozenset(OWN_KEYS) - {"adv_norm", "zero_variance"}
"""Those that do not need the estimator ``scalerl``."""
LOSS_KEYS = ("eps_max", "token_mask", "sequence_trunc", *KEYS[names.LOSS_SECTION])
"""Beginnings of our keys of the loss."""
_POLL_KEYS = ("poll_interval",)
SECTIONS: dict[str, tuple[str, ...]] = {
    "": (names.PRESET_GROUP,),
    "algorithm": (ALGORITHM_KEY, *OWN_KEYS),
    names.LOSS_SECTION: LOSS_KEYS,
    V1: (names.PIPELINE_RL, names.PPO_OFF_POLICY),
    f"{V1}.sampler": _POLL_KEYS,
    names.POLL_SECTION: _POLL_KEYS,
}
"""Config section -> beginnings of keys that verl does not have and a user of ours may put there, rightly or not."""
_OWN_SECTIONS = {"algorithm": (ALGORITHM_KEY,), V1: SECTIONS[V1]}
"""Section of verl's -> sections of ours below it."""
_ABOVE_V1 = ("", "trainer")
"""Where a section of ours that stands below `V1` is looked for by nobody."""
_ALIKE = 0.85
"""Similarity from which a value counts as a misspelling: lets verl's `cispo` and `seq-mean-token-mean` pass."""
_PART = 6
"""Letters from which a part of a name (`pipeline`, `off_policy`) counts as one: lets verl's `cispo` pass."""
PREFIXES = ("scalerl", "fp32", "fp-32", "float32", "float-32", "torch.float32")
"""Beginnings of values that verl has none of: where one of our names may stand, such a value was meant to be one."""


def is_cpu_platform(environ: Mapping[str, str] = os.environ) -> bool:
    """``VERL_PLATFORM=cpu``: verl's whole loop runs on the CPU."""
    return environ.get(PLATFORM_ENV, "").strip().lower() == "cpu"


def trainer_mode(config: Any) -> str:
    """``trainer.v1.trainer_mode``, or verl's default."""
    return str(select(config, names.TRAINER_MODE, "sync"))


def loss_mode(config: Any) -> str:
    """The policy loss, or verl's default."""
    return str(select(config, names.LOSS_MODE, "vanilla"))


def loss_agg_mode(config: Any) -> str:
    """The aggregation of the policy loss, or verl's default."""
    return str(select(config, names.LOSS_AGG_MODE, "token-mean"))


def is_bypassed(config: Any) -> bool:
    """Whether old log-probs are those that were recorded at sampling."""
    return bool(select(config, names.BYPASS_MODE, False))


def uses_estimator(config: Any) -> bool:
    """Whether the advantages are ours."""
    return bool(select(config, ADV_ESTIMATOR) == ESTIMATOR)


def only_validates(config: Any) -> bool:
    """Whether a run ends after verl's validation before training: it is no attempt at the run in its folder."""
    return bool(select(config, "trainer.val_only") and select(config, "trainer.val_before_train", True))


def _peek(config: Any, path: str) -> Any:
    """`select`, or None where the way there is no section or refers to what is not there: both are reported apart."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        return select(config, path)
    except OmegaConfBaseException:
        return None


def generator_head_dtype(config: Any) -> Any:
    """vLLM's head dtype as configured, or None; `hf_overrides` may be a section or JSON text."""
    overrides = _peek(config, names.HF_OVERRIDES)
    if isinstance(overrides, str):
        try:
            overrides = json.loads(overrides)
        except ValueError:
            return None  # vLLM refuses such text itself
    if isinstance(overrides, dict):
        return overrides.get("head_dtype")
    return _peek(config, HEAD_DTYPE) if hasattr(overrides, "keys") else None


def _value(config: Any, path: str) -> str:
    """The value at a path as text."""
    return str((generator_head_dtype(config) or "") if path == HEAD_DTYPE else _peek(config, path) or "")


def _keys(config: Any, section: str) -> list[str]:
    """Keys of a section, of the whole config for ""; none where there is no section."""
    found = _peek(config, section) if section else config
    return [str(key) for key in found] if hasattr(found, "keys") else []


def near_miss(value: str, known: Iterable[str]) -> str | None:
    """The name of ours most like ``value``, which was probably meant; None if it is one of them or like none."""
    if value in known:
        return None
    folded = value.casefold().replace("_", "-")
    likeness = {name: difflib.SequenceMatcher(None, folded, name.replace("_", "-")).ratio() for name in sorted(known)}
    candidates = [name for name, ratio in likeness.items() if ratio >= _ALIKE or _is_part(folded, name)]
    if not candidates and folded.startswith(PREFIXES):
        candidates = list(likeness)
    return max(candidates, key=lambda name: likeness[name], default=None)


def _is_part(folded: str, name: str) -> bool:
    """Whether a value is the beginning or the end of a name, in whole words."""
    own = name.replace("_", "-")
    return len(folded) >= _PART and (own.startswith(f"{folded}-") or own.endswith(f"-{folded}"))


def near_misses(config: Any) -> dict[str, tuple[str, str]]:
    """Config path -> (value given, name probably meant)."""
    found = {}
    for path, known in VALUES.items():
        value = _value(config, path)
        meant = near_miss(value, known)
        if meant is not None:
            found[path] = (value, meant)
    return found


def misspelt_sections(config: Any) -> dict[str, str]:
    """Path of a key that was probably meant to be a section of ours -> the path of that section."""
    found = {}
    for section, known in _OWN_SECTIONS.items():
        for key in _keys(config, section):
            if (meant := near_miss(key, known)) is not None:
                found[f"{section}.{key}"] = f"{section}.{meant}"
    for section in _ABOVE_V1:
        # In full only: a user's own keys stand there, too.
        for key in _keys(config, section):
            if (meant := key.casefold().replace("-", "_")) in SECTIONS[V1]:
                found[f"{section}.{key}".lstrip(".")] = f"{V1}.{meant}"
    return found


def top_level_keys(config: Any) -> list[str]:
    """Keys of no section that were probably meant for our presets; verl takes any without a word."""
    alike = [key for key in _keys(config, "") if re.sub("[-_]", "", key.casefold()).startswith(names.PRESET_GROUP)]
    return [key for key in alike if _peek(config, key) is not None]


def asked_names(config: Any) -> dict[str, str]:
    """Config path -> value for each of our names in use (near misses too); the CPU platform counts as one."""
    found = {path: value for path, (value, _) in near_misses(config).items()}
    for path, known in VALUES.items():
        value = _value(config, path)
        if value in known:
            found[path] = value
    for section, prefixes in SECTIONS.items():
        for key in _keys(config, section):
            if key.casefold().startswith(prefixes):
                found[f"{section}.{key}".lstrip(".")] = "set"
    found |= dict.fromkeys([*top_level_keys(config), *misspelt_sections(config)], "set")
    if is_cpu_platform():
        found[PLATFORM_ENV] = "cpu"
    return found


def asks_on_command_line(arguments: Iterable[str], environ: Mapping[str, str]) -> bool:
    """Whether overrides or the environment use one of our names, before any config is composed.

    Args:
        arguments: Hydra's overrides; a value that merely contains one of our names (a path) asks for nothing.
        environ: the process's environment.
    """
    return environ.get(ACTIVE_ENV) == "1" or is_cpu_platform(environ) or any(map(_is_ours, arguments))


def _is_ours(argument: str) -> bool:
    """One override: ``[+|++]key[@package]=value``; the value may be a dict that holds the rest of the path."""
    key, equals, value = argument.strip("'\"").partition("=")
    if not equals or key.startswith("~"):
        return False
    path = key.lstrip("+").partition("@")[0].strip("/")
    if _in_section(path):
        return True
    value = value.strip("'\"")
    if path in VALUES:
        return value in VALUES[path] or near_miss(value, VALUES[path]) is not None
    return any(_holds(value, path, ours) for ours in VALUES) or any(_holds_section(value, path, s) for s in SECTIONS)


def _in_section(path: str) -> bool:
    inside = {s: path if not s else path.removeprefix(f"{s}.") for s in SECTIONS if not s or path.startswith(f"{s}.")}
    return any(rest.casefold().startswith(SECTIONS[section]) for section, rest in inside.items())


def _holds(value: str, path: str, ours: str) -> bool:
    """Whether a dict given at ``path`` holds our value of ``ours``: ``hf_overrides={head_dtype:float32}``."""
    if not ours.startswith(f"{path}."):
        return False
    leaf = re.escape(ours.rpartition(".")[2])
    found = re.findall(rf"\b{leaf}['\"]?\s*[:=]\s*['\"]?([\w.\-]+)", value)
    return any(name in VALUES[ours] or near_miss(name, VALUES[ours]) is not None for name in found)


def _holds_section(value: str, path: str, section: str) -> bool:
    """Whether a dict given at ``path`` has keys of ours: ``algorithm={scalerl:{adv_norm:batch}}``."""
    if not section or not (section == path or section.startswith(f"{path}.")):
        return False
    keys = re.findall(r"([\w.\-]+)['\"]?\s*:", value)
    return any(key.startswith(SECTIONS[section]) for key in keys)
