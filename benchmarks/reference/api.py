# SPDX-License-Identifier: Apache-2.0
"""The functions of docs/api.md, from their signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "losses": (
        "scalerl_verl.loss",
        ("cispo_token_loss", "cispo_metrics", "mismatch_metrics", "aggregate_loss"),
    ),
    "weights": ("scalerl_verl.advantage", ("scalerl_advantages", "classify_groups", "row_weights")),
    "head": ("scalerl_verl.head", ("linear_logprobs", "shared_pass_logprobs", "vocab_parallel_logprobs")),
    "fit": ("scalerl_verl.scaling.fit", ("fit_curve", "sigmoid")),
}
"""Part of the page -> the module that the functions are imported from, and their names."""
_HEADING = re.compile(r"^(Args|Returns|Raises|Source):", re.MULTILINE)
_WORDS = {"Args": "Arguments", "Raises": "Errors"}


def section(part: str) -> str:
    """Every function of a part as Markdown."""
    module, names = SECTIONS[part]
    home = importlib.import_module(module)
    return "\n\n".join(describe(module, name, getattr(home, name)) for name in names)


def describe(module: str, name: str, function: Callable[..., Any]) -> str:
    """Heading, import, signature and docstring of a function."""
    summary, *rest = split(inspect.getdoc(function) or "")
    lines = [f"### {name}", "", "```py", f"from {module} import {name}", "", *signature(name, function), "```", ""]
    return "\n".join([*lines, prose(summary[1]), *(block for title, text in rest for block in titled(title, text))])


def signature(name: str, function: Callable[..., Any]) -> list[str]:
    """An argument a line."""
    found = inspect.signature(function)
    lines, starred = [], False
    for argument in found.parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            lines.append("    *,")
            starred = True
        # Annotations are strings of the source; a default that is a string keeps its quotes.
        lines.append(re.sub(r": '([^']*)'", r": \1", f"    {argument},").replace("'", '"'))
    result = str(found.return_annotation).strip("'")
    return [f"{name}(", *lines, f") -> {result}"]


def split(docstring: str) -> list[tuple[str, str]]:
    """(heading, text) of a docstring's parts; the first has no heading."""
    pieces = _HEADING.split(docstring)
    return [("", pieces[0]), *zip(pieces[1::2], pieces[2::2], strict=True)]


def titled(title: str, text: str) -> Iterator[str]:
    """A part with its heading: a list of names, or prose."""
    yield f"\n**{_WORDS.get(title, title)}**\n"
    body = textwrap.dedent(text.lstrip(" ")).strip("\n")
    if title in ("Returns", "Source"):
        yield prose(body)
        return
    for item in re.split(r"\n(?=\S)", body):
        named, _, said = item.partition(":")
        yield f"- `{named}`: {escape(' '.join(said.split()))}"


def prose(text: str) -> str:
    """Paragraphs as they are; what is indented is a formula or a table, in a block."""
    blocks = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            blocks.append("\n".join(["```text", *(line[4:] for line in lines), "```"]))
        else:
            blocks.append(escape(paragraph))
    return "\n\n".join(blocks)


def escape(text: str) -> str:
    """Stars and brackets of a formula are no Markdown; within backquotes all is as it stands."""
    parts = re.split(r"(`+[^`]*`+)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_\[\]<>|])", r"\\\1", part) for part in parts)
