# SPDX-License-Identifier: Apache-2.0
"""Contradictions in a composed config, each with the key to change: the table of all rules, and the general rules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl import engine_context, names
from scalerl_verl.advantage import shaping_step, verl_optimizer_steps
from scalerl_verl.config import async_checks, class_checks, legacy_keys, ratio_checks, reward_checks
from scalerl_verl.config.cluster import has_own_ray, num_devices
from scalerl_verl.config.settings import AlgorithmSettings
from scalerl_verl.curriculum import settings as curriculum_settings
from scalerl_verl.generator import frontend
from scalerl_verl.head import settings as head_settings
from scalerl_verl.interruption import settings as interruption_settings
from scalerl_verl.loss.terms import UNWEIGHTED, active_terms
from scalerl_verl.names import ACTOR, ADV_ESTIMATOR, ALGORITHM_SECTION, ESTIMATOR, PROMPT_MEAN, ZERO_VARIANCE, select
from scalerl_verl.names.asking import (
    FOR_ANY_ESTIMATOR,
    OWN_KEYS,
    is_bypassed,
    loss_agg_mode,
    loss_mode,
    misspelt_sections,
    near_misses,
    top_level_keys,
    trainer_mode,
    uses_estimator,
)
from scalerl_verl.names.keys import KEYS, value_of
from scalerl_verl.names.kinds import wrong_values
from scalerl_verl.names.numbers import check_numbers, number, without_consequences
from scalerl_verl.names.rules import Row, Rule, broken, read_by, refusals, then, under
from scalerl_verl.pipeline import checks as pipeline_checks
from scalerl_verl.upstream.activation import PLATFORM_ENV, is_cpu_platform

_SHAPING = names.SHAPING_SECTION
_IGNORES_AGG_MODE = ("sapo", "geo_mean")
"""verl's losses that hard-code their own aggregation."""
_NOT_HOMOGENEOUS = ("dro", "clip_cov", "kl_cov")
"""verl's losses with a term or a bound that does not scale with the advantage: weights in it change the objective."""


def find_problems(config: DictConfig, also: Callable[[DictConfig], list[str]] | None = None) -> list[str]:
    """Every contradiction of a config that uses our names; empty if there is none.

    Args:
        config: verl's, composed.
        also: more checks, of this machine.
    """
    wrong, readable = check_numbers(config)
    found = [*broken(RULES, readable)] + (also(readable) if also else [])
    return [*wrong.values(), *without_consequences(found, wrong)]


def _names(config: DictConfig) -> Iterator[str]:
    for path, (value, meant) in near_misses(config).items():
        if path not in (names.HEAD_BACKEND, names.HEAD_DTYPE):  # their own rules say more
            yield f"{path}={value} does not exist: did you mean {meant}?"
    for key in top_level_keys(config):
        yield f"the top-level key {key} has no effect: presets are +scalerl=NAME, settings {ALGORITHM_SECTION}"
    for key in map(str, config.algorithm):
        if key != names.ALGORITHM_KEY and key.casefold().startswith((names.ALGORITHM_KEY, *OWN_KEYS)):
            yield f"algorithm.{key} has no effect: our settings are {ALGORITHM_SECTION}.{' and .'.join(OWN_KEYS)}"
    for path, meant in misspelt_sections(config).items():
        if not path.casefold().startswith(ALGORITHM_SECTION):  # said above
            yield f"{path} does not exist: did you mean {meant}?"
    for key in map(str, OmegaConf.select(config, names.V1) or ()):
        for section in (names.PIPELINE_SECTION, names.OFF_POLICY_SECTION):
            if key in KEYS[section] and key != "parameter_sync_step":
                yield f"{names.V1}.{key} has no effect: set {section}.{key}"
    if OmegaConf.select(config, "async_training") is not None or OmegaConf.select(config, "rollout") is not None:
        yield (
            "this is not the V1 trainer of verl.trainer.main_ppo: other entry points replace the configured loss or "
            "leave out the prompt weights; launch with python -m verl.trainer.main_ppo"
        )
    if not select(config, "trainer.use_v1", True):
        yield "trainer.use_v1=False: verl's old trainer replaces the configured loss; set trainer.use_v1=True"


