# SPDX-License-Identifier: Apache-2.0
"""Contradictions in a composed config, each with the key to change. Pure functions of the config."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omegaconf import DictConfig, OmegaConf

from scalerl_verl import engine_context as context
from scalerl_verl.advantage import shaping_step as reward_shaping
from scalerl_verl.advantage import verl_optimizer_steps as optimizer_steps
from scalerl_verl.advantage.shaping_step import make_reward_shapings, read_shapings
from scalerl_verl.config import legacy_keys, ratio_checks, transfer_checks
from scalerl_verl.config.machine_checks import cluster_address, num_devices
from scalerl_verl.config.settings import AlgorithmSettings
from scalerl_verl.curriculum import settings as curriculum_settings
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.generator import frontend
from scalerl_verl.head import settings as head_settings
from scalerl_verl.interruption import settings as interruption_settings
from scalerl_verl.loss.terms import UNWEIGHTED, active_terms
from scalerl_verl.names import (
    ACTOR,
    ACTOR_CLASS,
    ACTOR_CLASSES,
    ADV_ESTIMATOR,
    ADV_NORM,
    ALGORITHM_KEY,
    ALGORITHM_SECTION,
    CISPO,
    CORRECTION,
    DROP,
    ESTIMATOR,
    FILTER_GROUPS,
    GROUP_SIZE,
    LOSS_AGG_MODE,
    LOSS_MODE,
    MODEL,
    PRESET_GROUP,
    PROMPT_MEAN,
    RAY,
    ROLLOUT,
    SHAPING_SECTION,
    V1,
    ZERO_VARIANCE,
    select,
)
from scalerl_verl.names.asking import FOR_ANY_ESTIMATOR, OWN_KEYS, near_misses, uses_estimator
from scalerl_verl.names.numbers import check_numbers, number, without_consequences
from scalerl_verl.pipeline import checks as pipeline_checks
from scalerl_verl.upstream.activation import PLATFORM_ENV, is_cpu_platform

_IGNORES_AGG_MODE = ("sapo", "geo_mean")
"""verl's losses that hard-code their own aggregation."""
_NOT_HOMOGENEOUS = ("dro", "clip_cov", "kl_cov")
"""verl's losses with a term or a bound that does not scale with the advantage: weights in it change the objective."""

Check = Callable[[DictConfig], Iterator[str]]


def find_problems(config: DictConfig, also: Callable[[DictConfig], list[str]] | None = None) -> list[str]:
    """Every contradiction of a config that uses our names; empty if there is none.

    Args:
        config: verl's, composed.
        also: more checks, of this machine.
    """
    wrong, readable = check_numbers(config)
    found = [problem for check in _CHECKS for problem in check(readable)] + (also(readable) if also else [])
    return [*wrong.values(), *without_consequences(found, wrong)]


def _names(config: DictConfig) -> Iterator[str]:
    for path, (value, meant) in near_misses(config).items():
        if path in (f"{curriculum_settings.SECTION}.class_path", head_settings.BACKEND, head_settings.HEAD_DTYPE):
            continue  # its own check says more
        yield f"{path}={value} does not exist: did you mean {meant}?"
    if OmegaConf.select(config, PRESET_GROUP) is not None:
        yield f"the top-level key scalerl has no effect: presets are +scalerl=NAME, settings {ALGORITHM_SECTION}"
    for key in config.algorithm:
        if str(key) != ALGORITHM_KEY and str(key).casefold().startswith((ALGORITHM_KEY, *OWN_KEYS)):
            yield f"algorithm.{key} has no effect: our settings are {ALGORITHM_SECTION}.{' and .'.join(OWN_KEYS)}"
    if OmegaConf.select(config, "async_training") is not None or OmegaConf.select(config, "rollout") is not None:
        yield (
            "this is not the V1 trainer of verl.trainer.main_ppo: other entry points replace the configured loss or "
            "leave out the prompt weights; launch with python -m verl.trainer.main_ppo"
        )
    if not select(config, "trainer.use_v1", True):
        yield "trainer.use_v1=False: verl's old trainer replaces the configured loss; set trainer.use_v1=True"


