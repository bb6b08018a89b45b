# SPDX-License-Identifier: Apache-2.0
"""Who launches the servers of vLLM in a run of ours."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from scalerl_verl.errors import PatchError
from scalerl_verl.verl.server import SPECS


def registry_with(loader_of: str) -> tuple[Any, ModuleType]:
    """A registry of verl's shape with a loader that stands in the named module, and the registry's module."""

    def load() -> None: ...

    load.__module__ = loader_of

    class Registry:
        _registry = {"vllm": load}  # noqa: RUF012

        @classmethod
        def register(cls, name: str, loader: Any) -> None:
            cls._registry[name] = loader

    return Registry, ModuleType("verl.workers.rollout.replica")


def test_ours_takes_the_place_of_verl_s_and_of_its_own() -> None:
    registry, module = registry_with("verl.workers.rollout.replica")
    for _ in range(2):
        SPECS[0].build(registry, module)
        assert registry._registry["vllm"].__module__ == "scalerl_verl.verl.server"


def test_replica_that_a_user_registered_is_refused_and_stays() -> None:
    registry, module = registry_with("my_servers")
    with pytest.raises(PatchError, match="my_servers"):
        SPECS[0].build(registry, module)
    assert registry._registry["vllm"].__module__ == "my_servers"
