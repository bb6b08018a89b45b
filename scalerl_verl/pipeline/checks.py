# SPDX-License-Identifier: Apache-2.0
"""What ``trainer_mode=pipeline_rl`` and ``ppo_off_policy`` need of the rest of a config, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from scalerl_verl import names
from scalerl_verl.names import ACTOR, MODEL, PIPELINE_RL, ROLLOUT, TRAINER_MODE, VLLM, select
from scalerl_verl.names.asking import trainer_mode
from scalerl_verl.names.keys import read_section
from scalerl_verl.names.numbers import number
from scalerl_verl.names.rules import Row, one_of, or_null, read_by, refusals, then, under
from scalerl_verl.pipeline.settings import OffPolicySettings, PipelineSettings, off_policy_settings

_BACKENDS = (names.GLOO, "nccl")
_SECTIONS: dict[str, Any] = {PIPELINE_RL: PipelineSettings, names.PPO_OFF_POLICY: OffPolicySettings}


def _other_sections(config: DictConfig) -> Iterator[str]:
    mode = trainer_mode(config)
    for name in _SECTIONS.keys() - {mode}:
        path = f"{names.V1}.{name}"
        if OmegaConf.select(config, path) is not None:
            yield read_by(path, f"{TRAINER_MODE}={name}", TRAINER_MODE, name, mode)


def _own_section(config: DictConfig) -> list[str]:
    mode = trainer_mode(config)
    path = f"{names.V1}.{mode}"
    section = OmegaConf.select(config, path)
    if section is None and mode in (select(config, names.V1) or ()):  # verl looks into it
        return [f"{path}=null: it is a section, set the keys below it or leave it out"]
    return refusals(read_section, _SECTIONS[mode], path, section) if mode in _SECTIONS else []


def _in_mode(mode: str) -> Callable[[DictConfig], bool]:
    return lambda config: trainer_mode(config) == mode


def _recorded_log_probs(mode: str) -> Row:
    """That they are recorded at all is a rule of its own, for every run with bypass_mode=True."""
    text = (
        f" with {TRAINER_MODE}={mode}: old log-probs would be recomputed under weights that did not sample the tokens; "
        f"set {names.BYPASS_MODE}=True (+scalerl=sampling_ratio), which keeps those recorded at sampling"
    )
    return Row(names.BYPASS_MODE, (True,), text, default=False)


def _batch_is_a_version(config: DictConfig) -> Iterator[str]:
    batch, mini = select(config, "data.train_batch_size"), select(config, f"{ACTOR}.ppo_mini_batch_size")
    if batch != mini:
        yield (
            f"{ACTOR}.ppo_mini_batch_size={mini}, data.train_batch_size={batch}: every optimizer step is a version of "
            f"its own in {PIPELINE_RL}; set ppo_mini_batch_size to the batch size"
        )


def _dynamic_sampling(config: DictConfig) -> Iterator[str]:
    metric = select(config, names.FILTER_METRIC)
    if select(config, names.FILTER_GROUPS, False) and not (isinstance(metric, str) and metric):
        yield (
            f"{names.FILTER_METRIC}={metric} with {names.FILTER_GROUPS}=True: groups are compared by it; set it to "
            "reward, or to an entry of what the reward function returns"
        )


def _devices(config: DictConfig) -> Iterator[str]:
    for key in ("nnodes", "n_gpus_per_node"):
        if number(config, f"{ROLLOUT}.{key}") < 1:
            yield f"{ROLLOUT}.{key}={select(config, f'{ROLLOUT}.{key}')}: generators need devices of their own"
    if select(config, "reward.reward_model.enable", False):
        text = (
            f": a reward model needs devices of its own in {PIPELINE_RL}; set it True, with reward.reward_model.nnodes "
            "and .n_gpus_per_node"
        )
        yield from Row("reward.reward_model.enable_resource_pool", (True,), text, default=False)(config)


def _parallel_sizes(config: DictConfig) -> Iterator[str]:
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
            "generator's devices have to be on one node, where they share its weights' memory; set "
            f"{ROLLOUT}.n_gpus_per_node to the GPUs of a node that generate, a multiple of {tensor}"
        )
    for key, ours in (("pipeline_model", "pipeline"), ("data", "data")):
        path = f"{ROLLOUT}.{key}_parallel_size"
        size = select(config, f"{VLLM}.{ours}_parallel_size", select(config, path, 1))
        if int(size) != 1:
            yield (
                f"{path}={size}: a weight update that keeps requests is only verified for engines of one rank or of "
                "tensor parallelism; set it to 1"
            )


def _process_group(config: DictConfig) -> Iterator[str]:
    rebuild = f"{ROLLOUT}.checkpoint_engine.engine_kwargs.nccl.rebuild_group"
    if select(config, names.CHECKPOINT_BACKEND) == "nccl" and select(config, rebuild, False) is not True:
        yield (
            f"{rebuild}={select(config, rebuild, False)}: verl's engine would keep its first process group for ever "
            "and fail on another size once a generator has died; set it True, which costs nothing while all live "
            f"(++{rebuild}=True, or the preset pipeline)"
        )


def _adapters(config: DictConfig) -> Iterator[str]:
    if select(config, f"{MODEL}.lora.merge", False) is True:
        return
    ranks = ("lora_rank", "lora.rank")
    given = [f"{MODEL}.{key}" for key in ranks if number(config, f"{MODEL}.{key}") > 0]
    given += [f"{MODEL}.lora_adapter_path"] if select(config, f"{MODEL}.lora_adapter_path") is not None else []
    if given:
        yield (
            f"{', '.join(given)}: {_NO_ADAPTERS}; set {MODEL}.lora.merge=True, which sends the weights "
            "with the adapters merged into them, or train the whole model"
        )


def _only(path: str, value: Any, why: str) -> Row:
    text = f" with {TRAINER_MODE}={PIPELINE_RL}: {why}; set it to {or_null(value)}"
    return Row(path, (value, None), text)


def _equal_parts(config: DictConfig) -> Iterator[str]:
    k = off_policy_settings(config).num_updates
    batch, mini = number(config, "data.train_batch_size"), number(config, f"{ACTOR}.ppo_mini_batch_size")
    if batch != mini * k:
        yield (
            f"data.train_batch_size={batch}, {ACTOR}.ppo_mini_batch_size={mini}: "
            f"{names.OFF_POLICY_SECTION}.num_updates={k} means {k} updates on equal parts of a batch; set "
            f"train_batch_size to {mini * k}, or ppo_mini_batch_size to a {k}-th of the batch"
        )
    text = f": num_updates={k} counts updates on fresh parts of the batch; set ppo_epochs to 1"
    yield from Row(f"{ACTOR}.ppo_epochs", (1,), text, default=1)(config)


_NO_ADAPTERS = "adapters apart from the weights cannot be swapped under running requests"
_NO_DRAFT = "a draft model is not updated together with the model"
_NO_STORE = "an external KV store does not know weight versions"
_NOT_QUANTISED = "weights are quantised again on loading, which no test covers"
_OF_PIPELINE = (
    _recorded_log_probs(PIPELINE_RL),
    _batch_is_a_version,
    Row(f"{ACTOR}.ppo_epochs", (1,), ": one optimizer step a version; set it to 1", default=1),
    _only(f"{names.CUSTOM_SAMPLER}.path", None, "the admission rule is the sampler"),
    _only("skip.rollout_tq.enable", False, "replayed rollouts carry no versions"),
    _only(f"{ROLLOUT}.full_determinism", False, "requests need ids of their own"),
    _only(f"{ROLLOUT}.router_config_path", None, "its load balancer is its own: it spares generators out of reach"),
    Row(
        names.HYBRID_ENGINE,
        (False,),
        " would put a second engine on the trainer's devices, which has to stop for every step: set it False; "
        f"generators have devices of their own in {PIPELINE_RL}",
        default=True,
    ),
    _devices,
    _parallel_sizes,
    Row(
        names.CHECKPOINT_BACKEND,
        _BACKENDS,
        f": {PIPELINE_RL} sends whole weights over one lasting process group; {one_of(_BACKENDS)}",
        default="naive",
    ),
    _process_group,
    _adapters,
    _only(f"{ROLLOUT}.name", "vllm", "keeping requests over an update is vLLM's"),
    _only(f"{ROLLOUT}.disaggregation.enabled", False, "a prefill engine would change weights apart from its decoder"),
    _only(f"{MODEL}.mtp.enable_rollout", False, _NO_DRAFT),
    _only(f"{VLLM}.speculative_config", None, _NO_DRAFT),
    _only(f"{VLLM}.kv_transfer_config", None, _NO_STORE),
    _only(f"{VLLM}.kv_offloading_size", None, _NO_STORE),
    _only(f"{VLLM}.enable_lora", False, _NO_ADAPTERS),
    _only(f"{VLLM}.enable_eplb", False, "vLLM loads experts to where they were before it moved them"),
    _only(f"{VLLM}.prefill_context_parallel_size", 1, "updates are only verified for tensor parallelism"),
    _only(f"{ROLLOUT}.quantization", None, _NOT_QUANTISED),
    _only(f"{VLLM}.quantization", None, _NOT_QUANTISED),
)
RULES = (
    _other_sections,
    _dynamic_sampling,
    then(
        _own_section,
        under(_in_mode(PIPELINE_RL), *_OF_PIPELINE),
        under(_in_mode(names.PPO_OFF_POLICY), _recorded_log_probs(names.PPO_OFF_POLICY), _equal_parts),
    ),
)
