# SPDX-License-Identifier: Apache-2.0
"""Contradictions in a composed config, each with the key to change. Pure functions of the config."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import fields

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.plugins import curriculum_settings, head_settings, interruption_settings, pipeline_checks
from scalerl_verl.plugins.names import FOR_ANY_ESTIMATOR, OWN_KEYS, near_misses, select
from scalerl_verl.plugins.reward_shaping import make_reward_shapings
from scalerl_verl.plugins.settings import AlgorithmSettings, PolicyLossSettings
from scalerl_verl.upstream.activation import PLATFORM_ENV, is_cpu_platform

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_IGNORES_AGG_MODE = ("sapo", "geo_mean")
"""verl's losses that hard-code their own aggregation."""
_NOT_HOMOGENEOUS = ("dro", "clip_cov", "kl_cov")
"""verl's losses with a term or a bound that does not scale with the advantage: weights in it change the objective."""

Check = Callable[[DictConfig], Iterator[str]]


def find_problems(config: DictConfig) -> list[str]:
    """Every contradiction of a config that uses our names; empty if there is none."""
    return [problem for check in _CHECKS for problem in check(config)]


def _names(config: DictConfig) -> Iterator[str]:
    for path, (value, meant) in near_misses(config).items():
        if path in (f"{curriculum_settings.SECTION}.class_path", head_settings.BACKEND, head_settings.HEAD_DTYPE):
            continue  # its own check says more
        yield f"{path}={value} does not exist: did you mean {meant}?"
    if OmegaConf.select(config, "scalerl") is not None:
        yield "the top-level key scalerl has no effect: presets are +scalerl=NAME, settings algorithm.scalerl"
    for key in config.algorithm:
        if str(key) != "scalerl" and str(key).casefold().startswith(("scalerl", *OWN_KEYS)):
            yield f"algorithm.{key} has no effect: our settings are algorithm.scalerl.{' and .'.join(OWN_KEYS)}"
    if OmegaConf.select(config, "async_training") is not None or OmegaConf.select(config, "rollout") is not None:
        yield (
            "this is not the V1 trainer of verl.trainer.main_ppo: other entry points replace the configured loss or "
            "leave out the prompt weights; launch with python -m verl.trainer.main_ppo"
        )
    if not select(config, "trainer.use_v1", True):
        yield "trainer.use_v1=False: verl's old trainer replaces the configured loss; set trainer.use_v1=True"


def _algorithm_section(config: DictConfig) -> Iterator[str]:
    section = OmegaConf.select(config, "algorithm.scalerl")
    if section is None:
        return
    if not isinstance(section, DictConfig):
        yield f"algorithm.scalerl={section} must be a section: set algorithm.scalerl.adv_norm or .zero_variance"
        return
    try:
        settings = AlgorithmSettings.from_config(OmegaConf.to_container(section, resolve=True))
    except ScaleRLConfigError as error:
        yield from error.problems
        return
    estimator = select(config, "algorithm.adv_estimator")
    if estimator == "scalerl":
        return
    # verl's estimators read the rewards that a shaping left, but know nothing of adv_norm and zero_variance.
    if set(section) - FOR_ANY_ESTIMATOR or not section:
        yield (
            f"algorithm.scalerl is read by the estimator scalerl only, but algorithm.adv_estimator={estimator}: set "
            "algorithm.adv_estimator=scalerl or delete the section (~algorithm.scalerl)"
        )
    for name, shaping in make_reward_shapings(settings.reward_shaping).items():
        if shaping.leaves_out:
            yield (
                f"algorithm.scalerl.reward_shaping.{name} leaves responses out of training, which "
                f"algorithm.adv_estimator={estimator} would keep in its group means and denominators: set "
                "algorithm.adv_estimator=scalerl"
            )


def _drops_prompts(config: DictConfig) -> bool:
    """Whether the estimator ``scalerl``, where it is used, leaves prompts of equal rewards out."""
    return select(config, "algorithm.scalerl.zero_variance", AlgorithmSettings.zero_variance) == "drop"


def _double_filtering(config: DictConfig) -> Iterator[str]:
    if select(config, "algorithm.adv_estimator") != "scalerl":
        return
    if _drops_prompts(config) and select(config, "algorithm.filter_groups.enable", False):
        yield (
            "algorithm.scalerl.zero_variance=drop and algorithm.filter_groups.enable=True both filter prompts, one "
            "without and one with refill: set zero_variance=keep, or filter_groups.enable=False"
        )


