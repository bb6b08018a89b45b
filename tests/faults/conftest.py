# SPDX-License-Identifier: Apache-2.0
"""The fault tests that need a real run share the launcher of the end-to-end tests."""

import pytest

from scalerl_verl import bookkeeping
from tests.e2e.conftest import run_verl, tiny_assets

__all__ = ["run_verl", "tiny_assets"]


@pytest.fixture(autouse=True)
def no_file_was_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: what is said once a process is said in every test."""
    monkeypatch.setattr(bookkeeping, "_said", set())
