# SPDX-License-Identifier: Apache-2.0
"""Settings of every test process and of what it starts."""

import functools
import logging
import os
import signal
from collections.abc import Iterator

# Small tensors on one core a process: threads that wait for each other cost more than they compute, and many times that
# where the cores are shared with another worker of pytest.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore ctrl-C, and so would every process that tests start from one and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import omegaconf.base
import pytest

# Hundreds of tests compose verl's config and resolve what refers to something in it: the same few texts every time.
# Parsing them is two fifths of a start-up check.
omegaconf.base.parse = functools.cache(omegaconf.base.parse)

RUNS_ARE_IN = ("e2e", "faults")
"""Folders of the tests that start runs: tests/run.sh looks for them nowhere else."""
LONG = ("test_patches.py", "test_engine_gradients.py", "test_plugin_load_failure.py", "test_symbols.py")
"""Files that take longest, the slowest first: two workers end together if these begin."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, the others in their order.

    Raises:
        UsageError: a test that starts a run lies where tests/run.sh does not look.
    """
    for item in items:
        starts_run = item.get_closest_marker("e2e") and not item.get_closest_marker("gpu")
        if starts_run and not set(RUNS_ARE_IN) & set(item.path.parts):
            raise pytest.UsageError(f"{item.nodeid} is marked e2e: put it below tests/e2e or tests/faults")
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(autouse=True)
def logging_is_as_it_was() -> Iterator[None]:
    """What a test sets up of logging ends with it: the next one must not depend on what ran before.

    What vLLM's server imports sets the root logger to ERROR. An entry point of Hydra's adds a handler that writes to
    the output of this test alone.
    """
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    before = list(root.handlers)
    yield
    for handler in list(root.handlers):
        if handler not in before:
            root.removeHandler(handler)
