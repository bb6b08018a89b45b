# SPDX-License-Identifier: Apache-2.0
"""The form of a function that we call, and the attributes of a class that we read, told by source text."""

from __future__ import annotations

import inspect

import pytest

from scalerl_verl.upstream.forms import missing_attributes, takes_call

ABORT = """
    @traced
    async def abort(self, request_id: str, /, reason="none", *others, internal: bool, force=False) -> None:
        pass
"""


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ("await abort(self, request_id, internal=True)", True),
        ("await abort(self, request_id, reason, more, internal=True, force=True)", True),
        ("await abort(self, request_id, reason='x', internal=True)", True),
        ("abort(self, request_id, internal=True)", False),  # it is a coroutine
        ("await abort(self, request_id)", False),  # without a default
        ("await abort(self, request_id=request_id, internal=True)", False),  # by position only
        ("await abort(self, request_id, internal=True, gone=1)", False),
        ("await abort(internal=True)", False),
    ],
)
def test_call_fits_a_signature(call: str, fits: bool) -> None:
    assert takes_call(ABORT, call) is fits


def test_signature_that_takes_anything_takes_any_call() -> None:
    assert takes_call("def run(self, *args, **kwargs):\n    pass\n", "run(self, 1, 2, three=3)")


def test_what_is_no_function_takes_no_call() -> None:
    assert not takes_call("class Run:\n    pass\n", "Run()")


class Owner:
    """Stands for a class of upstream's."""

    annotated: int
    assigned = first, (second, *rest) = (1, (2, 3))

    def __init__(self) -> None:
        self.field, other = 1, 2
        self.typed: int = other
        local = self.field
        self.nested = [local]

    @property
    def shown(self) -> int:
        return self.field


def test_attributes_are_found_wherever_a_class_defines_them() -> None:
    names = ("annotated", "assigned", "first", "second", "rest", "field", "typed", "nested", "shown", "__init__")
    assert missing_attributes(inspect.getsource(Owner), names) == []


def test_attribute_that_is_only_read_or_not_there_is_missing() -> None:
    source = "class Reader:\n    def run(self):\n        return self.gone\n"
    assert missing_attributes(source, ("run", "gone", "never")) == ["gone", "never"]


def test_function_has_no_attributes() -> None:
    assert missing_attributes("def run(x):\n    x.y = 1\n", ("y",)) == ["y"]
