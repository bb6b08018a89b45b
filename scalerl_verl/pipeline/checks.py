# SPDX-License-Identifier: Apache-2.0
"""What ``trainer_mode=pipeline_rl`` and ``ppo_off_policy`` need of the rest of a config, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.config_numbers import number
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import read_section, select
from scalerl_verl.pipeline.settings import OffPolicySettings, PipelineSettings

_MODE = "trainer.v1.trainer_mode"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_BACKENDS = ("gloo", "nccl")
_AGENT_LOOPS = ("single_turn_agent", "forced_interruption")
_SECTIONS: dict[str, Any] = {"pipeline_rl": PipelineSettings, "ppo_off_policy": OffPolicySettings}


def find_problems(config: DictConfig) -> Iterator[str]:
    """Contradictions of the two trainer modes with their sections and the rest of the config."""
    mode = str(select(config, _MODE, "sync"))
    for name in _SECTIONS:
        if name != mode and OmegaConf.select(config, f"trainer.v1.{name}") is not None:
            yield f"trainer.v1.{name} is read by {_MODE}={name} only, but it is {mode}: set it, or delete the section"
    path = f"trainer.v1.{mode}"
    section = OmegaConf.select(config, path)
    if section is None and mode in (select(config, "trainer.v1") or ()):
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
    bypass = "algorithm.rollout_correction.bypass_mode"
    if not select(config, bypass, False):
        yield (
            f"{bypass}=False with {_MODE}={mode}: old log-probs would be recomputed under weights that did not sample "
            f"the tokens; set {bypass}=True (+scalerl=sampling_ratio), which keeps those recorded at sampling"
        )


def _pipeline_batches(config: DictConfig) -> Iterator[str]:
    batch, mini = select(config, "data.train_batch_size"), select(config, f"{_ACTOR}.ppo_mini_batch_size")
    if batch != mini:
        yield (
            f"{_ACTOR}.ppo_mini_batch_size={mini}, data.train_batch_size={batch}: every optimizer step is a version of "
            "its own in pipeline_rl; set ppo_mini_batch_size to the batch size"
        )
    if number(config, f"{_ACTOR}.ppo_epochs") != 1:
        yield f"{_ACTOR}.ppo_epochs={select(config, f'{_ACTOR}.ppo_epochs')}: one optimizer step a version; set it to 1"
    wanted = {
        "algorithm.filter_groups.enable": (
            False,
            "it throws generated groups away, which the admission rule does without; drop zero variance by "
            "algorithm.scalerl.zero_variance=drop instead",
        ),
        "trainer.v1.sampler.custom_sampler.path": (None, "the admission rule is the sampler"),
        "skip.rollout_tq.enable": (False, "replayed rollouts carry no versions"),
        f"{_ROLLOUT}.full_determinism": (False, "requests need ids of their own"),
        f"{_ROLLOUT}.router_config_path": (None, "its load balancer is its own: it spares generators out of reach"),
    }
    yield from _compare(config, wanted)
    loop = select(config, f"{_ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    if loop not in _AGENT_LOOPS:
        yield (
            f"{_ROLLOUT}.agent.default_agent_loop={loop} does not pass on the versions of every turn's tokens: use one "
            f"of {', '.join(_AGENT_LOOPS)}, or another trainer mode"
        )


def _pipeline_layout(config: DictConfig) -> Iterator[str]:
    if select(config, "actor_rollout_ref.hybrid_engine", True):
        yield (
            "actor_rollout_ref.hybrid_engine=True would put a second engine on the trainer's devices, which has to "
            "stop for every step: set it False; generators have devices of their own in pipeline_rl"
        )
    for key in ("nnodes", "n_gpus_per_node"):
        if number(config, f"{_ROLLOUT}.{key}") < 1:
            yield f"{_ROLLOUT}.{key}={select(config, f'{_ROLLOUT}.{key}')}: generators need devices of their own"
    tensor, on_node = (number(config, f"{_ROLLOUT}.{key}") for key in ("tensor_model_parallel_size", "n_gpus_per_node"))
    behind = select(config, f"{_VLLM}.tensor_parallel_size", tensor)
    if int(behind) != tensor:
        yield (
            f"{_VLLM}.tensor_parallel_size={behind} is not the {_ROLLOUT}.tensor_model_parallel_size={tensor} by which "
            "verl counts a generator's devices: set the latter only"
        )
    if tensor > 1 and on_node % tensor:
        yield (
            f"{_ROLLOUT}.tensor_model_parallel_size={tensor} does not divide {_ROLLOUT}.n_gpus_per_node={on_node}: a "
            "generator's devices have to be on one node, where they share its weights' memory"
        )
    for key, ours in (
        ("pipeline_model_parallel_size", "pipeline_parallel_size"),
        ("data_parallel_size", "data_parallel_size"),
    ):
        size = select(config, f"{_VLLM}.{ours}", select(config, f"{_ROLLOUT}.{key}", 1))
        if int(size) != 1:
            yield (
                f"{_ROLLOUT}.{key}={size}: a weight update that keeps requests is only verified for engines of one "
                "rank or of tensor parallelism; set it to 1"
            )
    if select(config, "reward.reward_model.enable", False) and not select(
        config, "reward.reward_model.enable_resource_pool", False
    ):
        yield "reward.reward_model.enable_resource_pool=False: a reward model needs devices of its own in pipeline_rl"
    backend = select(config, f"{_ROLLOUT}.checkpoint_engine.backend", "naive")
    if backend not in _BACKENDS:
        yield (
            f"{_ROLLOUT}.checkpoint_engine.backend={backend}: pipeline_rl sends whole weights over one lasting process "
            f"group; use one of {', '.join(_BACKENDS)}"
        )
    rebuild = f"{_ROLLOUT}.checkpoint_engine.engine_kwargs.nccl.rebuild_group"
    if backend == "nccl" and select(config, rebuild, False) is not True:
        yield (
            f"{rebuild}={select(config, rebuild, False)}: verl's engine would keep its first process group for ever "
            "and fail on another size once a generator has died; set it True, which costs nothing as long as all live "
            f"(++{rebuild}=True, or the preset pipeline)"
        )


def _pipeline_engine(config: DictConfig) -> Iterator[str]:
    model = "actor_rollout_ref.model"
    if number(config, f"{model}.lora_rank") > 0 or number(config, f"{model}.lora.rank") > 0:
        yield (
            f"{model}.lora_rank: adapters are swapped by removing and adding them, which aborts or mixes up requests "
            "that are kept; train the whole model, or use another trainer mode"
        )
    wanted = {
        f"{_ROLLOUT}.name": ("vllm", "keeping requests over an update is vLLM's"),
        f"{model}.lora_adapter_path": (None, "adapters cannot be swapped under running requests"),
        f"{_ROLLOUT}.disaggregation.enabled": (False, "a prefill engine would change weights apart from its decoder"),
        f"{model}.mtp.enable_rollout": (False, "a draft model is not updated together with the model"),
        f"{_VLLM}.speculative_config": (None, "a draft model is not updated together with the model"),
        f"{_VLLM}.kv_transfer_config": (None, "an external KV store does not know weight versions"),
        f"{_VLLM}.kv_offloading_size": (None, "an external KV store does not know weight versions"),
        f"{_VLLM}.enable_lora": (False, "adapters cannot be swapped under running requests"),
        f"{_VLLM}.prefill_context_parallel_size": (1, "updates are only verified for tensor parallelism"),
        f"{_ROLLOUT}.quantization": (None, "weights are quantised again on loading, which no test covers"),
        f"{_VLLM}.quantization": (None, "weights are quantised again on loading, which no test covers"),
        "actor_rollout_ref.rollout.multi_turn.enable": (False, "later turns would lose their versions"),
    }
    yield from _compare(config, wanted)


def _compare(config: DictConfig, wanted: dict[str, tuple[Any, str]]) -> Iterator[str]:
    for path, (value, why) in wanted.items():
        given = OmegaConf.select(config, path)
        if given is not None and given != value:
            yield f"{path}={given} with {_MODE}=pipeline_rl: {why}; set it to {'null' if value is None else value}"


def _off_policy(config: DictConfig, num_updates: int) -> Iterator[str]:
    batch, mini = number(config, "data.train_batch_size"), number(config, f"{_ACTOR}.ppo_mini_batch_size")
    if batch != mini * num_updates:
        yield (
            f"data.train_batch_size={batch}, {_ACTOR}.ppo_mini_batch_size={mini}: "
            f"trainer.v1.ppo_off_policy.num_updates={num_updates} means {num_updates} updates on equal parts of a "
            "batch; set train_batch_size to "
            f"{mini * num_updates}, or ppo_mini_batch_size to a {num_updates}-th of the batch"
        )
    if number(config, f"{_ACTOR}.ppo_epochs") != 1:
        yield (
            f"{_ACTOR}.ppo_epochs={select(config, f'{_ACTOR}.ppo_epochs')}: num_updates={num_updates} counts updates "
            "on fresh parts of the batch; set ppo_epochs to 1"
        )
