# SPDX-License-Identifier: Apache-2.0
"""What the driver does between composing the config and starting Ray: each piece, and only where it is due."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import ray

from scalerl_verl import names
from scalerl_verl.generator import frontend
from scalerl_verl.names import select
from scalerl_verl.upstream.activation import is_checked
from scalerl_verl.verl import startup, startup_check
from tests.unit.composed import changed

pytestmark = pytest.mark.usefixtures("clean_environment", "only_config_checks")


def test_ray_that_runs_already_without_our_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers were started without the plugin switched on: they would train with verl's loss."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(startup.RefusedRunError, match="Ray is already running"):
        startup.prepare_run(changed("recipe", {}))
    assert not is_checked()


def test_ray_of_an_earlier_run_of_ours_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    startup.prepare_run(changed("recipe", {}))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert startup.prepare_run(changed("recipe", {}))


def test_run_without_our_names_after_one_with_them_is_not_one_of_ours() -> None:
    startup.prepare_run(changed("recipe", {}))
    assert is_checked()
    assert startup.prepare_run(changed("", {})) == {}
    assert not is_checked()


def test_curriculum_gets_its_floor_and_its_file() -> None:
    config = changed(
        "curriculum", {"data.train_batch_size": 24, names.GROUP_SIZE: 7, "trainer.default_local_dir": "/r"}
    )
    startup.prepare_run(config)
    found = {
        key: select(config, f"{names.SAMPLER_SECTION}.{key}") for key in ("min_prompts", "min_responses", "log_file")
    }
    assert found == {"min_prompts": 24, "min_responses": 4, "log_file": f"/r/{names.SAMPLER_LOG_NAME}"}


@pytest.mark.parametrize(("preset", "wanted"), [("fast_frontend", True), ("recipe", True), ("cispo", None)])
def test_servers_are_told_of_the_fast_front_end(preset: str, wanted: Any) -> None:
    config = changed(preset, {})
    startup.prepare_run(config)
    assert select(config, f"{names.ROLLOUT}.custom.{frontend.MARK}") is wanted


def test_launcher_that_another_plugin_imported_before_us_runs_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: it kept verl's function, and a run of a script that calls it had no piece of ours, without a word."""

    def validate_config(config: object) -> None:
        """In place of verl's."""

    launcher = ModuleType("verl.launcher_of_a_test")
    launcher.validate_config = validate_config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)
    assert startup_check._build(validate_config, ModuleType("config")) is vars(launcher)["validate_config"]
    assert vars(launcher)["validate_config"].__wrapped__ is validate_config