def _algorithm_section(config: DictConfig) -> list[str]:
    return refusals(AlgorithmSettings.from_config, OmegaConf.select(config, ALGORITHM_SECTION))


def _of_another_estimator(config: DictConfig) -> Iterator[str]:
    """verl's estimators read the rewards that a shaping left, but know nothing of adv_norm and zero_variance."""
    section, estimator = OmegaConf.select(config, ALGORITHM_SECTION), select(config, ADV_ESTIMATOR)
    if section is None or uses_estimator(config):
        return
    own = [f"{ALGORITHM_SECTION}.{key}" for key in section if key not in FOR_ANY_ESTIMATOR]
    if len(own) == len(section):
        yield read_by(ALGORITHM_SECTION, f"the estimator {ESTIMATOR}", ADV_ESTIMATOR, ESTIMATOR, estimator)
    elif own:
        yield (
            f"{' and '.join(own)}: read by the estimator {ESTIMATOR} only, but {ADV_ESTIMATOR}={estimator}; set "
            f"{ADV_ESTIMATOR}={ESTIMATOR} or delete them (~{' ~'.join(own)})"
        )
    for name in _leaving_out(config):
        yield (
            f"{_SHAPING}.{name} leaves responses out of training, which {ADV_ESTIMATOR}={estimator} would keep in its "
            f"group means and denominators: set {ADV_ESTIMATOR}={ESTIMATOR}"
        )
    if own:
        yield from _with_our_estimator(config)


def _with_our_estimator(config: DictConfig) -> Iterator[str]:
    """What stands in the way of the estimator that a section of ours asks for: else a user would hear of it later."""
    taken = copy.deepcopy(config)
    with open_dict(taken):
        OmegaConf.update(taken, ADV_ESTIMATOR, ESTIMATOR)
    # A key that is refused now is refused once, whatever else would be said of it.
    said = {text.partition(" ")[0] for text in broken(_OF_ESTIMATOR, config)}
    yield from (text for text in broken(_OF_ESTIMATOR, taken) if text.partition(" ")[0] not in said)


def _drops_prompts(config: DictConfig) -> bool:
    """Whether the run's estimator leaves prompts of equal rewards out."""
    return uses_estimator(config) and value_of(config, ZERO_VARIANCE) == names.DROP


def _leaving_out(config: DictConfig) -> list[str]:
    """Names of the reward shapings that leave responses out; none where the section is refused anyway."""
    try:
        return [name for name, shaping in shaping_step.read_shapings(config).items() if shaping.leaves_out]
    except ValueError:
        return []


def _estimator(config: DictConfig) -> Iterator[str]:
    refills = select(config, names.FILTER_GROUPS, False) and trainer_mode(config) != names.PIPELINE_RL
    if refills and _drops_prompts(config):
        yield (
            f"{ZERO_VARIANCE}={names.DROP} and {names.FILTER_GROUPS}=True both filter prompts, one without and one "
            "with refill: set zero_variance=keep, or filter_groups.enable=False"
        )
    if (group_size := number(config, names.GROUP_SIZE)) < 2:
        yield (
            f"{names.GROUP_SIZE}={group_size}: {ADV_ESTIMATOR}={ESTIMATOR} centres rewards over the responses to one "
            "prompt, which leaves 0 for a single one; set n to 2 or more (the paper uses 16)"
        )
    if select(config, "algorithm.use_kl_in_reward", False):
        yield (
            f"algorithm.use_kl_in_reward=True with {ADV_ESTIMATOR}={ESTIMATOR}: the KL differs from response to "
            "response, so no prompt would have equal rewards, and prompts that are always solved would train on the "
            f"noise of their KL; set it False ({ACTOR}.use_kl_loss=True works with this estimator), or take an "
            "estimator of verl"
        )
    rejection, loss = f"{names.CORRECTION}.rollout_rs", loss_mode(config)
    acts = (not is_bypassed(config) or loss == "bypass_mode") and loss not in names.LOSSES
    if acts and select(config, rejection) is not None:
        yield (
            f"{rejection} masks tokens after the trainer has counted them, so {ADV_ESTIMATOR}={ESTIMATOR} would "
            f"correct another denominator than the loss uses: set {rejection}=null"
        )


