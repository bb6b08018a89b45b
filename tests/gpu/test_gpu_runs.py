# SPDX-License-Identifier: Apache-2.0
"""Real runs on one GPU: nothing changes without our names; the recipe by name trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.compare import differences, training_metrics
from tests.e2e.launching import VerlRun, launch_verl, make_assets
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GPU = (
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "data.dataloader_num_workers=0",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    # without a size vLLM looks for one, and refuses to start if memory of others becomes free meanwhile
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=1000000000",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
    "trainer.total_training_steps=2",
)
PLAIN = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.full_determinism=True",
    "actor_rollout_ref.actor.fsdp_config.full_determinism=True",
    # full_determinism gives every request the same seed, so groups have no variance: entropy makes the weights move.
    "actor_rollout_ref.actor.entropy_coeff=0.01",
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


def _launch(tmp_path_factory: pytest.TempPathFactory, name: str, assets: Path, *lines: str, **env: str) -> VerlRun:
    return launch_verl(tmp_path_factory.mktemp(name), assets, [*GPU, *lines], env)


def test_plugin_changes_nothing_in_a_run_without_our_names(
    tmp_path_factory: pytest.TempPathFactory, assets: Path
) -> None:
    """verl's full_determinism on a GPU: alike as far as two runs without the plugin are.

    Rows reach the batch in the order they arrive, so the sums of two identical runs differ in the seventh digit (the
    gradient norm in the fifth), and after a bf16 update some sampled tokens do. The first step is compared tightly;
    of the second, what a single token cannot turn around.
    """
    with_plugin = _launch(tmp_path_factory, "with", assets, *PLAIN)
    without = _launch(tmp_path_factory, "without", assets, *PLAIN, VERL_USE_EXTERNAL_PLUGINS="none")
    assert with_plugin.code == 0, with_plugin.tail()
    assert without.code == 0, without.tail()
    assert any(name == "actor/grad_norm" and value > 0 for (_, name), value in training_metrics(without).items())
    assert differences(with_plugin, without, relative=1e-4, steps={1}) == []
    later = differences(with_plugin, without, relative=2e-2, steps={2})
    assert [text for text in later if "rollout_corr/" not in text and "rollout_probs_diff" not in text] == []


@pytest.mark.parametrize(
    ("strategy", "attention"), [("fsdp2", "sdpa"), ("fsdp", "sdpa"), ("fsdp2", "flash_attention_2")]
)
def test_recipe_by_name_trains_on_a_gpu(
    tmp_path_factory: pytest.TempPathFactory, assets: Path, strategy: str, attention: str
) -> None:
    """FSDP1, which runs on GPUs only, keeps the head's weight in a flat parameter; flash-attn packs sequences."""
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    overrides = (
        "+scalerl=recipe",
        f"actor_rollout_ref.actor.strategy={strategy}",
        f"actor_rollout_ref.model.use_remove_padding={attention == 'flash_attention_2'}",
        f"actor_rollout_ref.model.override_config.attn_implementation={attention}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        # Responses of 16 characters have no room for the phrase.
        "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
    )
    run = _launch(tmp_path_factory, f"recipe_{strategy}_{attention}", assets, *overrides)
    assert run.code == 0, run.tail()
    assert compare_updates(run.folder / "weights") == 3
    metrics = run.metrics[1]
    assert metrics["scalerl/loss/nonfinite_tokens_sum"] == 0
    # bf16 on both sides: log-probs differ in the third digit, not in the first.
    assert metrics["scalerl/mismatch/log_ratio_abs_mean"] < 0.05
    assert metrics["actor/grad_norm"] > 0
