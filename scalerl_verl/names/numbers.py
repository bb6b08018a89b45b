# SPDX-License-Identifier: Apache-2.0
"""Numbers and switches of a composed config: one table of what may stand there, one guarded reader.

The start-up check looks at all of them first. What is wrong is reported and replaced by the table's own value, so that
every other check can go on and all problems are shown at once.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

from scalerl_verl import names
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import ACTOR, CUSTOM_SAMPLER, FSDP, HF_OVERRIDES, HYBRID_ENGINE, MODEL, RAY, ROLLOUT, V1, VALUES
from scalerl_verl.names.kinds import Number, real, shown, whole

_ABSENT = object()


def _below(section: str, keys: str) -> list[str]:
    return [f"{section}.{key}" for key in keys.split()]


_COUNT, _COUNT_OR_NULL, _FROM_0 = whole(), whole(None, null=True), whole(0, 0)
_OFF_BELOW_0, _SIZE_OR_NULL, _PORT = whole(-1, -1), whole(None, 0, null=True), whole(None, 0, null=True, most=65535)
_CLIP, _SHARE = real(0.2, 0, null=True), real(0.5, 0, most=1)
_TABLE: dict[str, dict[Number, str]] = {
    "data": {
        _COUNT: "train_batch_size max_prompt_length max_response_length",
        _COUNT_OR_NULL: "gen_batch_size val_batch_size",
    },
    "trainer": {
        _COUNT: "nnodes n_gpus_per_node total_epochs",
        _COUNT_OR_NULL: "total_training_steps",
        _OFF_BELOW_0: "test_freq save_freq",
    },
    V1: {
        _COUNT: "sync.parameter_sync_step colocate_async.parameter_sync_step separate_async.parameter_sync_step",
        whole(1, 0): "colocate_async.num_warmup_batches separate_async.num_warmup_batches",
    },
    ACTOR: {
        _COUNT: "ppo_mini_batch_size ppo_max_token_len_per_gpu ppo_epochs ulysses_sequence_parallel_size",
        _COUNT_OR_NULL: "ppo_micro_batch_size_per_gpu",
        real(0): "entropy_coeff kl_loss_coef",
        real(0.2, 0): "clip_ratio",
        _CLIP: "clip_ratio_low clip_ratio_high",
        real(3.0, 0): "clip_ratio_c",
        real(1.0, 0): "grad_clip",
        real(1e-6, 0): "optim.lr",
        real(0.01, 0): "optim.weight_decay",
        _OFF_BELOW_0: "optim.lr_warmup_steps",
    },
    FSDP: {Number(-1, 1, automatic=True): "fsdp_size", _COUNT: "ulysses_sequence_parallel_size"},
    MODEL: {_FROM_0: "lora_rank lora.rank"},
    ROLLOUT: {
        _COUNT: "n val_kwargs.n prompt_length response_length max_num_seqs max_num_batched_tokens agent.num_workers "
        "tensor_model_parallel_size data_parallel_size pipeline_model_parallel_size expert_parallel_size",
        _COUNT_OR_NULL: "max_model_len",
        _FROM_0: "nnodes n_gpus_per_node",
        _SHARE: "gpu_memory_utilization",
        real(1.0, 0): "temperature",
        real(1.0, 0, most=1): "top_p",
        _OFF_BELOW_0: "top_k",
        whole(names.VERL_BUCKET_MB): "checkpoint_engine.update_weights_bucket_megabytes",
    },
    names.VLLM: {
        _COUNT_OR_NULL: "max_model_len max_num_seqs block_size "
        "tensor_parallel_size data_parallel_size pipeline_parallel_size",
        real(None, 0, most=1, null=True): "gpu_memory_utilization",
    },
    RAY: {_SIZE_OR_NULL: "num_gpus num_cpus", _COUNT_OR_NULL: "object_store_memory", _PORT: "dashboard_port"},
    "transfer_queue.metrics": {_PORT: "port"},
    "algorithm": {whole(0, -1): "filter_groups.max_num_gen_batches"},
}
NUMBERS: dict[str, Number] = {
    path: kind for section, kinds in _TABLE.items() for kind, keys in kinds.items() for path in _below(section, keys)
}
"""Keys whose numbers we read, of verl's; those of our own sections are checked with their sections."""
SWITCHES = (
    *_below("trainer", "use_v1 val_before_train val_only"),
    *_below("data", "shuffle filter_overlong_prompts"),
    HYBRID_ENGINE,
    *_below(ACTOR, "use_dynamic_bsz use_kl_loss shuffle calculate_sum_pi_squared"),
    *_below(FSDP, "param_offload optimizer_offload offload_policy reshard_after_forward"),
    *_below(MODEL, "use_remove_padding use_fused_kernels enable_gradient_checkpointing"),
    *_below(MODEL, "lora.merge mtp.enable mtp.enable_train mtp.enable_rollout"),
    *_below(ROLLOUT, "calculate_log_probs enforce_eager free_cache_engine multi_turn.enable disaggregation.enabled"),
    *_below(ROLLOUT, "full_determinism enable_rollout_routing_replay enable_prefix_caching val_kwargs.do_sample"),
    *_below("algorithm", "use_kl_in_reward filter_groups.enable rollout_correction.bypass_mode"),
    *("critic.enable", "distillation.enabled"),
    *_below("reward", "reward_model.enable reward_model.enable_resource_pool reward_kwargs.overlong_buffer_cfg.enable"),
)
"""Keys that are true or false: text such as 'no' would count as true, and null as false whatever the default is."""
_UNDECIDED = "critic.enable"
"""The one of them where null has a meaning of its own."""
WORDS = (
    *VALUES,
    *(f"{ACTOR}.strategy", f"{ROLLOUT}.name", "reward.reward_manager.name", names.FILTER_METRIC),
    *_below("trainer", "device resume_mode"),
)
"""Keys that take one word: verl looks up the text of a list or section, in a worker."""
_NEEDED_SECTIONS = (
    *("trainer", V1, "data", "algorithm", "critic", "reward", "reward.reward_model", "actor_rollout_ref"),
    *(ACTOR, f"{ACTOR}.optim", names.LOSS_SECTION, FSDP, MODEL, ROLLOUT),
    *_below(ROLLOUT, "agent checkpoint_engine multi_turn val_kwargs"),
)
"""Sections that verl looks into whatever stands there: one without keys in a YAML file is null."""
_MORE_SECTIONS = (
    *(f"{MODEL}.mtp", "data.custom_cls", "skip.rollout_tq", CUSTOM_SAMPLER, names.POLL_SECTION),
    *_below(ROLLOUT, "disaggregation qat checkpoint_engine.engine_kwargs.nccl"),
    *_below("reward", "custom_reward_function reward_manager"),
)
"""Sections that the start-up checks look into, beside those above the keys of these tables."""