def _terms_without_weights(config: DictConfig) -> Iterator[str]:
    """Prompts and responses are weighted, or left out, through weights of rows, which distillation does not have."""
    dropping = f" with {ZERO_VARIANCE}={names.KEEP}" if _drops_prompts(config) else ""
    for path, value in active_terms(config, UNWEIGHTED).items():
        inactive = f"{path}={UNWEIGHTED[path]}"
        if loss_agg_mode(config) == PROMPT_MEAN:
            yield (
                f"{path}={value} with loss_agg_mode={PROMPT_MEAN}: the weights of prompts do not reach this term; set "
                f"{inactive} or another loss_agg_mode{dropping}"
            )
            continue
        if _drops_prompts(config):
            yield (
                f"{path}={value} with {ZERO_VARIANCE}={names.DROP}: this term would still average over the dropped "
                "prompts. A batch of dropped prompts alone would skip it together with the whole update; set "
                f"{ZERO_VARIANCE}={names.KEEP}, or {inactive}"
            )
        for name in _leaving_out(config) if uses_estimator(config) else ():
            yield (
                f"{path}={value} with {_SHAPING}.{name}: this term would still train on the responses that {name} "
                f"leaves out; set {inactive}, or delete the shaping (~{_SHAPING}.{name})"
            )


def _critic(config: DictConfig) -> Iterator[str]:
    if uses_estimator(config):
        yield (
            f"critic.enable=True: nothing reads the values of a critic with {ADV_ESTIMATOR}={ESTIMATOR}, whose "
            "returns are weighted advantages; set critic.enable=False"
        )
    elif select(config, "critic.loss_agg_mode") == PROMPT_MEAN:
        if OmegaConf.is_interpolation(config.critic, "loss_agg_mode"):
            return  # it follows the actor's by verl's default, and gets another at start
        without = "" if select(config, ADV_ESTIMATOR) == "gae" else ", or critic.enable=False"
        yield (
            f"critic.loss_agg_mode={PROMPT_MEAN}: the weights of prompts are part of the advantages, and the value "
            f"loss of critic.enable=True has no advantages; set critic.loss_agg_mode=token-mean{without}"
        )


def _poll_interval(config: DictConfig) -> Iterator[str]:
    for key in OmegaConf.select(config, f"{names.V1}.sampler") or ():
        if str(key).startswith("poll_interval"):
            yield f"{names.V1}.sampler.{key} has no effect: set +{names.POLL_INTERVAL}"
    custom = select(config, f"{names.CUSTOM_SAMPLER}.path")
    for key, value in (OmegaConf.select(config, names.POLL_SECTION) or {}).items():
        path = f"{names.POLL_SECTION}.{key}"
        if path == names.POLL_INTERVAL and custom:
            yield f"{path} is for verl's replay buffer, not {custom}: delete it"
        elif path == names.POLL_INTERVAL:
            yield from (f"{names.POLL_SECTION}.{line}" for line in wrong_values({key: value}, KEYS[names.POLL_SECTION]))
        elif not custom:
            yield (
                f"{path} has no effect: verl's own replay buffer takes no keyword arguments, and of ours it is "
                f"{names.POLL_INTERVAL_KEY}"
            )


