# SPDX-License-Identifier: Apache-2.0
"""What tests of the start-up check share."""

from __future__ import annotations

import pytest

from scalerl_verl.config import machine_checks
from scalerl_verl.upstream import registry
from scalerl_verl.upstream.activation import FORWARDED_ENV, PLATFORM_ENV


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FORWARDED_ENV:
        monkeypatch.setenv(name, "set, so that it is put back")
        monkeypatch.delenv(name)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLATFORM_ENV, "cpu")


@pytest.fixture
def only_config_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """prepare_run without a look at this machine, and without patching this process; returns what was activated."""
    calls: list[str] = []
    monkeypatch.setattr(machine_checks, "find_problems", lambda config: [])
    monkeypatch.setattr(registry, "activate", lambda: calls.append("activate"))
    return calls
