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
from scalerl_verl.config_numbers import check_numbers, number, without_consequences
from scalerl_verl.curriculum import settings as curriculum_settings
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.head import settings as head_settings
from scalerl_verl.interruption import settings as interruption_settings
from scalerl_verl.loss.terms import UNWEIGHTED, active_terms
from scalerl_verl.names import FOR_ANY_ESTIMATOR, OWN_KEYS, near_misses, select
from scalerl_verl.pipeline import checks as pipeline_checks
from scalerl_verl.upstream.activation import PLATFORM_ENV, is_cpu_platform

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
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
    own = [f"algorithm.scalerl.{key}" for key in section if key not in FOR_ANY_ESTIMATOR]
    if not section or len(own) == len(section):
        yield (
            f"algorithm.scalerl is read by the estimator scalerl only, but algorithm.adv_estimator={estimator}: set "
            "algorithm.adv_estimator=scalerl or delete the section (~algorithm.scalerl)"
        )
    elif own:
        yield (
            f"{' and '.join(own)}: read by the estimator scalerl only, but algorithm.adv_estimator={estimator}; set "
            f"algorithm.adv_estimator=scalerl or delete them (~{' ~'.join(own)})"
        )
    for name, shaping in make_reward_shapings(settings.reward_shaping).items():
        if shaping.leaves_out:
            yield (
                f"algorithm.scalerl.reward_shaping.{name} leaves responses out of training, which "
                f"algorithm.adv_estimator={estimator} would keep in its group means and denominators: set "
                "algorithm.adv_estimator=scalerl"
            )


def _drops_prompts(config: DictConfig) -> bool:
    """Whether the run's estimator leaves prompts of equal rewards out."""
    if select(config, "algorithm.adv_estimator") != "scalerl":
        return False
    return bool(select(config, "algorithm.scalerl.zero_variance", AlgorithmSettings.zero_variance) == "drop")


def _double_filtering(config: DictConfig) -> Iterator[str]:
    if _drops_prompts(config) and select(config, "algorithm.filter_groups.enable", False):
        yield (
            "algorithm.scalerl.zero_variance=drop and algorithm.filter_groups.enable=True both filter prompts, one "
            "without and one with refill: set zero_variance=keep, or filter_groups.enable=False"
        )


def _estimator(config: DictConfig) -> Iterator[str]:
    if select(config, "algorithm.adv_estimator") != "scalerl":
        return
    group_size = number(config, f"{_ROLLOUT}.n")
    if group_size < 2:
        yield (
            f"{_ROLLOUT}.n={group_size}: algorithm.adv_estimator=scalerl centres rewards over the responses to one "
            "prompt, which leaves 0 for a single one; set n to 2 or more (the paper uses 16)"
        )
    if select(config, "algorithm.use_kl_in_reward", False):
        yield "algorithm.use_kl_in_reward=True changes the rewards that zero-variance filtering compares: set it False"
    correction = "algorithm.rollout_correction"
    rejection, loss = f"{correction}.rollout_rs", select(config, f"{_ACTOR}.policy_loss.loss_mode")
    acts = not select(config, f"{correction}.bypass_mode", False) or loss == "bypass_mode"
    if acts and select(config, rejection) is not None and loss != "scalerl_cispo":
        yield (
            f"{rejection} masks tokens after the trainer has counted them, so algorithm.adv_estimator=scalerl would "
            f"correct another denominator than the loss uses: set {rejection}=null"
        )


def _terms_without_weights(config: DictConfig) -> Iterator[str]:
    """Rows are left out through their weights, which distillation does not have."""
    if select(config, "algorithm.adv_estimator") != "scalerl":
        return
    if select(config, f"{_ACTOR}.loss_agg_mode") == "prompt-mean":
        return  # which is refused with these terms whatever is left out
    for path, value in active_terms(config, UNWEIGHTED).items():
        inactive = UNWEIGHTED[path]
        if _drops_prompts(config):
            yield (
                f"{path}={value} with algorithm.scalerl.zero_variance=drop: this term would still average over "
                "the dropped prompts, and be skipped with the whole update if a batch has no other ones; set "
                f"algorithm.scalerl.zero_variance=keep, or {path}={inactive}"
            )
        for name in _leaving_out(config):
            yield (
                f"{path}={value} with algorithm.scalerl.reward_shaping.{name}: this term would still train on "
                f"the responses that {name} leaves out; set {path}={inactive}, or delete the shaping "
                f"(~algorithm.scalerl.reward_shaping.{name})"
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
    estimator = select(config, "algorithm.adv_estimator")
    if estimator == "scalerl":
        yield (
            "critic.enable=True: the returns of algorithm.adv_estimator=scalerl are its weighted advantages, which no "
            "critic can learn and nothing reads; set critic.enable=False"
        )
    elif select(config, "critic.loss_agg_mode") == "prompt-mean":
        without = "" if estimator == "gae" else ", or critic.enable=False"
        yield (
            "critic.loss_agg_mode=prompt-mean: prompt weights travel in the advantages, which the value loss of "
            f"critic.enable=True does not have; set critic.loss_agg_mode=token-mean{without}"
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
    dropping = " with algorithm.scalerl.zero_variance=keep" if _drops_prompts(config) else ""
    other = "another loss_agg_mode" + dropping
    for path, value in active_terms(config, UNWEIGHTED).items():
        yield (
            f"{path}={value} with loss_agg_mode=prompt-mean: the weights of prompts do not reach this term; "
            f"set {path}={UNWEIGHTED[path]} or {other}"
        )


def _fixed_width(config: DictConfig) -> Iterator[str]:
    sections = [_ACTOR, *(["critic"] if select(config, "critic.enable", False) else [])]
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
    slots = num_devices(config)
    ray_slots = select(config, "ray_kwargs.ray_init.num_gpus")
    # A cluster that runs already has its own slots.
    joins = cluster_address(config) != "local"
    if not joins and (ray_slots is None or int(ray_slots) < slots):
        yield (
            f"ray_kwargs.ray_init.num_gpus={ray_slots}: on the CPU Ray's GPUs are logical slots and this run needs "
            f"{slots}; set +ray_kwargs.ray_init.num_gpus={slots}"
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
    legacy_keys.find_problems,
    _cpu,
)
