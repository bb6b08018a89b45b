# SPDX-License-Identifier: Apache-2.0
"""Source of an upstream symbol read from its file: imports nothing, so that the driver can look before Ray starts."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find_file(module: str, root: Path | None = None) -> Path | None:
    """The file of a module; None if there is none.

    Args:
        module: its dotted name.
        root: folder that holds the package; without it the installed package is looked at (its ``__init__`` is not
            run: ``find_spec`` of a submodule would import its parents).
    """
    top, *rest = module.split(".")
    if root is not None:
        folders = [str(root / top)]
    else:
        spec = importlib.util.find_spec(top)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder).joinpath(*rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@functools.cache
def _parse(file: Path) -> tuple[list[str], ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text.splitlines(keepends=True), ast.parse(text)


def read_source(module: str, target: str, root: Path | None = None) -> str | None:
    """Text of a function or class at an attribute path of a module, as `inspect.getsource` gives it.

    Args:
        module: where it is looked for.
        target: its attribute path; a name that the module imports is followed.
        root: folder that holds the package, in place of the installed one.

    Returns:
        None where no file defines it by ``def`` or ``class``: a value, or an inherited name.

    Raises:
        ModuleNotFoundError: there is no such module.
        AttributeError: nothing in the module's file binds the name.
    """
    file = find_file(module, root)
    if file is None:
        raise ModuleNotFoundError(module)
    text = _read_definition(file, target)
    if text is not None or "." in target:
        return text
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_parse(file)[1]):
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == target:
                source = ("." * node.level) + (node.module or "")
                return read_source(importlib.util.resolve_name(source, package), alias.name, root)
    return None


def has_name(module: str, name: str, root: Path | None = None) -> bool:
    """Whether ``from module import name`` finds something, as far as files say it.

    A submodule counts, and so does a module's own ``__getattr__`` where its file speaks of the name. What stars import
    is looked for where they point.
    """
    file = find_file(module, root)
    if file is None:
        return False
    if find_file(f"{module}.{name}", root) is not None:
        return True
    lines, tree = _parse(file)
    if any(child.name == name for child in _definitions(tree)):
        return True
    if any(child.name == "__getattr__" for child in _definitions(tree)) and any(name in line for line in lines):
        return True
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (alias.asname or alias.name.split(".")[0]) == name:
                return True
            if alias.name == "*" and isinstance(node, ast.ImportFrom):
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if source.split(".")[0] == module.split(".")[0] and has_name(source, name, root):
                    return True
    return False


def _read_definition(file: Path, target: str) -> str | None:
    lines, tree = _parse(file)
    node: ast.Module | Definition = tree
    for name in target.split("."):
        found = [child for child in _definitions(node) if child.name == name]
        if not found:
            if _may_bind(node, name):
                return None
            raise AttributeError(target)
        node = found[-1]
    assert isinstance(node, Definition)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "".join(inspect.getblock(lines[first - 1 :]))


def _definitions(node: ast.Module | Definition) -> list[Definition]:
    """Definitions in a body, those inside ``if`` and ``try`` included."""
    found: list[Definition] = []
    pending: list[ast.AST] = list(node.body)
    while pending:
        child = pending.pop(0)
        if isinstance(child, Definition):
            found.append(child)
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            pending += ast.iter_child_nodes(child)
    return found


def _may_bind(node: ast.Module | Definition, name: str) -> bool:
    """Whether a name may come from elsewhere: assigned, imported, inherited."""
    if isinstance(node, ast.ClassDef) and node.bases:
        return True
    for child in ast.walk(node):
        if isinstance(child, ast.alias) and (child.asname or child.name).split(".")[0] in (name, "*"):
            return True
        if isinstance(child, ast.Name) and child.id == name and isinstance(child.ctx, ast.Store):
            return True
    return False
