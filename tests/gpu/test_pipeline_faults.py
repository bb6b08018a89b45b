# SPDX-License-Identifier: Apache-2.0
"""pipeline_rl over NCCL whose only generator dies: the run ends and says why, it does not hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.launching import VerlRun, last_step, launch_verl, make_assets, title_of
from tests.gpu.test_pipeline import overrides_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one trains, one generates"),
]
NO_RELAUNCH = "trainer.v1.pipeline_rl.max_relaunches=0"
LOST = "GeneratorsLostError: every generator of this run is dead, hung or out of reach"


def widen(model: Path) -> None:
    """Put a network of some hundred million parameters in the place of the tiny one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.update({"hidden_size": 2048, "intermediate_size": 8192})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)


def assert_ends_with_its_name(run: VerlRun) -> None:
    assert run.code not in (0, None), run.tail()
    assert LOST in run.log, run.tail()
    assert run.leftover_processes == 0


def test_generator_that_dies_between_two_updates_ends_the_run_with_its_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assets, folder = make_assets(tmp_path_factory.mktemp("assets")), tmp_path_factory.mktemp("between")
    killed: list[int] = []

    def kill_the_generator(processes: set[int]) -> None:
        servers = [process for process in processes if title_of(process).startswith("ray::PipelineHttpServer")]
        if not killed and servers and last_step(folder) >= 2:
            os.kill(servers[0], signal.SIGKILL)
            killed.append(servers[0])

    more = ["trainer.total_training_steps=400", NO_RELAUNCH]
    run = launch_verl(folder, assets, [*overrides_of(assets), *more], {}, each_second=kill_the_generator)
    assert killed, run.tail()
    assert_ends_with_its_name(run)


def test_generator_that_dies_inside_a_transfer_ends_the_run_with_its_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The trainer is in a collective of NCCL with it."""
    assets, folder = make_assets(tmp_path_factory.mktemp("assets")), tmp_path_factory.mktemp("inside")
    widen(assets / "model")
    # The first of many buckets: the rest of the weights is still to come.
    more = ["actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=8", NO_RELAUNCH]
    run = launch_verl(folder, assets, [*overrides_of(assets), *more], {"PROBE_DIE_IN_TRANSFER": "3"})
    assert Path(folder, "weights", "planted").exists(), run.tail()
    assert_ends_with_its_name(run)
