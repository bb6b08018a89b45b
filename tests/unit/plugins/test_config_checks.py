# SPDX-License-Identifier: Apache-2.0
"""The start-up check on verl's real config, composed through Hydra with and without our presets."""

from __future__ import annotations

import copy
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl  # noqa: F401 - loads the plugin, which puts our presets on Hydra's search path
from hydra import compose, initialize_config_module
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig

import scalerl_verl.configs
from scalerl_verl.advantages import reward_shaping
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.plugins import machine_checks, startup
from scalerl_verl.plugins.config_checks import find_problems
from scalerl_verl.plugins.curriculum_settings import CLASS_PATH
from scalerl_verl.plugins.names import asked_names
from scalerl_verl.plugins.policy_loss_config import ScaleRLPolicyLossConfig
from scalerl_verl.plugins.settings import PolicyLossSettings
from scalerl_verl.upstream import registry
from scalerl_verl.upstream.activation import ACTIVE_ENV, FORWARDED_ENV, PLATFORM_ENV
from tests.recipe_modules import load_benchmark_module

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
HEAD = f"{MODEL}.fused_kernel_options.impl_backend"
HEAD_DTYPE = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype"
PRESETS = sorted(path.stem for path in Path(scalerl_verl.configs.__file__).parent.glob("scalerl/*.yaml"))
ON_CPU = ("cpu", "quickstart")
PLAIN_VERL = ("drgrpo", "grpo", "gspo", "reinforce_tis", "sampling_ratio", "setup")
"""Presets of verl's own names only: such a run must stay verl's alone."""
GOLDEN = Path(__file__).with_name("golden_keys.txt")


@dataclass(frozen=True)
class Bonus(reward_shaping.RewardShaping):
    amount: float


@functools.cache
def _compose(*overrides: str) -> DictConfig:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def compose_config(*overrides: str) -> DictConfig:
    return copy.deepcopy(_compose(*overrides))


def changed(preset: str, changes: dict[str, Any]) -> DictConfig:
    """The composed config with a preset, some of its values replaced afterwards."""
    config = compose_config(*([f"+scalerl={preset}"] if preset else []))
    with open_dict(config):
        for path, value in changes.items():
            OmegaConf.update(config, path, value, force_add=True)
    return config


@pytest.fixture(autouse=True)
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


