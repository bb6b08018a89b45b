# SPDX-License-Identifier: Apache-2.0
"""Bound sources, imports and signatures of one version, without importing it."""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scalerl_verl.upstream.spec import PatchSpec, source_problem, text_hash
from scalerl_verl.upstream.static_source import find_file, has_name, read_source
from scalerl_verl.verl.patches import SYMBOLS
from tests.paths import REPO
from tests.upstream.watch.trees import Tree

PACKAGE = REPO / "scalerl_verl"


@dataclass(frozen=True)
class Change:
    """A bound symbol that is not what we know.

    Args:
        name: of its entry in the table of symbols.
        what: how it differs, in words.
        diff: from the installed source to the new one; empty where one of them is missing.
    """

    name: str
    what: str
    diff: str = ""


@dataclass
class Findings:
    """What differs in a tree.

    Args:
        tree: what was looked at.
        bound: number of its symbols that we bind.
        changed: those that differ.
        missing: import that finds nothing -> files of ours that make it.
        signatures: imported name -> how its arguments differ from those in the installed version.
    """

    tree: Tree
    bound: int
    changed: list[Change] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not (self.changed or self.missing or self.signatures)


def look_at(tree: Tree) -> Findings:
    """Compare a tree with what we bind and import; signatures and diffs are against the installed version."""
    specs = due_symbols(tree)
    found = Findings(tree, len(specs))
    found.changed = [change for spec in specs if (change := _compare_symbol(spec, tree.folder)) is not None]
    for (module, name), files in sorted(our_imports(tree.package).items()):
        label = f"{module}.{name}" if name else module
        there = has_name(module, name, tree.folder) if name else find_file(module, tree.folder) is not None
        if not there:
            found.missing[label] = files
        elif name and (text := _changed_arguments(module, name, tree.folder)):
            found.signatures[label] = text
    return found


def due_symbols(tree: Tree) -> list[PatchSpec]:
    """What we bind in a tree; a GPU build of vLLM runs on no CPU, so that what is bound for the CPU is of no matter."""
    has_cpu = tree.distribution != "vllm" or not tree.is_release
    return [spec for spec in SYMBOLS if spec.distribution == tree.package and (has_cpu or spec.when != "cpu")]


def _compare_symbol(spec: PatchSpec, root: Path) -> Change | None:
    symbol = f"{spec.module}.{spec.target}"
    try:
        new = read_source(spec.module, spec.target, root)
    except ModuleNotFoundError:
        return Change(spec.name, f"{symbol}: its module is gone")
    except AttributeError:
        return Change(spec.name, f"{symbol} is gone")
    old = _installed(spec.module, spec.target)
    if new is None:  # a value, or inherited: only an import could tell more
        return (
            None if old is None else Change(spec.name, f"{symbol} is not defined there, at most inherited or a value")
        )
    problem = source_problem(spec, new)
    if problem is None:
        return None
    if old is None:
        return Change(spec.name, problem)
    text = compare_arguments(old, new)
    return Change(spec.name, f"{problem}; arguments {text}" if text else problem, _diff(old, new))


def _installed(module: str, target: str) -> str | None:
    try:
        return read_source(module, target)
    except (ModuleNotFoundError, AttributeError):
        return None


def _diff(old: str, new: str) -> str:
    lines = [textwrap.dedent(text).splitlines() for text in (old, new)]
    return "\n".join(difflib.unified_diff(*lines, "installed", f"new, hash {text_hash(new)}", n=1, lineterm=""))


def arguments(source: str) -> list[str]:
    """Arguments of a function, of a class's ``__init__``, or the fields of a class without one; types are left out."""
    node = ast.parse(textwrap.dedent(source)).body[0]
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not inits:
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            return [ast.unparse(n.target) + (f"={ast.unparse(n.value)}" if n.value else "") for n in fields]
        node = inits[-1]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    found = [_argument(name, default) for name, default in zip(plain, defaults, strict=True)]
    found += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    found += [_argument(name, default) for name, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*found, *([f"**{given.kwarg.arg}"] if given.kwarg else [])]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def compare_arguments(old: str, new: str, *, only_breaking: bool = False) -> str:
    """In words, from source to source; empty where they are the same.

    Args:
        old: a definition.
        new: another one of the same name.
        only_breaking: leave out new arguments that nobody has to give.
    """
    before, after = arguments(old), arguments(new)
    gone, added = [a for a in before if a not in after], [a for a in after if a not in before]
    if only_breaking:
        after = [a for a in after if a in before or not ("=" in a or a.startswith("*"))]
        added = [a for a in added if a in after]
    parts = [f"without {', '.join(gone)}" if gone else "", f"with {', '.join(added)}" if added else ""]
    text = ", ".join(part for part in parts if part)
    return text or ("in another order" if before != after else "")


def _changed_arguments(module: str, name: str, root: Path) -> str:
    """Of an imported name; empty where they are the same, or it is no function or class in a file."""
    old = _installed(module, name)
    try:
        new = read_source(module, name, root)
    except (ModuleNotFoundError, AttributeError):
        return ""
    return "" if old is None or new is None else compare_arguments(old, new, only_breaking=True)


def our_imports(package: str) -> dict[tuple[str, str], list[str]]:
    """(module, name) -> our files that import it; the name is empty for a module that is imported whole."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for module, name in _imports(ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
            if module.split(".")[0] == package:
                files = found.setdefault((module, name), [])
                files += [str(path.relative_to(REPO))] if str(path.relative_to(REPO)) not in files else []
    return found


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.args[0].value, ""
