# SPDX-License-Identifier: Apache-2.0
"""Weight loading fails in the generator -> verl waits for ever -> the run ends by itself, with the cause."""

from __future__ import annotations

import re

import pytest

from tests.e2e.conftest import RunVerl
from tests.e2e.launching import VerlRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Longer than the run may take: what ends it is the generator's failure, not our patience with its silence.
PATIENT = {"SCALERL_VERL_SYNC_TIMEOUT_S": "3600"}


def _check(run: VerlRun) -> None:
    assert run.code not in (0, None)
    # In the error that ends the run, not only somewhere in the engine's own log.
    wanted = r"WeightSyncError: the generator failed to load the trainer's weights: .*planted fault"
    assert re.search(wanted, run.log), run.tail()
    assert (run.folder / "weights" / "planted").exists()
    assert run.leftover_processes == 0


def test_failed_weight_load_ends_a_synchronous_run_with_the_cause(run_verl: RunVerl) -> None:
    env = {"PROBE_FAIL_LOAD": "1", **PATIENT}
    _check(run_verl("failing-sync", "trainer.total_training_steps=2", env=env))


def test_failed_weight_load_ends_a_disaggregated_run_with_the_cause(run_verl: RunVerl) -> None:
    run = run_verl(
        "failing-async",
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.total_training_steps=2",
        env={"PROBE_FAIL_LOAD": "0", **PATIENT},
    )
    _check(run)