def _algorithm_section(config: DictConfig) -> Iterator[str]:
    section = OmegaConf.select(config, ALGORITHM_SECTION)
    if section is None:
        return
    if not isinstance(section, DictConfig):
        yield f"{ALGORITHM_SECTION}={section} must be a section: set {ADV_NORM} or .zero_variance"
        return
    try:
        settings = AlgorithmSettings.from_config(OmegaConf.to_container(section, resolve=True))
    except ScaleRLConfigError as error:
        yield from error.problems
        return
    estimator = select(config, ADV_ESTIMATOR)
    if estimator == ESTIMATOR:
        return
    # verl's estimators read the rewards that a shaping left, but know nothing of adv_norm and zero_variance.
    own = [f"{ALGORITHM_SECTION}.{key}" for key in section if key not in FOR_ANY_ESTIMATOR]
    if not section or len(own) == len(section):
        yield (
            f"{ALGORITHM_SECTION} is read by the estimator {ESTIMATOR} only, but {ADV_ESTIMATOR}={estimator}: set "
            f"{ADV_ESTIMATOR}={ESTIMATOR} or delete the section (~{ALGORITHM_SECTION})"
        )
    elif own:
        yield (
            f"{' and '.join(own)}: read by the estimator {ESTIMATOR} only, but {ADV_ESTIMATOR}={estimator}; set "
            f"{ADV_ESTIMATOR}={ESTIMATOR} or delete them (~{' ~'.join(own)})"
        )
    for name, shaping in make_reward_shapings(settings.reward_shaping).items():
        if shaping.leaves_out:
            yield (
                f"{SHAPING_SECTION}.{name} leaves responses out of training, which "
                f"{ADV_ESTIMATOR}={estimator} would keep in its group means and denominators: set "
                f"{ADV_ESTIMATOR}={ESTIMATOR}"
            )


def _drops_prompts(config: DictConfig) -> bool:
    """Whether the run's estimator leaves prompts of equal rewards out."""
    if not uses_estimator(config):
        return False
    return bool(select(config, ZERO_VARIANCE, AlgorithmSettings.zero_variance) == DROP)


def _double_filtering(config: DictConfig) -> Iterator[str]:
    if _drops_prompts(config) and select(config, FILTER_GROUPS, False):
        yield (
            f"{ZERO_VARIANCE}=drop and {FILTER_GROUPS}=True both filter prompts, one "
            "without and one with refill: set zero_variance=keep, or filter_groups.enable=False"
        )


def _estimator(config: DictConfig) -> Iterator[str]:
    if not uses_estimator(config):
        return
    group_size = number(config, GROUP_SIZE)
    if group_size < 2:
        yield (
            f"{GROUP_SIZE}={group_size}: {ADV_ESTIMATOR}={ESTIMATOR} centres rewards over the responses to one "
            "prompt, which leaves 0 for a single one; set n to 2 or more (the paper uses 16)"
        )
    if select(config, "algorithm.use_kl_in_reward", False):
        yield "algorithm.use_kl_in_reward=True changes the rewards that zero-variance filtering compares: set it False"
    correction = CORRECTION
    rejection, loss = f"{correction}.rollout_rs", select(config, LOSS_MODE)
    acts = not select(config, f"{correction}.bypass_mode", False) or loss == "bypass_mode"
    if acts and select(config, rejection) is not None and loss != CISPO:
        yield (
            f"{rejection} masks tokens after the trainer has counted them, so {ADV_ESTIMATOR}={ESTIMATOR} would "
            f"correct another denominator than the loss uses: set {rejection}=null"
        )


