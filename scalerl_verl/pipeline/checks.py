# SPDX-License-Identifier: Apache-2.0
"""What ``trainer_mode=pipeline_rl`` and ``ppo_off_policy`` need of the rest of a config, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import (
    ACTOR,
    AGENT_LOOP,
    BYPASS_MODE,
    CHECKPOINT_BACKEND,
    CUSTOM_SAMPLER,
    FILTER_GROUPS,
    GLOO,
    HYBRID_ENGINE,
    INTERRUPTION_LOOP,
    MODEL,
    OFF_POLICY_SECTION,
    PIPELINE_RL,
    PPO_OFF_POLICY,
    ROLLOUT,
    TRAINER_MODE,
    V1,
    VLLM,
    ZERO_VARIANCE,
    read_section,
    select,
)
from scalerl_verl.names.numbers import number
from scalerl_verl.pipeline.settings import OffPolicySettings, PipelineSettings

_BACKENDS = (GLOO, "nccl")
_AGENT_LOOPS = ("single_turn_agent", INTERRUPTION_LOOP)
_SECTIONS: dict[str, Any] = {PIPELINE_RL: PipelineSettings, PPO_OFF_POLICY: OffPolicySettings}


def find_problems(config: DictConfig) -> Iterator[str]:
    """Contradictions of the two trainer modes with their sections and the rest of the config."""
    mode = str(select(config, TRAINER_MODE, "sync"))
    for name in _SECTIONS:
        if name != mode and OmegaConf.select(config, f"{V1}.{name}") is not None:
            yield f"{V1}.{name} is read by {TRAINER_MODE}={name} only, but it is {mode}: set it, or delete the section"
    path = f"{V1}.{mode}"
    section = OmegaConf.select(config, path)
    if section is None and mode in (select(config, V1) or ()):
        yield f"{path}=null: it is a section, set the keys below it or leave it out"  # verl looks into it
        return
    if mode not in _SECTIONS:
        return
    if section is not None and not isinstance(section, DictConfig):
        yield f"{path}={section} must be a section of keys"
        return
    try:
        settings = read_section(_SECTIONS[mode], path, OmegaConf.to_container(section, resolve=True) if section else {})
    except ScaleRLConfigError as error:
        yield from error.problems
        return
    yield from _recorded_log_probs(config, mode)
    if isinstance(settings, PipelineSettings):
        yield from _pipeline_batches(config)
        yield from _pipeline_layout(config)
        yield from _pipeline_engine(config)
    else:
        yield from _off_policy(config, settings.num_updates)


def _recorded_log_probs(config: DictConfig, mode: str) -> Iterator[str]:
    # That they are recorded at all is a check of its own, for every run with bypass_mode=True.
    bypass = BYPASS_MODE
    if not select(config, bypass, False):
        yield (
            f"{bypass}=False with {TRAINER_MODE}={mode}: old log-probs would be recomputed under weights that did not "
            f"sample the tokens; set {bypass}=True (+scalerl=sampling_ratio), which keeps those recorded at sampling"
        )


def _pipeline_batches(config: DictConfig) -> Iterator[str]:
    batch, mini = select(config, "data.train_batch_size"), select(config, f"{ACTOR}.ppo_mini_batch_size")
    if batch != mini:
        yield (
            f"{ACTOR}.ppo_mini_batch_size={mini}, data.train_batch_size={batch}: every optimizer step is a version of "
            f"its own in {PIPELINE_RL}; set ppo_mini_batch_size to the batch size"
        )
    if number(config, f"{ACTOR}.ppo_epochs") != 1:
        yield f"{ACTOR}.ppo_epochs={select(config, f'{ACTOR}.ppo_epochs')}: one optimizer step a version; set it to 1"
    wanted = {
        FILTER_GROUPS: (
            False,
            "it throws generated groups away, which the admission rule does without; drop zero variance by "
            f"{ZERO_VARIANCE}=drop instead",
        ),
        f"{CUSTOM_SAMPLER}.path": (None, "the admission rule is the sampler"),
        "skip.rollout_tq.enable": (False, "replayed rollouts carry no versions"),
        f"{ROLLOUT}.full_determinism": (False, "requests need ids of their own"),
        f"{ROLLOUT}.router_config_path": (None, "its load balancer is its own: it spares generators out of reach"),
    }
    yield from _compare(config, wanted)
    loop = select(config, AGENT_LOOP, "single_turn_agent")
    if loop not in _AGENT_LOOPS:
        yield (
            f"{AGENT_LOOP}={loop} does not pass on the versions of every turn's tokens: use one "
            f"of {', '.join(_AGENT_LOOPS)}, or another trainer mode"
        )


def _pipeline_layout(config: DictConfig) -> Iterator[str]:
    if select(config, HYBRID_ENGINE, True):
        yield (
            f"{HYBRID_ENGINE}=True would put a second engine on the trainer's devices, which has to "
            f"stop for every step: set it False; generators have devices of their own in {PIPELINE_RL}"
        )
    for key in ("nnodes", "n_gpus_per_node"):
        if number(config, f"{ROLLOUT}.{key}") < 1:
            yield f"{ROLLOUT}.{key}={select(config, f'{ROLLOUT}.{key}')}: generators need devices of their own"
    tensor, on_node = (number(config, f"{ROLLOUT}.{key}") for key in ("tensor_model_parallel_size", "n_gpus_per_node"))
    behind = select(config, f"{VLLM}.tensor_parallel_size", tensor)
    if int(behind) != tensor:
        yield (
            f"{VLLM}.tensor_parallel_size={behind} is not the {ROLLOUT}.tensor_model_parallel_size={tensor} by which "
            "verl counts a generator's devices: set the latter only"
        )
    if tensor > 1 and on_node % tensor:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={tensor} does not divide {ROLLOUT}.n_gpus_per_node={on_node}: a "
            "generator's devices have to be on one node, where they share its weights' memory"
        )
    for key, ours in (
        ("pipeline_model_parallel_size", "pipeline_parallel_size"),
        ("data_parallel_size", "data_parallel_size"),
    ):
        size = select(config, f"{VLLM}.{ours}", select(config, f"{ROLLOUT}.{key}", 1))
        if int(size) != 1:
            yield (
                f"{ROLLOUT}.{key}={size}: a weight update that keeps requests is only verified for engines of one "
                "rank or of tensor parallelism; set it to 1"
            )
    if select(config, "reward.reward_model.enable", False) and not select(
        config, "reward.reward_model.enable_resource_pool", False
    ):
        yield (
            f"reward.reward_model.enable_resource_pool=False: a reward model needs devices of its own in {PIPELINE_RL}"
        )
    backend = select(config, CHECKPOINT_BACKEND, "naive")
    if backend not in _BACKENDS:
        yield (
            f"{CHECKPOINT_BACKEND}={backend}: {PIPELINE_RL} sends whole weights over one lasting process "
            f"group; use one of {', '.join(_BACKENDS)}"
        )
    rebuild = f"{ROLLOUT}.checkpoint_engine.engine_kwargs.nccl.rebuild_group"
    if backend == "nccl" and select(config, rebuild, False) is not True:
        yield (
            f"{rebuild}={select(config, rebuild, False)}: verl's engine would keep its first process group for ever "
            "and fail on another size once a generator has died; set it True, which costs nothing as long as all live "
            f"(++{rebuild}=True, or the preset pipeline)"
        )


def _pipeline_engine(config: DictConfig) -> Iterator[str]:
    model = MODEL
    if number(config, f"{model}.lora_rank") > 0 or number(config, f"{model}.lora.rank") > 0:
        yield (
            f"{model}.lora_rank: adapters are swapped by removing and adding them, which aborts or mixes up requests "
            "that are kept; train the whole model, or use another trainer mode"
        )
    wanted = {
        f"{ROLLOUT}.name": ("vllm", "keeping requests over an update is vLLM's"),
        f"{model}.lora_adapter_path": (None, "adapters cannot be swapped under running requests"),
        f"{ROLLOUT}.disaggregation.enabled": (False, "a prefill engine would change weights apart from its decoder"),
        f"{model}.mtp.enable_rollout": (False, "a draft model is not updated together with the model"),
        f"{VLLM}.speculative_config": (None, "a draft model is not updated together with the model"),
        f"{VLLM}.kv_transfer_config": (None, "an external KV store does not know weight versions"),
        f"{VLLM}.kv_offloading_size": (None, "an external KV store does not know weight versions"),
        f"{VLLM}.enable_lora": (False, "adapters cannot be swapped under running requests"),
        f"{VLLM}.prefill_context_parallel_size": (1, "updates are only verified for tensor parallelism"),
        f"{ROLLOUT}.quantization": (None, "weights are quantised again on loading, which no test covers"),
        f"{VLLM}.quantization": (None, "weights are quantised again on loading, which no test covers"),
        f"{ROLLOUT}.multi_turn.enable": (False, "later turns would lose their versions"),
    }
    yield from _compare(config, wanted)


def _compare(config: DictConfig, rows: dict[str, tuple[Any, str]]) -> Iterator[str]:
    for path, (value, why) in rows.items():
        given = OmegaConf.select(config, path)
        if given is not None and given != value:
            wanted = "null" if value is None else value
            yield f"{path}={given} with {TRAINER_MODE}={PIPELINE_RL}: {why}; set it to {wanted}"


def _off_policy(config: DictConfig, num_updates: int) -> Iterator[str]:
    batch, mini = number(config, "data.train_batch_size"), number(config, f"{ACTOR}.ppo_mini_batch_size")
    if batch != mini * num_updates:
        yield (
            f"data.train_batch_size={batch}, {ACTOR}.ppo_mini_batch_size={mini}: "
            f"{OFF_POLICY_SECTION}.num_updates={num_updates} means {num_updates} updates on equal parts of a "
            "batch; set train_batch_size to "
            f"{mini * num_updates}, or ppo_mini_batch_size to a {num_updates}-th of the batch"
        )
    if number(config, f"{ACTOR}.ppo_epochs") != 1:
        yield (
            f"{ACTOR}.ppo_epochs={select(config, f'{ACTOR}.ppo_epochs')}: num_updates={num_updates} counts updates "
            "on fresh parts of the batch; set ppo_epochs to 1"
        )
