# SPDX-License-Identifier: Apache-2.0
"""A run that uses none of our names trains the same with and without the plugin (deterministic sampling)."""

from __future__ import annotations

import pytest

from tests.e2e.compare import differences, training_metrics
from tests.e2e.conftest import RunVerl

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

PLAIN = (
    "hydra.searchpath=[pkg://scalerl_verl.configs]",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=naive",
    "actor_rollout_ref.actor.fsdp_config.full_determinism=True",
    # vLLM's CPU engine does not start with the rollout's full_determinism (batch-invariant kernels); one candidate a
    # token makes sampling deterministic instead. Groups then have no variance: entropy makes the weights move.
    "actor_rollout_ref.rollout.top_k=1",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "trainer.total_training_steps=2",
)
WITHOUT = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "scalerl_cpu_only"}


def test_plugin_changes_nothing_in_a_run_without_our_names(run_verl: RunVerl) -> None:
    """Equal to rounding: which rows share a micro-batch depends on arrival, and sums depend on the order of rows.

    That moves log-probs by about 1e-7 and the gradient norm by about 1e-6; a patch that acted would move the loss by
    orders of magnitude more.
    """
    with_plugin = run_verl("with-plugin", *PLAIN, named=False)
    without = run_verl("without-plugin", *PLAIN, named=False, env=WITHOUT)
    assert with_plugin.code == 0, with_plugin.tail()
    assert without.code == 0, without.tail()
    assert any(name == "actor/grad_norm" and value > 0 for (_, name), value in training_metrics(without).items())
    assert differences(with_plugin, without, relative=1e-4) == []
    named = {name for metrics in with_plugin.metrics.values() for name in metrics if name.startswith("scalerl/")}
    assert not named