def _terms_without_weights(config: DictConfig) -> Iterator[str]:
    """Rows are left out through their weights, which distillation does not have."""
    if not uses_estimator(config):
        return
    if select(config, LOSS_AGG_MODE) == PROMPT_MEAN:
        return  # which is refused with these terms whatever is left out
    for path, value in active_terms(config, UNWEIGHTED).items():
        inactive = UNWEIGHTED[path]
        if _drops_prompts(config):
            yield (
                f"{path}={value} with {ZERO_VARIANCE}=drop: this term would still average over "
                "the dropped prompts, and be skipped with the whole update if a batch has no other ones; set "
                f"{ZERO_VARIANCE}=keep, or {path}={inactive}"
            )
        for name in _leaving_out(config):
            yield (
                f"{path}={value} with {SHAPING_SECTION}.{name}: this term would still train on "
                f"the responses that {name} leaves out; set {path}={inactive}, or delete the shaping "
                f"(~{SHAPING_SECTION}.{name})"
            )


def _leaving_out(config: DictConfig) -> list[str]:
    """Names of the reward shapings that leave responses out; none where the section is refused anyway."""
    try:
        return [name for name, shaping in read_shapings(config).items() if shaping.leaves_out]
    except ValueError:
        return []


def _critic(config: DictConfig) -> Iterator[str]:
    if not select(config, "critic.enable", False):
        return
    estimator = select(config, ADV_ESTIMATOR)
    if estimator == ESTIMATOR:
        yield (
            f"critic.enable=True: the returns of {ADV_ESTIMATOR}={ESTIMATOR} are its weighted advantages, which no "
            "critic can learn and nothing reads; set critic.enable=False"
        )
    elif select(config, "critic.loss_agg_mode") == PROMPT_MEAN:
        without = "" if estimator == "gae" else ", or critic.enable=False"
        yield (
            f"critic.loss_agg_mode={PROMPT_MEAN}: prompt weights travel in the advantages, which the value loss of "
            f"critic.enable=True does not have; set critic.loss_agg_mode=token-mean{without}"
        )


def _poll_interval(config: DictConfig) -> Iterator[str]:
    section = f"{V1}.sampler"
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


def _row_weights(config: DictConfig) -> Iterator[str]:
    loss = select(config, LOSS_MODE, "vanilla")
    users = {LOSS_AGG_MODE: PROMPT_MEAN, ADV_ESTIMATOR: ESTIMATOR}
    asked = [f"{path}={value}" for path, value in users.items() if select(config, path) == value]
    if asked and loss in _NOT_HOMOGENEOUS:
        yield (
            f"{LOSS_MODE}={loss} does not scale with the advantages, in which {' and '.join(asked)} "
            "put weights: choose another loss, or verl's own aggregation and estimator"
        )
    mode = select(config, LOSS_AGG_MODE, "token-mean")
    if uses_estimator(config) and loss in _IGNORES_AGG_MODE:
        # The weights of dropped prompts undo the denominator of the mode, so the loss must really use that mode.
        if loss == "geo_mean":
            yield (
                f"{LOSS_MODE}=geo_mean averages over each micro-batch by itself: "
                f"{ADV_ESTIMATOR}={ESTIMATOR} cannot take dropped prompts out of that; choose another loss"
            )
        elif mode != "seq-mean-token-mean":
            yield (
                f"{LOSS_AGG_MODE}={mode} is ignored by policy_loss.loss_mode={loss}, which hard-codes "
                f"seq-mean-token-mean: set that mode, so that {ADV_ESTIMATOR}={ESTIMATOR} uses its denominator"
            )