def test_the_presets_are_those_of_the_configs_folder() -> None:
    assert {"recipe", "cispo", "prompt_mean", "advantage", "curriculum", "cpu", "quickstart"} <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_composes_and_contradicts_nothing(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if preset in ON_CPU:
        monkeypatch.setenv(PLATFORM_ENV, "cpu")
    # verl's default is one response a prompt, which no group baseline can work with.
    config = changed(preset, {f"{ROLLOUT}.n": 4} if preset == "advantage" else {})
    assert find_problems(config) == []
    assert bool(asked_names(config)) is (preset not in PLAIN_VERL), "a preset with a name of ours is a run of ours"


@pytest.mark.parametrize("preset", PLAIN_VERL)
def test_preset_of_verl_s_own_names_leaves_the_run_to_verl(preset: str, only_config_checks: list[str]) -> None:
    config = changed(preset, {})
    before = OmegaConf.to_yaml(config)
    assert startup.prepare_run(config) == {}
    assert OmegaConf.to_yaml(config) == before
    assert only_config_checks == [] and ACTIVE_ENV not in os.environ


def test_unknown_preset_is_refused_with_the_available_ones() -> None:
    with pytest.raises(MissingConfigException) as error:
        compose_config("+scalerl=nope")
    assert "scalerl/nope" in str(error.value)
    assert all(f"\t{preset}\n" in str(error.value) for preset in PRESETS)


def test_config_of_verl_alone_asks_for_nothing_of_ours() -> None:
    assert asked_names(compose_config()) == {}
    assert find_problems(compose_config()) == []


CORRECTION = "algorithm.rollout_correction"
PIECES = {
    "loss": f"{ACTOR}.policy_loss.loss_mode",
    "aggregation": f"{ACTOR}.loss_agg_mode",
    "normalisation": "algorithm.scalerl.adv_norm",
    "filtering": "algorithm.scalerl.zero_variance",
    "curriculum": "data.sampler.class_path",
}
LEAVE_ONE_OUT = {
    "loss": [f"{PIECES['loss']}=vanilla", f"~{ACTOR}.policy_loss.eps_max"],
    "aggregation": [f"{PIECES['aggregation']}=token-mean"],
    "normalisation": [f"{PIECES['normalisation']}=prompt"],
    "filtering": [f"{PIECES['filtering']}=keep"],
    "curriculum": ["~data.sampler"],
}
"""Piece of the recipe -> a user's overrides that leave it out."""
REFUSALS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "misspelt loss": (
        "",
        {f"{ACTOR}.policy_loss.loss_mode": "scalerl_cipso"},
        [f"{ACTOR}.policy_loss.loss_mode=scalerl_cipso does not exist", "scalerl_cispo"],
    ),
    "misspelt estimator": (
        "",
        {"algorithm.adv_estimator": "scalerl_adv"},
        ["algorithm.adv_estimator=scalerl_adv does not exist"],
    ),
    "trainer mode of a later version": (
        "",
        {"trainer.v1.trainer_mode": "pipeline_rl"},
        ["trainer.v1.trainer_mode=pipeline_rl is not in this version"],
    ),
    "misspelt agent loop": (
        "",
        {f"{ROLLOUT}.agent.default_agent_loop": "forced-interuption"},
        [f"{ROLLOUT}.agent.default_agent_loop=forced-interuption does not exist", "forced_interruption"],
    ),
    "interruption without its loop": (
        "recipe",
        {f"{ROLLOUT}.agent.default_agent_loop": "single_turn_agent", "algorithm.scalerl.interruption.seed": 1},
        ["algorithm.scalerl.interruption is read by", f"{ROLLOUT}.agent.default_agent_loop=forced_interruption"],
    ),
    "unknown key of interruption": (
        "interruption",
        {"algorithm.scalerl.interruption.budget": 5},
        ["algorithm.scalerl.interruption.budget does not exist", "thinking_budget, answer_budget"],
    ),
    "thinking budget the wrong way round": (
        "interruption",
        {"algorithm.scalerl.interruption.thinking_budget": [12, 10]},
        ["algorithm.scalerl.interruption.thinking_budget=(12, 10) must be [low, high]"],
    ),
    "phrase that does not close": (
        "interruption",
        {"algorithm.scalerl.interruption.phrase": "Stop."},
        ["algorithm.scalerl.interruption.phrase='Stop.' must contain end_marker='</think>' once"],
    ),
    "interruption beside the section": (
        "recipe",
        {"algorithm.interruption": {"seed": 1}},
        ["algorithm.interruption has no effect", "algorithm.scalerl."],
    ),
    "tools in a single turn": (
        "interruption",
        {f"{ROLLOUT}.multi_turn.tool_config_path": "tools.yaml"},
        [f"{ROLLOUT}.multi_turn.tool_config_path is set", "tool_agent"],
    ),
    "no prefix cache": (
        "interruption",
        {f"{ROLLOUT}.enable_prefix_caching": False},
        [f"{ROLLOUT}.enable_prefix_caching=False", "set it True"],
    ),
    "routing replay": (
        "interruption",
        {f"{ROLLOUT}.enable_rollout_routing_replay": True},
        [f"{ROLLOUT}.enable_rollout_routing_replay=True", "set it False"],
    ),
    "an engine with less room than a response": (
        "interruption",
        {f"{ROLLOUT}.max_model_len": 1000, f"{ROLLOUT}.prompt_length": 512, f"{ROLLOUT}.response_length": 512},
        [f"{ROLLOUT}.max_model_len=1000 is less than", "1024"],
    ),
    "alarm that means nothing": (
        "recipe",
        {"algorithm.scalerl.truncation_alarm": {"fraction": 10, "on_alarm": "warn"}},
        ["algorithm.scalerl.truncation_alarm.fraction=10 must be above 0 and at most 1"],
    ),
    "misspelt length penalty": (
        "recipe",
        {"algorithm.scalerl.reward_shaping": {"length_penalty": {"l_max": 5}}},
        ["algorithm.scalerl.reward_shaping.length_penalty.l_max does not exist", "max_length, cache_length"],
    ),
    "truncated responses left out with an estimator of verl": (
        "grpo",
        {"algorithm.scalerl.reward_shaping": {"exclude_truncated": {}}},
        ["algorithm.scalerl.reward_shaping.exclude_truncated leaves responses out", "adv_estimator=scalerl"],
    ),
    "old trainer": ("recipe", {"trainer.use_v1": False}, ["trainer.use_v1=False", "set trainer.use_v1=True"]),
    "unknown key of our section": (
        "recipe",
        {"algorithm.scalerl.adv_nrom": "batch"},
        ["algorithm.scalerl.adv_nrom does not exist", "adv_norm, zero_variance"],
    ),
    "unknown normalisation": (
        "recipe",
        {"algorithm.scalerl.adv_norm": "grpo"},
        ["algorithm.scalerl.adv_norm='grpo'", "batch, prompt, none"],
    ),
    "unknown treatment of zero variance": (
        "recipe",
        {"algorithm.scalerl.zero_variance": "resample"},
        ["algorithm.scalerl.zero_variance='resample'", "drop, keep"],
    ),
    "section that another estimator does not read": (
        "recipe",
        {"algorithm.adv_estimator": "grpo"},
        ["algorithm.scalerl is read by the estimator scalerl only", "algorithm.adv_estimator=grpo"],
    ),
    "two filters of groups": (
        "advantage",
        {"algorithm.filter_groups.enable": True, f"{ROLLOUT}.n": 4},
        ["algorithm.scalerl.zero_variance=drop", "algorithm.filter_groups.enable=True"],
    ),
    "group of one": ("recipe", {f"{ROLLOUT}.n": 1}, [f"{ROLLOUT}.n=1", "2 or more"]),
    "KL in the reward": ("recipe", {"algorithm.use_kl_in_reward": True}, ["algorithm.use_kl_in_reward=True"]),
    "cap of zero": ("recipe", {f"{ACTOR}.policy_loss.eps_max": 0}, [f"{ACTOR}.policy_loss.eps_max=0", "above 0"]),
    "cap that is text": ("recipe", {f"{ACTOR}.policy_loss.eps_max": "5"}, [f"{ACTOR}.policy_loss.eps_max='5'"]),
    "range without 1": (
        "recipe",
        {f"{ACTOR}.policy_loss.token_mask_range": [1.5, 5.0]},
        [f"{ACTOR}.policy_loss.token_mask_range=[1.5, 5.0]", "low < 1 < high", "or null"],
    ),
    "unknown truncation of sequences": (
        "recipe",
        {f"{ACTOR}.policy_loss.sequence_truncation": "token"},
        [f"{ACTOR}.policy_loss.sequence_truncation='token'", "product, geometric_mean", "null"],
    ),
    "recomputed log-probs": ("recipe", {f"{CORRECTION}.bypass_mode": False}, [f"{CORRECTION}.bypass_mode=False"]),
    "second correction": ("recipe", {f"{CORRECTION}.rollout_is": "token"}, [f"{CORRECTION}.rollout_is", "null"]),
    "rejection": ("recipe", {f"{CORRECTION}.rollout_rs": "token_k1"}, [f"{CORRECTION}.rollout_rs", "null"]),
    "no sampling-time log-probs": (
        "recipe",
        {f"{ROLLOUT}.calculate_log_probs": False},
        [f"{ROLLOUT}.calculate_log_probs=False"],
    ),
    "greedy sampling": ("recipe", {f"{ROLLOUT}.temperature": 0}, [f"{ROLLOUT}.temperature=0", "above 0"]),
    "raw log-probs at another temperature": (
        "recipe",
        {f"{ROLLOUT}.temperature": 0.7, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs with temperature=0.7", "processed_logprobs"],
    ),
    "nucleus sampling": ("recipe", {f"{ROLLOUT}.top_p": 0.9}, [f"{ROLLOUT}.top_p=0.9", "top_p=1.0"]),
    "top-k sampling": ("recipe", {f"{ROLLOUT}.top_k": 40}, ["top_k=40", "top_k=-1"]),
    "half precision": ("recipe", {f"{ROLLOUT}.dtype": "half"}, [f"{ROLLOUT}.dtype=half", "bfloat16 or float32"]),
    "half precision through the engine's own arguments": (
        "recipe",
        {f"{ROLLOUT}.engine_kwargs.vllm.dtype": "float16"},
        [f"{ROLLOUT}.engine_kwargs.vllm.dtype=float16", "bfloat16 or float32"],
    ),
    "prompt average with SAPO": (
        "prompt_mean",
        {f"{ACTOR}.policy_loss.loss_mode": "sapo"},
        [f"{ACTOR}.loss_agg_mode=prompt-mean would be ignored by policy_loss.loss_mode=sapo"],
    ),
    "prompt average with GMPO": (
        "prompt_mean",
        {f"{ACTOR}.policy_loss.loss_mode": "geo_mean"},
        [f"{ACTOR}.loss_agg_mode=prompt-mean would be ignored by policy_loss.loss_mode=geo_mean"],
    ),
    "prompt average with DRO": (
        "prompt_mean",
        {f"{ACTOR}.policy_loss.loss_mode": "dro"},
        [f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.loss_agg_mode=prompt-mean"],
    ),
    "our advantages with Clip-Cov": (
        "advantage",
        {f"{ACTOR}.policy_loss.loss_mode": "clip_cov", f"{ROLLOUT}.n": 4},
        [f"{ACTOR}.policy_loss.loss_mode=clip_cov", "algorithm.adv_estimator=scalerl"],
    ),
    "our advantages with GMPO": (
        "advantage",
        {
            f"{ACTOR}.policy_loss.loss_mode": "geo_mean",
            f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
            f"{ROLLOUT}.n": 4,
        },
        [f"{ACTOR}.policy_loss.loss_mode=geo_mean", "algorithm.adv_estimator=scalerl"],
    ),
    "our advantages with SAPO and another mode than its own": (
        "advantage",
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ROLLOUT}.n": 4},
        [f"{ACTOR}.loss_agg_mode=token-mean", "policy_loss.loss_mode=sapo", "seq-mean-token-mean"],
    ),
    "cap of a loss that is not in use": (
        "recipe",
        {f"{ACTOR}.policy_loss.loss_mode": "vanilla"},
        [f"{ACTOR}.policy_loss.eps_max", "loss_mode=vanilla", f"~{ACTOR}.policy_loss.eps_max"],
    ),
    "our section in other letters": (
        "recipe",
        {"algorithm.scaleRL": {"zero_variance": "keep"}},
        ["algorithm.scaleRL has no effect", "algorithm.scalerl.adv_norm"],
    ),
    "setting beside its section": ("recipe", {"algorithm.adv_norm": "none"}, ["algorithm.adv_norm has no effect"]),
    "preset group as a key": ("recipe", {"scalerl": "recipe"}, ["top-level key scalerl has no effect"]),
    "section that is a word": ("recipe", {"algorithm.scalerl": "drop"}, ["algorithm.scalerl=drop must be a section"]),
    "loss in capitals": (
        "",
        {f"{ACTOR}.policy_loss.loss_mode": "ScaleRL_CISPO"},
        [f"{ACTOR}.policy_loss.loss_mode=ScaleRL_CISPO does not exist", "scalerl_cispo"],
    ),
    "estimator with a letter missing": (
        "",
        {"algorithm.adv_estimator": "scalrl"},
        ["adv_estimator=scalrl", "scalerl?"],
    ),
    "double filtering without a section of ours": (
        "",
        {"algorithm.adv_estimator": "scalerl", f"{ROLLOUT}.n": 4, "algorithm.filter_groups.enable": True},
        ["algorithm.filter_groups.enable=True", "zero_variance=keep"],
    ),
    "rejection after the trainer has counted": (
        "advantage",
        {f"{ROLLOUT}.n": 4, "algorithm.rollout_correction.rollout_rs": "token_k1"},
        ["algorithm.rollout_correction.rollout_rs"],
    ),
    "log-probs that are logits": (
        "recipe",
        {f"{ROLLOUT}.logprobs_mode": "raw_logits"},
        [f"{ROLLOUT}.logprobs_mode=raw_logits", "processed_logprobs"],
    ),
    "raw log-probs through the engine's own arguments": (
        "recipe",
        {f"{ROLLOUT}.temperature": 0.7, f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode": "raw_logprobs"},
        [
            f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=raw_logprobs with temperature=0.7",
            f"set {ROLLOUT}.engine_kwargs.vllm.logprobs_mode=processed_logprobs",
        ],
    ),
    "poll interval under another key": (
        "recipe",
        {"trainer.v1.sampler.sampler_kwargs.poll_interval": 1},
        ["sampler_kwargs.poll_interval has no effect", "poll_interval_s"],
    ),
    "poll interval beside its section": (
        "recipe",
        {"trainer.v1.sampler.poll_interval_s": 1},
        ["trainer.v1.sampler.poll_interval_s has no effect"],
    ),
    "negative poll interval": (
        "recipe",
        {"trainer.v1.sampler.sampler_kwargs.poll_interval_s": -1},
        ["poll_interval_s=-1", "positive"],
    ),
    "poll interval of another buffer": (
        "recipe",
        {"trainer.v1.sampler.sampler_kwargs.poll_interval_s": 1, "trainer.v1.sampler.custom_sampler.path": "mine.py"},
        ["poll_interval_s", "mine.py"],
    ),
    "another entry point of verl": ("recipe", {"async_training.x": 1}, ["verl.trainer.main_ppo"]),
    "entropy bonus": ("recipe", {f"{ACTOR}.entropy_coeff": 0.01}, [f"{ACTOR}.entropy_coeff=0.01", "entropy_coeff=0"]),
    "KL loss": ("recipe", {f"{ACTOR}.use_kl_loss": True}, [f"{ACTOR}.use_kl_loss=True", "use_kl_loss=False"]),
    "distillation": ("recipe", {"distillation.enabled": True}, ["distillation.enabled=True", "prompt-mean"]),
    "misspelt sampler": (
        "",
        {"data.sampler.class_path": "scalerl_verl.curriculum.NoPositives"},
        ["data.sampler.class_path=scalerl_verl.curriculum.NoPositives does not exist", CLASS_PATH],
    ),
    "sampler options without the sampler": (
        "cispo",
        {"data.sampler.threshold": 0.5},
        ["data.sampler=", "names no sampler", f"+data.sampler.class_path={CLASS_PATH}"],
    ),
    "unknown option of the sampler": (
        "curriculum",
        {"data.sampler.treshold": 0.5},
        ["data.sampler.treshold does not exist", "threshold, history, first_epoch"],
    ),
    "pass rate above 1": ("curriculum", {"data.sampler.threshold": 90}, ["data.sampler.threshold=90", "at most 1"]),
    "unknown history": (
        "curriculum",
        {"data.sampler.history": "mean"},
        ["data.sampler.history='mean'", "latest, cumulative"],
    ),
    "filtering without a history": ("curriculum", {"data.sampler.first_epoch": 1}, ["data.sampler.first_epoch=1"]),
    "file that is none": ("curriculum", {"data.sampler.log_file": 3}, ["data.sampler.log_file=3", "path of a file"]),
    "floor below a batch": (
        "curriculum",
        {"data.sampler.min_prompts": 10, "data.train_batch_size": 48},
        ["data.sampler.min_prompts=10 is less than the 48 prompts", "48 or more"],
    ),
    "sampler that never sees what always passes": (
        "curriculum",
        {"algorithm.filter_groups.enable": True},
        ["algorithm.filter_groups.enable=True", "data.sampler", "set filter_groups.enable=False"],
    ),
    "FP32 head in the trainer only": (
        "",
        {HEAD: "fp32", f"{MODEL}.use_fused_kernels": True},
        [f"{HEAD}=fp32", "in the trainer only", f"+{HEAD_DTYPE}=float32"],
    ),
    "FP32 head in the trainer only, without fusion": ("", {HEAD: "fp32"}, [f"{HEAD}=fp32", "in the trainer only"]),
    "FP32 head in the generator only": (
        "",
        {HEAD_DTYPE: "float32"},
        [f"{HEAD_DTYPE}=float32", f"{HEAD}=torch", "in the generator only", f"Set {HEAD}=fp32"],
    ),
    "FP32 head in the generator only, as JSON": (
        "",
        {f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides": '{"head_dtype": "float32"}'},
        ["in the generator only"],
    ),
    "other dtype in the generator": ("fp32_head", {HEAD_DTYPE: "bfloat16"}, ["in the trainer only"]),
    "misspelt FP32 head": ("", {HEAD: "FP32"}, [f"{HEAD}=FP32 does not exist", "fp32, fp32_shared_pass, torch"]),
    "FP32 head by another name": ("", {HEAD: "float32"}, [f"{HEAD}=float32 does not exist"]),
    "misspelt dtype": ("", {HEAD_DTYPE: "FP32"}, [f"{HEAD_DTYPE}=FP32", "write float32"]),
    "dtype that vLLM would take": ("", {HEAD_DTYPE: "float"}, [f"{HEAD_DTYPE}=float", "write float32"]),
    "unknown option of the head": (
        "fp32_head",
        {f"{MODEL}.fused_kernel_options.chunk_rows": 5},
        ["fused_kernel_options.chunk_rows does not exist", "impl_backend"],
    ),
    "FP32 head in a critic": (
        "fp32_head",
        {"critic.model.fused_kernel_options.impl_backend": "fp32"},
        ["critic.model.fused_kernel_options.impl_backend=fp32", "value head"],
    ),
    "FP32 head in another engine of the reference": (
        "fp32_head",
        {"actor_rollout_ref.ref.strategy": "veomni"},
        ["actor_rollout_ref.ref.strategy=veomni", "no effect", "fsdp2"],
    ),
    "FP32 head with SGLang": ("fp32_head", {f"{ROLLOUT}.name": "sglang"}, [f"{ROLLOUT}.name=sglang", "vllm"]),
    "FP32 head with a quantised generator": (
        "fp32_head",
        {f"{ROLLOUT}.quantization": "fp8"},
        [f"{ROLLOUT}.quantization=fp8", HEAD_DTYPE],
    ),
    "LoRA on the head": (
        "fp32_head",
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ["q_proj", "lm_head"]},
        [f"{MODEL}.target_modules=['q_proj', 'lm_head']", "all-linear"],
    ),
    "shared pass without fusion": (
        "recipe",
        {HEAD: "fp32_shared_pass", f"{MODEL}.use_fused_kernels": False},
        [f"set {MODEL}.use_fused_kernels=True", f"or set {HEAD}=fp32"],
    ),
    "shared pass with another loss": (
        "fp32_head",
        {HEAD: "fp32_shared_pass"},
        ["not of vanilla", f"set {ACTOR}.policy_loss.loss_mode=scalerl_cispo"],
    ),
    "shared pass with a ratio per sequence": (
        "recipe",
        {HEAD: "fp32_shared_pass", f"{ACTOR}.policy_loss.sequence_truncation": "product"},
        [f"set {ACTOR}.policy_loss.sequence_truncation=null"],
    ),
    "shared pass with a mean per sequence": (
        "recipe",
        {HEAD: "fp32_shared_pass", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
        [f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "prompt-mean"],
    ),
    "shared pass with an entropy bonus": (
        "recipe",
        {
            HEAD: "fp32_shared_pass",
            f"{ACTOR}.loss_agg_mode": "token-mean",
            f"{ACTOR}.entropy_coeff": 0.1,
            "algorithm.scalerl.zero_variance": "keep",
        },
        [f"{ACTOR}.entropy_coeff=0.1", "set it to 0", f"or set {HEAD}=fp32"],
    ),
    "DAPO with nucleus sampling": (
        "dapo",
        {f"{ROLLOUT}.top_p": 0.7},
        [f"{ROLLOUT}.top_p=0.7", f"{CORRECTION}.bypass_mode=True", "set top_p=1.0 and top_k=-1"],
    ),
    "MiniMax's CISPO with truncated sampling": (
        "cispo_minimax",
        {f"{ROLLOUT}.top_p": 0.7, f"{ROLLOUT}.top_k": 20},
        [f"{ROLLOUT}.top_p=0.7, top_k=20", "set top_p=1.0 and top_k=-1"],
    ),
    "DAPO with raw log-probs at another temperature": (
        "dapo",
        {f"{ROLLOUT}.temperature": 0.7, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs with temperature=0.7", "=processed_logprobs"],
    ),
    "our advantages with verl's loss and nucleus sampling": (
        "[sampling_ratio,setup,advantage]",
        {f"{ACTOR}.policy_loss.loss_mode": "vanilla", f"{ROLLOUT}.top_p": 0.7},
        [f"{ROLLOUT}.top_p=0.7", "top_p=1.0"],
    ),
    "DAPO without sampling-time log-probs": (
        "dapo",
        {f"{ROLLOUT}.calculate_log_probs": False},
        [f"{ROLLOUT}.calculate_log_probs=False", "set it True"],
    ),
    "FP32 head without sampling-time log-probs": (
        "fp32_head",
        {f"{ROLLOUT}.calculate_log_probs": False},
        [f"{ROLLOUT}.calculate_log_probs=False", "FP32 head", "set it True"],
    ),
    "GRPO with the FP32 head and nucleus sampling": (
        "[grpo,fp32_head]",
        {f"{ROLLOUT}.top_p": 0.7},
        [f"{ROLLOUT}.top_p=0.7", "top_p=1.0"],
    ),
    "GRPO with the FP32 head and raw log-probs": (
        "[grpo,fp32_head]",
        {f"{ROLLOUT}.temperature": 0.6, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"},
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs with temperature=0.6"],
    ),
    "FP32 head compared with logits": (
        "[fp32_head,setup]",
        {f"{ROLLOUT}.logprobs_mode": "raw_logits"},
        [f"{ROLLOUT}.logprobs_mode=raw_logits", "FP32 head", "processed_logprobs"],
    ),
    "KL loss over dropped prompts": (
        "advantage",
        {f"{ROLLOUT}.n": 4, f"{ACTOR}.use_kl_loss": True},
        [f"{ACTOR}.use_kl_loss=True", "set algorithm.scalerl.zero_variance=keep, or use_kl_loss=False"],
    ),
    "entropy bonus over dropped prompts": (
        "recipe",
        {f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.entropy_coeff": 0.01},
        [f"{ACTOR}.entropy_coeff=0.01", "set algorithm.scalerl.zero_variance=keep, or entropy_coeff=0"],
    ),
    "correction that verl computes for nobody": (
        "dapo",
        {f"{CORRECTION}.rollout_is": "token"},
        [f"{CORRECTION}.rollout_is=token has no effect", f"set {CORRECTION}.rollout_is=null"],
    ),
    "rejection that verl computes for nobody": (
        "[sampling_ratio,advantage]",
        {f"{ROLLOUT}.n": 4, f"{CORRECTION}.rollout_rs": "token_k1"},
        [f"{CORRECTION}.rollout_rs=token_k1 has no effect", f"set {CORRECTION}.rollout_rs=null"],
    ),
    "rejection in verl's bypass loss after the trainer has counted": (
        "[sampling_ratio,advantage]",
        {
            f"{ROLLOUT}.n": 4,
            f"{ACTOR}.policy_loss.loss_mode": "bypass_mode",
            f"{CORRECTION}.rollout_rs": "token_k1",
        },
        [f"{CORRECTION}.rollout_rs masks tokens"],
    ),
    "critic of our advantages": (
        "recipe",
        {"critic.enable": True},
        ["critic.enable=True", "adv_estimator=scalerl", "set critic.enable=False"],
    ),
    "critic under the prompt average": (
        "dapo",
        {"critic.enable": True},
        ["critic.loss_agg_mode=prompt-mean", "set critic.loss_agg_mode=token-mean, or critic.enable=False"],
    ),
    "critic of GAE under the prompt average": (
        "prompt_mean",
        {"critic.enable": True},
        ["critic.loss_agg_mode=prompt-mean", "set critic.loss_agg_mode=token-mean"],
    ),
    "FP32 head with verl's full determinism": (
        "fp32_head",
        {f"{ROLLOUT}.full_determinism": True},
        [f"{ROLLOUT}.full_determinism=True", f"set {ROLLOUT}.full_determinism=False"],
    ),
    "FP32 head with a generator quantised by the engine's own arguments": (
        "fp32_head",
        {f"{ROLLOUT}.engine_kwargs.vllm.quantization": "fp8"},
        [f"{ROLLOUT}.engine_kwargs.vllm.quantization=fp8", "set it to null"],
    ),
    "LoRA on all that has a name": (
        "fp32_head",
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ".*"},
        [f"{MODEL}.target_modules=['.*']", "all-linear"],
    ),
    "FP32 head left out of the trainer only": (
        "recipe",
        {HEAD: "torch"},
        ["in the generator only", f"(~{ROLLOUT}.engine_kwargs.vllm.hf_overrides)"],
    ),
    "FP32 head beside another override": (
        "recipe",
        {HEAD: "torch", f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.rope_theta": 1},
        ["in the generator only", f"(~{HEAD_DTYPE})"],
    ),
    "refill with a sampler and verl's estimator": (
        "[dapo,curriculum]",
        {},
        ["set filter_groups.enable=False", "algorithm.adv_estimator=scalerl", "~data.sampler"],
    ),
    "verl's estimator beside a reward shaping": (
        "[recipe,length_penalty]",
        {"algorithm.adv_estimator": "grpo"},
        [
            "algorithm.adv_estimator=grpo",
            "delete them (~algorithm.scalerl.adv_norm ~algorithm.scalerl.zero_variance)",
        ],
    ),
    "misspelt cap": (
        "recipe",
        {f"{ACTOR}.policy_loss.eps_maxx": 4},
        [f"{ACTOR}.policy_loss.eps_maxx does not exist", "did you mean eps_max?"],
    ),
    "misspelt range": (
        "recipe",
        {f"{ACTOR}.policy_loss.token_mask": [0.5, 5]},
        [f"{ACTOR}.policy_loss.token_mask does not exist", "did you mean token_mask_range?"],
    ),
    "key of the loss like none": (
        "recipe",
        {f"{ACTOR}.policy_loss.zzz": 1},
        [f"{ACTOR}.policy_loss.zzz does not exist", "loss_mode, ", "eps_max", f"~{ACTOR}.policy_loss.zzz"],
    ),
    "baseline after our loss": (
        "[cispo,grpo]",
        {},
        [f"{ACTOR}.policy_loss.eps_max", "loss_mode=vanilla", f"~{ACTOR}.policy_loss.eps_max", "the last one wins"],
    ),
    "cap alone": ("", {f"{ACTOR}.policy_loss.eps_max": 4}, [f"{ACTOR}.policy_loss.eps_max", "use scalerl_cispo"]),
    "range alone, null": (
        "",
        {f"{ACTOR}.policy_loss.token_mask_range": None},
        [f"{ACTOR}.policy_loss.token_mask_range", f"~{ACTOR}.policy_loss.token_mask_range"],
    ),
    "weights in FP16": (
        "recipe",
        {f"{ACTOR}.fsdp_config.dtype": "float16"},
        [f"{ACTOR}.fsdp_config.dtype=float16", "bfloat16 or float32"],
    ),
    "forward pass in FP16": (
        "recipe",
        {f"{ACTOR}.fsdp_config.mixed_precision": {"param_dtype": "fp16"}},
        [f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16", "bfloat16 or float32"],
    ),
    "length penalty of another type": (
        "recipe",
        {"algorithm.scalerl.reward_shaping": {"length_penalty": {"max_length": "5"}}},
        ["algorithm.scalerl.reward_shaping.length_penalty.max_length='5'", "whole number"],
    ),
    "CPU without its platform": ("recipe", {"trainer.device": "cpu"}, ["trainer.device=cpu", f"{PLATFORM_ENV}=cpu"]),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_contradiction_is_refused_with_its_key(fault: str) -> None:
    preset, changes, fragments = REFUSALS[fault]
    config = changed(preset, changes)
    problems = find_problems(config)
    assert len(problems) == 1, problems
    assert all(fragment in problems[0] for fragment in fragments), problems[0]
    assert asked_names(config), "a run that is refused for a name of ours must count as one of ours"


def test_refill_in_the_recipe_is_refused_by_both_filters_it_competes_with() -> None:
    problems = find_problems(changed("recipe", {"algorithm.filter_groups.enable": True}))
    assert len(problems) == 2
    assert "algorithm.scalerl.zero_variance=drop" in problems[0] and "data.sampler" in problems[1]


def test_each_piece_of_the_recipe_can_be_left_out_by_overrides() -> None:
    """Leave-one-out, each piece replaced by what verl does without it; the others stay as they are."""
    recipe = compose_config("+scalerl=recipe")
    for piece, overrides in LEAVE_ONE_OUT.items():
        config = compose_config("+scalerl=recipe", *overrides)
        assert find_problems(config) == [], piece
        changes = {path for path in PIECES.values() if OmegaConf.select(config, path) != OmegaConf.select(recipe, path)}
        assert changes == {PIECES[piece]}


@pytest.mark.parametrize("strategy", ["megatron", "veomni", "torchtitan", "automodel"])
def test_engine_that_never_reads_the_backend_is_refused(strategy: str) -> None:
    problems = find_problems(changed("fp32_head", {f"{ACTOR}.strategy": strategy}))
    # The reference takes the actor's strategy.
    assert len(problems) == 2
    assert f"{ACTOR}.strategy={strategy}" in problems[0] and "no effect; set strategy=fsdp2" in problems[0]


@pytest.mark.parametrize(
    "changes",
    [
        {f"{MODEL}.lora_rank": 8},
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.target_modules": ["q_proj", "gate_proj"]},
        {f"{MODEL}.target_modules": ["lm_head"]},
        {f"{MODEL}.use_fused_kernels": False},
        {f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides": '{"head_dtype": "float32"}'},
        {HEAD: "fp32_shared_pass"},
        {HEAD: "fp32_shared_pass", f"{ACTOR}.policy_loss.token_mask_range": [0.5, 2.0]},
        {HEAD: "fp32_shared_pass", f"{ACTOR}.calculate_entropy": True},
    ],
)
def test_fp32_head_that_works_is_let_through(changes: dict[str, Any]) -> None:
    assert find_problems(changed("recipe", changes)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "model", "half"])
def test_a_head_dtype_of_vllm_s_own_is_none_of_ours(dtype: str) -> None:
    assert asked_names(changed("", {HEAD_DTYPE: dtype})) == {}


def test_sampler_gets_its_floor_and_file_from_the_rest_of_the_config(only_config_checks: list[str]) -> None:
    changes = {"data.train_batch_size": 48, "trainer.default_local_dir": "/tmp/run"}
    config = changed("curriculum", changes)
    startup.prepare_run(config)
    assert (config.data.sampler.min_prompts, config.data.sampler.log_file) == (48, "/tmp/run/curriculum.jsonl")
    named = compose_config(f"+data.sampler.class_path={CLASS_PATH}")
    assert find_problems(named) == []
    given = changed("curriculum", {**changes, "data.sampler.min_prompts": 100, "data.sampler.log_file": "mine.jsonl"})
    startup.prepare_run(given)
    assert (given.data.sampler.min_prompts, given.data.sampler.log_file) == (100, "mine.jsonl")


def test_floor_below_a_batch_is_fine_where_prompts_are_fetched_one_by_one() -> None:
    changes = {"data.sampler.min_prompts": 10, "data.train_batch_size": 48, "trainer.v1.trainer_mode": "colocate_async"}
    assert find_problems(changed("curriculum", changes)) == []


def test_sapo_is_fine_with_the_mode_it_uses() -> None:
    changes = {
        f"{ACTOR}.policy_loss.loss_mode": "sapo",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ROLLOUT}.n": 4,
    }
    assert find_problems(changed("advantage", changes)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.device", "cuda"),
        (f"{ACTOR}.strategy", "fsdp"),
        ("actor_rollout_ref.model.use_remove_padding", True),
        (f"{ROLLOUT}.enforce_eager", False),
        (f"{ROLLOUT}.enable_sleep_mode", True),
        (f"{ROLLOUT}.free_cache_engine", True),
    ],
)
def test_setting_that_cannot_work_on_the_cpu_is_refused(on_cpu: None, path: str, value: Any) -> None:
    (problem,) = find_problems(changed("cpu", {path: value}))
    assert f"{path}={value} with {PLATFORM_ENV}=cpu" in problem
    assert "+scalerl=cpu sets all of these" in problem


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"ray_kwargs.ray_init.num_gpus": 0}, 1),
        ({"ray_kwargs.ray_init.num_gpus": None}, 1),
        ({"ray_kwargs.ray_init.num_gpus": 2, "trainer.n_gpus_per_node": 3}, 3),
        ({"ray_kwargs.ray_init.num_gpus": 1, "trainer.v1.trainer_mode": "separate_async"}, 2),
    ],
)
def test_too_few_logical_slots_on_the_cpu_are_refused(on_cpu: None, changes: dict[str, Any], needed: int) -> None:
    (problem,) = find_problems(changed("cpu", changes))
    assert f"ray_kwargs.ray_init.num_gpus={changes['ray_kwargs.ray_init.num_gpus']}" in problem
    assert f"set +ray_kwargs.ray_init.num_gpus={needed}" in problem


def test_slots_of_an_existing_cluster_are_not_ours_to_judge(on_cpu: None) -> None:
    changes = {"ray_kwargs.ray_init.num_gpus": None, "ray_kwargs.ray_init.address": "10.0.0.1:6379"}
    assert find_problems(changed("cpu", changes)) == []


def test_all_problems_are_listed_at_once(only_config_checks: list[str]) -> None:
    changes = {
        "algorithm.scalerl.adv_norm": "x",
        "algorithm.scalerl.zero_variance": "y",
        f"{ROLLOUT}.n": 1,
        f"{ROLLOUT}.top_p": 0.9,
        f"{ACTOR}.entropy_coeff": 0.5,
    }
    with pytest.raises(ScaleRLConfigError) as error:
        startup.prepare_run(changed("recipe", changes))
    assert len(error.value.problems) == 5
    for key in ("adv_norm", "zero_variance", f"{ROLLOUT}.n", f"{ROLLOUT}.top_p", f"{ACTOR}.entropy_coeff"):
        assert sum(key in problem.split(":")[0] for problem in error.value.problems) == 1, key
    assert "5. " in str(error.value)
    assert only_config_checks == [], "a refused run must not be activated"
    assert ACTIVE_ENV not in os.environ


def test_names_work_by_verl_s_plain_syntax_without_a_preset(only_config_checks: list[str]) -> None:
    config = compose_config(
        f"{ACTOR}.policy_loss.loss_mode=scalerl_cispo",
        f"+{ACTOR}.policy_loss.eps_max=4",
        f"{ACTOR}.loss_agg_mode=prompt-mean",
        f"{ROLLOUT}.calculate_log_probs=True",
        f"{CORRECTION}.bypass_mode=True",
    )
    asked = startup.prepare_run(config)
    assert asked == {
        f"{ACTOR}.policy_loss.loss_mode": "scalerl_cispo",
        f"{ACTOR}.loss_agg_mode": "prompt-mean",
        f"{ACTOR}.policy_loss.eps_max": "set",
    }
    section = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert type(section) is ScaleRLPolicyLossConfig
    assert section.eps_max == 4
    assert section.get("eps_max") == 4
    assert only_config_checks == ["activate"]
    assert os.environ[ACTIVE_ENV] == "1"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars[ACTIVE_ENV] == "1"


def test_options_of_our_loss_reach_verl_s_section(only_config_checks: list[str]) -> None:
    config = compose_config(
        "+scalerl=recipe",
        f"+{ACTOR}.policy_loss.token_mask_range=[0.5,5.0]",
        f"+{ACTOR}.policy_loss.sequence_truncation=geometric_mean",
    )
    startup.prepare_run(config)
    section = omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)
    assert list(section.token_mask_range) == [0.5, 5.0]
    assert section.get("sequence_truncation") == "geometric_mean"
    assert PolicyLossSettings.from_config(section) == PolicyLossSettings(
        5.0, section.token_mask_range, "geometric_mean"
    )


def test_loss_of_verl_keeps_verl_s_own_section(only_config_checks: list[str]) -> None:
    config = changed("prompt_mean", {})
    before = OmegaConf.to_yaml(config.actor_rollout_ref)
    startup.prepare_run(config)
    assert OmegaConf.to_yaml(config.actor_rollout_ref) == before
    assert type(omega_conf_to_dataclass(config.actor_rollout_ref.actor.policy_loss)) is not ScaleRLPolicyLossConfig


def test_shaping_without_an_option_it_needs_is_refused_at_start(
    only_config_checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_shaping, "_REGISTRY", {"bonus": Bonus})
    with pytest.raises(ScaleRLConfigError, match=r"algorithm\.scalerl\.reward_shaping\.bonus\.amount is missing"):
        startup.prepare_run(changed("recipe", {"algorithm.scalerl.reward_shaping": {"bonus": {}}}))
    assert only_config_checks == []


def test_section_refuses_a_negative_cap() -> None:
    with pytest.raises(ValueError, match="eps_max=-1"):
        ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo", eps_max=-1)


def test_error_survives_pickling_as_ray_does_it() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ScaleRLConfigError(["first", "second"])))
    assert error.problems == ("first", "second")
    assert str(error) == str(ScaleRLConfigError(["first", "second"]))


