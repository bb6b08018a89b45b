# SPDX-License-Identifier: Apache-2.0
"""The two config sections: defaults, bounds, unknown keys."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.pipeline.settings import PipelineSettings, off_policy_settings, pipeline_settings


def config_with(**sections: dict[str, Any]) -> Any:
    return OmegaConf.create({"trainer": {"v1": sections}})


def test_sections_are_read_and_may_be_absent() -> None:
    config = config_with(pipeline_rl={"max_staleness": 0, "kv_on_update": "recompute"})
    assert pipeline_settings(config) == PipelineSettings(max_staleness=0, kv_on_update="recompute")
    assert pipeline_settings(config_with()).max_staleness == 8
    assert off_policy_settings(config_with(ppo_off_policy={"num_updates": 4})).num_updates == 4


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("max_staleness", -1, "0 or more (0 is on-policy)"),
        ("max_staleness", 1.5, "whole number"),
        ("max_staleness", True, "whole number"),
        ("kv_on_update", "drop", "keep, recompute"),
        ("staging", "disk", "device, host, none"),
        ("request_timeout_s", 0, "positive number of seconds"),
        ("request_timeout_s", float("inf"), "positive number of seconds"),
        ("transfer_timeout_s", -1, "positive number of seconds"),
        ("max_attempts", 0, "1 or more"),
        ("max_strikes", 0, "1 or more"),
        ("max_relaunches", -1, "0 or more"),
        ("parameter_sync_step", 2, "every optimizer step is a version"),
        ("max_stalenes", 4, "; did you mean max_staleness?"),
    ],
)
def test_pipeline_value_without_a_meaning_is_refused(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ScaleRLConfigError) as error:
        pipeline_settings(config_with(pipeline_rl={key: value}))
    assert f"trainer.v1.pipeline_rl.{key}" in str(error.value) and allowed in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("num_updates", 0), ("parameter_sync_step", 4), ("updates", 8)])
def test_off_policy_value_without_a_meaning_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ScaleRLConfigError, match=rf"trainer\.v1\.ppo_off_policy\.{key}"):
        off_policy_settings(config_with(ppo_off_policy={key: value}))


def test_every_problem_of_a_section_is_listed() -> None:
    with pytest.raises(ScaleRLConfigError) as error:
        PipelineSettings(max_staleness=-1, staging="x", max_attempts=0)
    assert len(error.value.problems) == 3