def _prompt_mean(config: DictConfig) -> Iterator[str]:
    if select(config, LOSS_AGG_MODE) != PROMPT_MEAN:
        return
    loss = select(config, LOSS_MODE, "vanilla")
    if loss in _IGNORES_AGG_MODE:
        yield (
            f"{LOSS_AGG_MODE}={PROMPT_MEAN} would be ignored by policy_loss.loss_mode={loss}, which hard-codes "
            "its own aggregation: choose another loss, or loss_agg_mode=seq-mean-token-mean"
        )
    given, own = str(select(config, ACTOR_CLASS, "")), [f"verl.workers.config.{name}" for name in ACTOR_CLASSES]
    # A config that is checked again has our class already.
    if given.rpartition(".")[2].removeprefix("ScaleRL") not in ACTOR_CLASSES:
        yield (
            f"{ACTOR_CLASS}={given} with loss_agg_mode=prompt-mean: a class that is not verl's refuses the mode; set "
            f"{ACTOR_CLASS} to one of {', '.join(own)}"
        )
    dropping = f" with {ZERO_VARIANCE}=keep" if _drops_prompts(config) else ""
    other = "another loss_agg_mode" + dropping
    for path, value in active_terms(config, UNWEIGHTED).items():
        yield (
            f"{path}={value} with loss_agg_mode={PROMPT_MEAN}: the weights of prompts do not reach this term; "
            f"set {path}={UNWEIGHTED[path]} or {other}"
        )


def _fixed_width(config: DictConfig) -> Iterator[str]:
    sections = [ACTOR, *(["critic"] if select(config, "critic.enable", False) else [])]
    for section in sections:
        mode = select(config, f"{section}.loss_agg_mode")
        if mode == "seq-mean-token-sum-norm" and select(config, f"{section}.loss_scale_factor") is None:
            yield (
                f"{section}.loss_scale_factor=null with loss_agg_mode={mode} divides by the width of each padded "
                "micro-batch, so the loss would depend on how a batch is split: set "
                f"{section}.loss_scale_factor='${{data.max_response_length}}'"
            )


def _cpu(config: DictConfig) -> Iterator[str]:
    device = select(config, "trainer.device", "cuda")
    if not is_cpu_platform():
        if device == "cpu":
            yield f"trainer.device=cpu needs the environment variable {PLATFORM_ENV}=cpu: export it before launching"
        return
    wanted = {
        "trainer.device": ("cpu", "verl would look for CUDA devices"),
        f"{ACTOR}.strategy": ("fsdp2", "FSDP1 refuses parameters on the CPU"),
        f"{MODEL}.use_remove_padding": (False, "it needs flash-attn"),
        f"{ROLLOUT}.enforce_eager": (True, "there are no CUDA graphs"),
        f"{ROLLOUT}.enable_sleep_mode": (False, "vLLM's CPU engine cannot sleep"),
        f"{ROLLOUT}.free_cache_engine": (False, "vLLM's CPU engine cannot release its cache"),
    }
    for path, (value, why) in wanted.items():
        given = OmegaConf.select(config, path)
        if given != value:
            yield f"{path}={given} with {PLATFORM_ENV}=cpu: {why}; set {path}={value} (+scalerl=cpu sets all of these)"
    slots = num_devices(config)
    ray_slots = select(config, f"{RAY}.num_gpus")
    # A cluster that runs already has its own slots.
    joins = cluster_address(config) != "local"
    if not joins and (ray_slots is None or int(ray_slots) < slots):
        yield (
            f"{RAY}.num_gpus={ray_slots}: on the CPU Ray's GPUs are logical slots and this run needs "
            f"{slots}; set +{RAY}.num_gpus={slots}"
        )


_CHECKS: tuple[Check, ...] = (
    _names,
    _algorithm_section,
    _double_filtering,
    _estimator,
    _terms_without_weights,
    _critic,
    _poll_interval,
    ratio_checks.find_problems,
    _row_weights,
    _prompt_mean,
    _fixed_width,
    optimizer_steps.find_problems,
    reward_shaping.find_problems,
    curriculum_settings.find_problems,
    interruption_settings.find_problems,
    context.find_problems,
    pipeline_checks.find_problems,
    transfer_checks.find_problems,
    head_settings.find_problems,
    frontend.find_problems,
    legacy_keys.find_problems,
    _cpu,
)