def number(config: Any, path: str) -> Any:
    """The number at a key of `NUMBERS`, or the table's default where the key is absent or null.

    Raises:
        ScaleRLConfigError: something else stands there.
    """
    rule, value = NUMBERS[path], _read(config, path)
    if value is _ABSENT or (value is None and rule.null):
        return rule.default
    change = rule.wrong(value)
    if change is not None:
        raise ScaleRLConfigError([f"{path}={shown(value)}: {change}"])
    return value


def check_numbers(config: Any) -> tuple[dict[str, str], Any]:
    """Look at every number and switch.

    Returns:
        Key -> problem, and the config with what the table has in place of what is wrong: the config itself if nothing
        is.
    """
    no_sections, dangling = dict(_no_sections(config)), list(_dangling(config))
    problems = {**no_sections, **dict(_unresolved(dangling, no_sections)), **dict(_wrong(config))}
    if not problems:
        return problems, config
    from omegaconf import OmegaConf, open_dict

    repaired = copy.deepcopy(config)
    with open_dict(repaired):
        for path in problems:
            stand_in: Any = NUMBERS[path].stand_in if path in NUMBERS else {} if path in _sections() else None
            OmegaConf.update(repaired, path, stand_in, merge=False, force_add=True)
        for path, _, _ in list(_dangling(repaired)) if no_sections else dangling:
            if _read(repaired, path) is _ABSENT:  # refers to what was wrong and has no stand-in
                OmegaConf.update(repaired, path, None, merge=False)
    return problems, repaired