def _loss_of_verl(name: str, scale: float, mode: str) -> float:
    """The loss called ``name`` on one fixed random micro-batch, all advantages times ``scale``."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 6)
    log_prob = -2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    old_log_prob = log_prob + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = 4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(6)[None, :] < torch.tensor([6, 3, 5, 2])[:, None]
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    config.global_batch_info.update(dp_size=1, batch_num_tokens=16, global_batch_size=4)
    object.__setattr__(config.policy_loss, "dro_beta", 0.5)
    object.__setattr__(config.policy_loss, "clip_cov_ratio", 0.5)
    object.__setattr__(config.policy_loss, "kl_cov_ratio", 0.5)
    object.__setattr__(config.policy_loss, "rollout_correction", {"bypass_mode": True})
    torch.manual_seed(0)
    loss, _ = POLICY_LOSS_REGISTRY[name](old_log_prob, log_prob, advantages * scale, mask, mode, config)
    return float(loss)


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_prompt_average_is_refused_exactly_for_losses_it_would_not_be_exact_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt weights in the advantages need a loss that scales with them and follows the aggregation mode."""
    monkeypatch.setenv(ACTIVE_ENV, "1")
    plain, doubled = _loss_of_verl(name, 1.0, "token-sum"), _loss_of_verl(name, 2.0, "token-sum")
    scales = doubled == pytest.approx(2 * plain, rel=1e-9)
    follows = _loss_of_verl(name, 1.0, "seq-mean-token-sum") == pytest.approx(plain / 4, rel=1e-9)
    config = changed("prompt_mean", {f"{ACTOR}.policy_loss.loss_mode": name})
    with open_dict(config):
        config.actor_rollout_ref.rollout.calculate_log_probs = True
        config.algorithm.rollout_correction.bypass_mode = True
    assert (find_problems(config) == []) is (scales and follows)


def _flat(config: DictConfig) -> dict[str, Any]:
    return dict(load_benchmark_module("baselines").flatten(OmegaConf.to_container(config, resolve=False)))


def test_presets_change_exactly_the_keys_on_the_golden_list() -> None:
    default, absent = _flat(compose_config()), SimpleNamespace()
    lines = [
        f"{preset} {key}={json.dumps(value)}"
        for preset in PRESETS
        for key, value in sorted(_flat(compose_config(f"+scalerl={preset}")).items())
        if default.get(key, absent) != value
    ]
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text("\n".join(lines) + "\n")
    golden = GOLDEN.read_text().splitlines()
    missing, added = sorted(set(golden) - set(lines)), sorted(set(lines) - set(golden))
    assert not missing and not added, (
        f"gone: {missing}\nnew: {added}\nIf this is meant: UPDATE_GOLDEN=1 pytest {Path(__file__).name}, and review "
        f"the change of {GOLDEN.name}"
    )