def _estimator(config: DictConfig) -> Iterator[str]:
    if select(config, "algorithm.adv_estimator") != "scalerl":
        return
    group_size = int(select(config, f"{_ROLLOUT}.n", 1))
    if group_size < 2:
        yield (
            f"{_ROLLOUT}.n={group_size}: algorithm.adv_estimator=scalerl centres rewards over the responses to one "
            "prompt, which leaves 0 for a single one; set n to 2 or more (the paper uses 16)"
        )
    if select(config, "algorithm.use_kl_in_reward", False):
        yield "algorithm.use_kl_in_reward=True changes the rewards that zero-variance filtering compares: set it False"
    if select(config, "critic.enable", False):
        yield (
            "critic.enable=True: algorithm.adv_estimator=scalerl makes no value targets, its returns are advantages "
            "with row weights; set critic.enable=False"
        )
    for key, inactive in (("entropy_coeff", 0), ("use_kl_loss", False)):
        value = select(config, f"{_ACTOR}.{key}", inactive)
        if _drops_prompts(config) and value != inactive and select(config, f"{_ACTOR}.loss_agg_mode") != "prompt-mean":
            yield (
                f"{_ACTOR}.{key}={value} with algorithm.scalerl.zero_variance=drop: this term would still average over "
                f"the dropped prompts, and fall away where all are; set {key}={inactive}, or zero_variance=keep"
            )
    rejection = "algorithm.rollout_correction.rollout_rs"
    if select(config, rejection) is not None and select(config, f"{_ACTOR}.policy_loss.loss_mode") != "scalerl_cispo":
        yield (
            f"{rejection} masks tokens after the trainer has counted them, so algorithm.adv_estimator=scalerl would "
            f"correct another denominator than the loss uses: set {rejection}=null"
        )


def _poll_interval(config: DictConfig) -> Iterator[str]:
    section = "trainer.v1.sampler"
    for key in OmegaConf.select(config, section) or ():
        if str(key).startswith("poll_interval"):
            yield f"{section}.{key} has no effect: set +{section}.sampler_kwargs.poll_interval_s"
    kwargs = OmegaConf.select(config, f"{section}.sampler_kwargs") or {}
    custom = select(config, f"{section}.custom_sampler.path")
    for key, value in kwargs.items():
        if key == "poll_interval_s":
            if custom:
                yield f"{section}.sampler_kwargs.poll_interval_s is for verl's replay buffer, not {custom}: delete it"
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                yield f"{section}.sampler_kwargs.poll_interval_s={value!r} must be a positive number of seconds"
        elif not custom:
            yield (
                f"{section}.sampler_kwargs.{key} has no effect: verl's own replay buffer takes no keyword arguments, "
                "and of ours it is poll_interval_s"
            )


def _cispo(config: DictConfig) -> Iterator[str]:
    section = OmegaConf.select(config, f"{_ACTOR}.policy_loss")
    if section is None or section.get("loss_mode") != "scalerl_cispo":
        for key in ("eps_max", "token_mask_range", "sequence_truncation"):
            if section is not None and section.get(key) is not None:
                yield (
                    f"{_ACTOR}.policy_loss.{key} is read by scalerl_cispo only, but loss_mode="
                    f"{section.get('loss_mode')}: delete it (~{_ACTOR}.policy_loss.{key}) or use scalerl_cispo"
                )
        return
    try:
        PolicyLossSettings.from_config(section)
    except ScaleRLConfigError as error:
        yield from error.problems
    correction = "algorithm.rollout_correction"
    if not select(config, f"{correction}.bypass_mode", False):
        yield (
            f"{correction}.bypass_mode=False recomputes old_log_probs under the weights that are about to be trained: "
            "the importance ratio of scalerl_cispo would be 1 and its truncation would never act; set "
            f"{correction}.bypass_mode=True, which keeps the log-probs recorded at sampling"
        )
    for key in ("rollout_is", "rollout_rs"):
        if select(config, f"{correction}.{key}") is not None:
            yield f"{correction}.{key} corrects the mismatch that scalerl_cispo already truncates: set it to null"