def without_consequences(problems: list[str], wrong: dict[str, str]) -> list[str]:
    """Problems of the other checks but for those that speak of a key whose value is a stand-in."""
    return [text for text in problems if not any(path in text for path in wrong)]


def _sections() -> list[str]:
    """Every section above a key that we read, the outermost first."""
    found = set()
    for path in (*NUMBERS, *SWITCHES, *VALUES, *(f"{section}." for section in _MORE_SECTIONS)):
        while "." in path:
            path = path.rpartition(".")[0]
            found.add(path)
    return sorted(found, key=lambda path: path.count("."))


def _no_sections(config: Any) -> Iterator[tuple[str, str]]:
    from omegaconf import DictConfig

    for path in _sections():
        value = _read(config, path)
        text = isinstance(value, str) and path == HF_OVERRIDES  # vLLM takes JSON text, too
        if value is None and path in _NEEDED_SECTIONS:
            yield path, f"{path}=null: it is a section, set the keys below it or leave it out"
        elif value is not _ABSENT and value is not None and not text and not isinstance(value, DictConfig):
            yield path, f"{path}={shown(value)}: it is a section, set the keys below it"


def _wrong(config: Any) -> Iterator[tuple[str, str]]:
    from omegaconf import DictConfig, ListConfig

    for path, rule in NUMBERS.items():
        value = _read(config, path)
        change = None if value is _ABSENT else rule.wrong(value)
        # One that refers to another key is wrong there.
        if change is not None and not _refers(config, path):
            yield path, f"{path}={shown(value)}: {change}"
    for path in SWITCHES:
        value = _read(config, path)
        allowed = value is _ABSENT or isinstance(value, bool) or (value is None and path == _UNDECIDED)
        if not allowed and not _refers(config, path):
            yield path, f"{path}={shown(value)}: give True or False"
    for path in WORDS:
        value = _read(config, path)
        if isinstance(value, DictConfig | ListConfig) and not _refers(config, path):
            yield path, f"{path}={value}: give one word, without brackets"


def _read(config: Any, path: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(config, path, default=_ABSENT)
    except OmegaConfBaseException:
        return _ABSENT  # reported as a reference that leads nowhere


def _refers(config: Any, path: str) -> bool:
    from omegaconf import OmegaConf

    parent, _, leaf = path.rpartition(".")
    return bool(OmegaConf.is_interpolation(OmegaConf.select(config, parent), leaf))


def _unresolved(dangling: list[tuple[str, str, str]], no_sections: Collection[str]) -> Iterator[tuple[str, str]]:
    """References (``${...}``) that lead nowhere: verl would end on the first, in a worker."""
    for path, raw, cause in dangling:
        # One that refers to a key with such a reference, or into what is no section, is wrong there.
        if any(f"{section}." in raw for section in no_sections):
            continue
        if any(name in raw for name in re.findall(r"'([^']+)'", cause)) or "'" not in cause:
            yield path, f"{path}={raw}: {cause}; give a value or set what it refers to"


def _dangling(node: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, text and cause of every reference below a section or list that cannot be resolved."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    keys = list(node.keys()) if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        inner = f"{path}.{key}".lstrip(".") if isinstance(node, DictConfig) else f"{path}[{key}]"
        if OmegaConf.is_missing(node, key):
            continue
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            yield inner, str(OmegaConf.to_container(node, resolve=False)[key]), str(error).splitlines()[0]
            continue
        if isinstance(value, DictConfig | ListConfig) and not OmegaConf.is_interpolation(node, key):
            yield from _dangling(value, inner)  # by the node: a key of a user's may hold a dot
