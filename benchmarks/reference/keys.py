# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/reference.md and docs/symbols.md, from the code: presets, keys, metrics, commands, symbols."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from benchmarks.markdown import table
from scalerl_verl import metrics, names
from scalerl_verl.advantage.length_penalty import LengthPenalty
from scalerl_verl.cli import build_parser
from scalerl_verl.config.settings import AlgorithmSettings
from scalerl_verl.curriculum import ResamplingRules
from scalerl_verl.interruption.budgets import InterruptionSettings
from scalerl_verl.interruption.lengths import AlarmSettings
from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.names.keys import KEYS
from scalerl_verl.pipeline.settings import OffPolicySettings, PipelineSettings
from scalerl_verl.upstream import activation
from scalerl_verl.verl.patches import SYMBOLS

PRESETS = Path(metrics.__file__).parent / "configs" / names.PRESET_GROUP
SECTIONS: dict[str, Any] = {
    names.ALGORITHM_SECTION: AlgorithmSettings,
    names.INTERRUPTION_SECTION: InterruptionSettings,
    names.ALARM_SECTION: AlarmSettings,
    f"{names.SHAPING_SECTION}.{names.LENGTH_PENALTY}": LengthPenalty,
    names.LOSS_SECTION: PolicyLossSettings,
    names.SAMPLER_SECTION: ResamplingRules,
    names.PIPELINE_SECTION: PipelineSettings,
    names.OFF_POLICY_SECTION: OffPolicySettings,
}
"""Section of the config -> the class that reads it, whose docstring describes every key."""
FILLED_IN = {
    f"{names.SAMPLER_SECTION}.min_prompts": "one batch",
    f"{names.SAMPLER_SECTION}.min_responses": "half a group",
}
"""Keys whose default is another one in a run than in the class."""
OTHER_KEYS = {
    names.SAMPLER_LOG_FILE: (
        f"`{names.SAMPLER_LOG_NAME}` beside the checkpoints",
        "list of what was dropped, when and why",
    ),
    names.POLL_INTERVAL: (
        f"{names.VERL_POLL_INTERVAL_S} (verl's)",
        "seconds between looks into verl's replay buffer, any trainer mode",
    ),
    f"{names.SHAPING_SECTION}.{names.EXCLUDE_TRUNCATED}": (
        "absent",
        "`{}` leaves truncated responses out of the loss, of every denominator and of their group's mean",
    ),
}
"""Keys that no class of ours holds -> (default, meaning)."""
ENVIRONMENT = {
    activation.PLATFORM_ENV: "`cpu`: verl's whole loop on the CPU",
    activation.STATUS_DIR_ENV: "folder for a file a process, by host and pid; `scalerl doctor --run-dir` reads it",
    activation.SYNC_TIMEOUT_ENV: "seconds of silence in a weight update of verl's trainers after which the run ends "
    f"(default {names.DEFAULT_SYNC_TIMEOUT_S:g})",
    activation.ALLOW_UNKNOWN_ENV: "`1`: patch a symbol whose source is not a known one, at your own risk",
    activation.ACTIVE_ENV: "`1` in every process of a run whose start-up check passed; set by the driver, not by you",
    activation.DRIVER_ENV: "what is installed where the driver runs, to compare the nodes of a cluster with; set by "
    "the driver, not by you",
    activation.ROOT_LEVEL_ENV: "level of the root logger beside vLLM's server, which is ERROR without it; a run with "
    "our names sets `WARNING`, unless this or `LOG_LEVEL` is set",
}