def _unread_keys(config: DictConfig) -> Iterator[str]:
    """Keys of the policy-loss section that are neither verl's nor ours."""
    from verl.workers.config.actor import PolicyLossConfig

    own = [field.name for field in fields(PolicyLossSettings)]
    known = {"_target_", *own, *(field.name for field in fields(PolicyLossConfig))}
    for key in OmegaConf.select(config, f"{_ACTOR}.policy_loss") or ():
        if str(key) not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"ours are {', '.join(own)}"
            yield f"{_ACTOR}.policy_loss.{key} does not exist: {hint}"


def _engine_setting(config: DictConfig, key: str, default: str) -> tuple[str, str]:
    """(path, value) of a setting as vLLM gets it: verl lets ``engine_kwargs.vllm`` override its own keys."""
    for path in (f"{_ROLLOUT}.engine_kwargs.vllm.{key}", f"{_ROLLOUT}.{key}"):
        value = select(config, path)
        if value is not None:
            return path, str(value)
    return f"{_ROLLOUT}.{key}", default


def _recorded(config: DictConfig) -> Iterator[str]:
    """What the log-probs recorded at sampling must be where a loss, or the check of the FP32 head, relies on them."""
    loss = select(config, f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    bypass = bool(select(config, "algorithm.rollout_correction.bypass_mode", False))
    uses = {
        "policy_loss.loss_mode=scalerl_cispo": loss == "scalerl_cispo",
        "algorithm.rollout_correction.bypass_mode=True": bypass,
        "the FP32 head, which compares both sides in every step,": head_settings.trainer_backend(config) is not None,
    }
    reason = next((reason for reason, holds in uses.items() if holds), None)
    if reason is None:
        return
    if not select(config, f"{_ROLLOUT}.calculate_log_probs", False):
        yield f"{_ROLLOUT}.calculate_log_probs=False: {reason} needs the sampling-time log-probs; set it True"
    yield from _sampling(config)
    path, dtype = _engine_setting(config, "dtype", "")
    if dtype.lower() in ("float16", "half", "fp16"):
        yield f"{path}={dtype} cannot hold an importance ratio: use bfloat16 or float32"
    for key in ("rollout_is", "rollout_rs"):
        if (
            bypass
            and loss not in ("scalerl_cispo", "bypass_mode")
            and (select(config, f"algorithm.rollout_correction.{key}") is not None)
        ):
            yield (
                f"algorithm.rollout_correction.{key} has no effect with bypass_mode=True and policy_loss.loss_mode="
                f"{loss}: verl computes no correction then; set {key}=null, or bypass_mode=False"
            )


def _sampling(config: DictConfig) -> Iterator[str]:
    """The recorded log-prob must be that of the distribution the trainer scores."""
    temperature = float(select(config, f"{_ROLLOUT}.temperature", 1.0))
    if temperature <= 0:
        yield f"{_ROLLOUT}.temperature={temperature}: greedy sampling has no importance ratio; set it above 0"
    path, mode = _engine_setting(config, "logprobs_mode", "processed_logprobs")
    if mode not in ("processed_logprobs", "raw_logprobs"):
        yield f"{path}={mode} records no log-probs: set logprobs_mode=processed_logprobs"
    elif temperature != 1.0 and mode != "processed_logprobs":
        yield (
            f"{path}={mode} with temperature={temperature}: the recorded log-probs would be at "
            "temperature 1, the trainer scores at the sampling temperature; set logprobs_mode=processed_logprobs"
        )
    top_p, top_k = float(select(config, f"{_ROLLOUT}.top_p", 1.0)), int(select(config, f"{_ROLLOUT}.top_k", -1))
    if top_p != 1.0 or top_k not in (-1, 0):
        yield (
            f"{_ROLLOUT}.top_p={top_p}, top_k={top_k}: truncated sampling renormalises the recorded log-probs, which "
            "leaks into the importance ratio; set top_p=1.0 and top_k=-1"
        )


def _row_weights(config: DictConfig) -> Iterator[str]:
    loss = select(config, f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    users = {f"{_ACTOR}.loss_agg_mode": "prompt-mean", "algorithm.adv_estimator": "scalerl"}
    asked = [f"{path}={value}" for path, value in users.items() if select(config, path) == value]
    if asked and loss in _NOT_HOMOGENEOUS:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={loss} does not scale with the advantages, in which {' and '.join(asked)} "
            "put weights: choose another loss, or verl's own aggregation and estimator"
        )
    mode = select(config, f"{_ACTOR}.loss_agg_mode", "token-mean")
    if select(config, "algorithm.adv_estimator") == "scalerl" and loss in _IGNORES_AGG_MODE:
        # The weights of dropped prompts undo the denominator of the mode, so the loss must really use that mode.
        if loss == "geo_mean":
            yield (
                f"{_ACTOR}.policy_loss.loss_mode=geo_mean averages over each micro-batch by itself: "
                "algorithm.adv_estimator=scalerl cannot take dropped prompts out of that; choose another loss"
            )
        elif mode != "seq-mean-token-mean":
            yield (
                f"{_ACTOR}.loss_agg_mode={mode} is ignored by policy_loss.loss_mode={loss}, which hard-codes "
                "seq-mean-token-mean: set that mode, so that algorithm.adv_estimator=scalerl uses its denominator"
            )


def _prompt_mean(config: DictConfig) -> Iterator[str]:
    if select(config, f"{_ACTOR}.loss_agg_mode") != "prompt-mean":
        return
    loss = select(config, f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    if loss in _IGNORES_AGG_MODE:
        yield (
            f"{_ACTOR}.loss_agg_mode=prompt-mean would be ignored by policy_loss.loss_mode={loss}, which hard-codes "
            "its own aggregation: choose another loss, or loss_agg_mode=seq-mean-token-mean"
        )
    for key, inactive in (("entropy_coeff", 0), ("use_kl_loss", False)):
        value = select(config, f"{_ACTOR}.{key}", inactive)
        if value != inactive:
            yield (
                f"{_ACTOR}.{key}={value} with loss_agg_mode=prompt-mean: prompt weights travel in the advantages, "
                f"which this term does not have; set {key}={inactive} or another loss_agg_mode"
            )
    if select(config, "distillation.enabled", False):
        yield "distillation.enabled=True has no advantages to carry the weights of loss_agg_mode=prompt-mean"


def _cpu(config: DictConfig) -> Iterator[str]:
    device = select(config, "trainer.device", "cuda")
    if not is_cpu_platform():
        if device == "cpu":
            yield f"trainer.device=cpu needs the environment variable {PLATFORM_ENV}=cpu: export it before launching"
        return
    wanted = {
        "trainer.device": ("cpu", "verl would look for CUDA devices"),
        f"{_ACTOR}.strategy": ("fsdp2", "FSDP1 refuses parameters on the CPU"),
        "actor_rollout_ref.model.use_remove_padding": (False, "it needs flash-attn"),
        f"{_ROLLOUT}.enforce_eager": (True, "there are no CUDA graphs"),
        f"{_ROLLOUT}.enable_sleep_mode": (False, "vLLM's CPU engine cannot sleep"),
        f"{_ROLLOUT}.free_cache_engine": (False, "vLLM's CPU engine cannot release its cache"),
    }
    for path, (value, why) in wanted.items():
        given = OmegaConf.select(config, path)
        if given != value:
            yield f"{path}={given} with {PLATFORM_ENV}=cpu: {why}; set {path}={value} (+scalerl=cpu sets all of these)"
    slots = _slots(config)
    ray_slots = select(config, "ray_kwargs.ray_init.num_gpus")
    if not select(config, "ray_kwargs.ray_init.address") and (ray_slots is None or int(ray_slots) < slots):
        yield (
            f"ray_kwargs.ray_init.num_gpus={ray_slots}: on the CPU Ray's GPUs are logical slots and this run needs "
            f"{slots}; set +ray_kwargs.ray_init.num_gpus={slots}"
        )


def _slots(config: DictConfig) -> int:
    trainer = int(select(config, "trainer.nnodes", 1)) * int(select(config, "trainer.n_gpus_per_node", 1))
    if select(config, "trainer.v1.trainer_mode", "sync") in ("sync", "ppo_off_policy"):
        return trainer
    rollout_nodes, slots_a_node = (
        select(config, f"{_ROLLOUT}.nnodes", 0),
        select(config, f"{_ROLLOUT}.n_gpus_per_node", 0),
    )
    return trainer + int(rollout_nodes) * int(slots_a_node)


_CHECKS: tuple[Check, ...] = (
    _names,
    _algorithm_section,
    _double_filtering,
    _estimator,
    _poll_interval,
    _cispo,
    _unread_keys,
    _recorded,
    _row_weights,
    _prompt_mean,
    curriculum_settings.find_problems,
    interruption_settings.find_problems,
    pipeline_checks.find_problems,
    head_settings.find_problems,
    _cpu,
)