def _row_weights(config: DictConfig) -> Iterator[str]:
    loss, mode = loss_mode(config), loss_agg_mode(config)
    asked = [f"{path}={value}" for path, value in _USERS.items() if select(config, path) == value]
    if asked and loss in _NOT_HOMOGENEOUS:
        yield (
            f"{' and '.join(asked)}: weights go into the advantages, and {names.LOSS_MODE}={loss} does not scale with "
            "its advantages; choose another loss, or verl's own aggregation and estimator"
        )
    if mode == PROMPT_MEAN and loss in _IGNORES_AGG_MODE:
        yield (
            f"{names.LOSS_AGG_MODE}={mode} would be ignored by policy_loss.loss_mode={loss}, which hard-codes its own "
            "aggregation: choose another loss, or loss_agg_mode=seq-mean-token-mean"
        )
    # The weights of dropped prompts undo the denominator of the mode, so the loss must really use that mode.
    if uses_estimator(config) and loss == "geo_mean":
        yield (
            f"{names.LOSS_MODE}=geo_mean averages over each micro-batch by itself: {ADV_ESTIMATOR}={ESTIMATOR} cannot "
            "take dropped prompts out of that; choose another loss"
        )
    elif uses_estimator(config) and loss in _IGNORES_AGG_MODE and mode != "seq-mean-token-mean":
        yield (
            f"{names.LOSS_AGG_MODE}={mode} is ignored by policy_loss.loss_mode={loss}, which hard-codes "
            f"seq-mean-token-mean: set that mode, so that {ADV_ESTIMATOR}={ESTIMATOR} uses its denominator"
        )


_USERS = {names.LOSS_AGG_MODE: PROMPT_MEAN, ADV_ESTIMATOR: ESTIMATOR}
"""Key -> value of ours that puts weights into the advantages."""


def _fixed_width(config: DictConfig) -> Iterator[str]:
    for section in (ACTOR, "critic") if select(config, "critic.enable", False) else (ACTOR,):
        mode, factor = select(config, f"{section}.loss_agg_mode"), f"{section}.loss_scale_factor"
        if mode == "seq-mean-token-sum-norm" and select(config, factor) is None:
            yield (
                f"{factor}=null with loss_agg_mode={mode} divides by the width of each padded micro-batch, so the loss "
                f"would depend on how a batch is split: set {factor}='${{data.max_response_length}}'"
            )


def _cpu(config: DictConfig) -> Iterator[str]:
    if not is_cpu_platform():
        if select(config, "trainer.device") == "cpu":
            yield f"trainer.device=cpu needs the environment variable {PLATFORM_ENV}=cpu: export it before launching"
        return
    for path, value, why in (
        ("trainer.device", "cpu", "verl would look for CUDA devices"),
        (f"{ACTOR}.strategy", "fsdp2", "FSDP1 refuses parameters on the CPU"),
        (f"{names.MODEL}.use_remove_padding", False, "it needs flash-attn"),
        (f"{names.ROLLOUT}.enforce_eager", True, "there are no CUDA graphs"),
        (f"{names.ROLLOUT}.enable_sleep_mode", False, "vLLM's CPU engine cannot sleep"),
        (f"{names.ROLLOUT}.free_cache_engine", False, "vLLM's CPU engine cannot release its cache"),
    ):
        text = f" with {PLATFORM_ENV}=cpu: {why}; set {path}={value} (+scalerl=cpu sets all of these)"
        yield from Row(path, (value,), text)(config)
    slots, given = num_devices(config), select(config, f"{names.RAY}.num_gpus")
    # A cluster that runs already has its own slots.
    if has_own_ray(config) and (given is None or int(given) < slots):
        yield (
            f"{names.RAY}.num_gpus={given}: on the CPU Ray's GPUs are logical slots and this run needs {slots}; set "
            f"+{names.RAY}.num_gpus={slots}"
        )


_OF_ESTIMATOR: tuple[Rule, ...] = (
    under(uses_estimator, _estimator),
    _terms_without_weights,
    under(lambda config: select(config, "critic.enable"), _critic),
    _row_weights,
)
"""Rules that judge a run of our estimator otherwise than one of verl's."""
RULES: tuple[Rule, ...] = (
    _names,
    then(_algorithm_section, _of_another_estimator),
    *_OF_ESTIMATOR,
    _poll_interval,
    *ratio_checks.RULES,
    *class_checks.RULES,
    _fixed_width,
    verl_optimizer_steps.find_problems,
    shaping_step.find_problems,
    *curriculum_settings.RULES,
    *interruption_settings.RULES,
    engine_context.find_problems,
    *pipeline_checks.RULES,
    *async_checks.RULES,
    *head_settings.RULES,
    frontend.find_problems,
    legacy_keys.find_problems,
    *reward_checks.RULES,
    _cpu,
)
"""Every rule of a config alone, in the order in which problems are listed; `machine_checks` has those of a machine."""