def plain(text: str) -> str:
    """A docstring's text in one line of Markdown that a table can hold."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def argument_texts(cls: Any) -> dict[str, str]:
    """Argument -> its description in the docstring of a class.

    Raises:
        ValueError: a field of the class is not described.
    """
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines()
    begin = lines.index("Args:") + 1
    block = textwrap.dedent("\n".join(line for line in lines[begin:] if not line or line.startswith(" ")))
    found = {name: plain(text) for name, text in re.findall(r"^(\w+): (.*(?:\n +.*)*)", block, re.MULTILINE)}
    missing = [field.name for field in dataclasses.fields(cls) if field.name not in found]
    if missing:
        raise ValueError(f"{cls.__name__}: {', '.join(missing)} stand in no Args: of its docstring")
    return found


def keys_table() -> str:
    """Every config key of ours: default and meaning."""
    rows = {}
    for section, cls in SECTIONS.items():
        texts = argument_texts(cls)
        for field in dataclasses.fields(cls):
            path = f"{section}.{field.name}"
            value = KEYS[section][field.name].default
            default = FILLED_IN.get(path, f"`{'null' if value is None else value}`")
            rows[path] = (default, texts[field.name])
    found = sorted({**rows, **OTHER_KEYS}.items())
    return table(
        ("key", "default", "meaning"), ((f"`{path}`", plain(default), text) for path, (default, text) in found)
    )


def preset_text(path: Path) -> str:
    """The comment at the head of a preset."""
    comments = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        if not line.startswith("#"):
            break
        comments.append(line.removeprefix("#").strip())
    return plain(" ".join(comments))


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Path -> value of every leaf of a preset's own part."""
    if isinstance(node, dict) and node:
        found: dict[str, Any] = {}
        for key, value in node.items():
            found |= leaves(value, f"{prefix}{key}.")
        return found
    return {prefix.removesuffix("."): node}


def presets_table() -> str:
    """One line a preset: what it is, and the presets it stands on."""
    lines = []
    for path in sorted(PRESETS.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        parents = ", ".join(f"`{name}`" for name in content.get("defaults", []) if name != "_self_")
        lines.append((f"`{path.stem}`", preset_text(path), parents))
    return table(("preset", "what", "built on"), lines)


def preset_keys_table() -> str:
    """Every key that a preset sets itself; what it is built on comes on top."""
    lines = []
    for path in sorted(PRESETS.glob("*.yaml")):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content.pop("defaults", None)
        for key, value in leaves(content).items():
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            if key:
                lines.append((f"`{path.stem}`", f"`{key}`", f"`{plain(str(shown))}`"))
    return table(("preset", "key", "value"), lines)


def metrics_table() -> str:
    """Every metric of ours."""
    lines = ((f"`{name}`", text.replace("|", "\\|")) for name, text in metrics.METRICS.items())
    return table(("metric `scalerl/...`", "meaning"), lines)


def environment_table() -> str:
    """Every environment variable that we read or set."""
    known = {value for name, value in vars(activation).items() if name.endswith("_ENV") and isinstance(value, str)}
    if known != set(ENVIRONMENT):
        raise ValueError(
            f"ENVIRONMENT of benchmarks/reference/keys.py and activation.py differ: {known ^ set(ENVIRONMENT)}"
        )
    return table(("variable", "meaning"), ((f"`{name}`", text) for name, text in ENVIRONMENT.items()))


def commands_table() -> str:
    """Every sub-command of ``scalerl`` with its options."""
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help for choice in commands._choices_actions}
    lines = []
    for name, parser in commands.choices.items():
        options = ", ".join(
            f"`{a.option_strings[-1]}`" for a in parser._actions if a.option_strings and a.dest != "help"
        )
        lines.append((f"`scalerl {name}`", plain(helps[name] or ""), options))
    return table(("command", "what", "options"), lines)


def errors_table() -> str:
    """Every error that this package raises on purpose."""
    from scalerl_verl import errors

    tree = ast.parse(inspect.getsource(errors))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "ScaleRLError")
    return table(("error", "meaning"), ((f"`{node.name}`", plain(ast.get_docstring(node) or "")) for node in classes))


_UNCHANGED = ("override", "call")
"""Kinds of entries that leave verl and vLLM as they are."""


def symbols_table() -> str:
    """Every upstream symbol we touch."""
    lines = ((f"`{s.module}.{s.target}`", s.kind, s.when, s.why, s.removal) for s in SYMBOLS)
    return table(("symbol", "how", "when", "why", "goes when"), lines)


def symbols_summary() -> str:
    """How many symbols are changed, and when; how many are left as they are behind classes of ours."""
    meaning = {
        "always": "in every process; passes everything of others through",
        "named": "only in runs that use one of our names",
        "cpu": "only with `VERL_PLATFORM=cpu`",
        "override": "stays as it is: a subclass of ours, which verl takes by a name in the config, stands in front",
        "call": "stays as it is: our code calls it, or reads its attributes",
    }
    groups = [(s.kind if s.kind in _UNCHANGED else s.when, s.distribution) for s in SYMBOLS]
    lines = (
        (f"`{group}`", *(groups.count((group, name)) for name in ("verl", "vllm")), text)
        for group, text in meaning.items()
    )
    return table(("when", "verl", "vLLM", "what that means"), lines)
