# SPDX-License-Identifier: Apache-2.0
"""Does an upstream definition take the call that we make, and has it the attributes that we read?"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef


def takes_call(source: str, call: str) -> bool:
    """Whether the function defined by ``source`` can be called as in ``call``.

    Args:
        source: text of a ``def``, decorators included, of any indentation.
        call: as we write it, ``self`` or ``cls`` included: ``await abort(self, request_id, internal=True)``. A name or
            constant stands for any value; ``await`` in front says that the function has to be a coroutine.
    """
    function = _definition(source)
    wanted = ast.parse(call, mode="eval").body
    if isinstance(wanted, ast.Await) != isinstance(function, ast.AsyncFunctionDef):
        return False
    wanted = wanted.value if isinstance(wanted, ast.Await) else wanted
    if not isinstance(function, Function) or not isinstance(wanted, ast.Call):
        return False
    named = {keyword.arg: None for keyword in wanted.keywords if keyword.arg is not None}
    try:
        _signature(function.args).bind(*wanted.args, **named)
    except TypeError:
        return False
    return True


def missing_attributes(source: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that the class defined by ``source`` neither defines nor sets on ``self``."""
    found = set(_attributes(_definition(source)))
    return [name for name in names if name not in found]


def _definition(source: str) -> ast.stmt:
    return ast.parse(textwrap.dedent(source)).body[0]


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """The names, kinds and presence of defaults; a default's value does not matter."""
    kinds = inspect.Parameter
    positional = [
        *((argument.arg, kinds.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument.arg, kinds.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    num_required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(name, kind, default=kinds.empty if index < num_required else None)
        for index, (name, kind) in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    if arguments.kwarg:
        parameters.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _attributes(definition: ast.stmt) -> Iterator[str]:
    if not isinstance(definition, ast.ClassDef):
        return
    for node in definition.body:
        if isinstance(node, Function):
            yield node.name
    for inner in ast.walk(definition):
        if isinstance(inner, ast.Assign | ast.AnnAssign):
            for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                yield from _bound_names(target)


def _bound_names(target: ast.expr) -> Iterator[str]:
    """``x`` of ``x = ...`` in a class and of ``self.x = ...`` in its methods."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
