# SPDX-License-Identifier: Apache-2.0
"""Start-up checks of the importance ratio: the loss ``scalerl_cispo``, and log-probs that must be of one distribution.

The log-probs recorded at sampling are compared with the trainer's by our loss, by every loss of verl's under
``bypass_mode`` and by the checks of the FP32 head.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.head import settings as head_settings
from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.names import BYPASS_MODE, CISPO, CORRECTION, FSDP, LOSS_MODE, LOSS_SECTION, ROLLOUT, VLLM, select
from scalerl_verl.names.asking import LOSS_KEYS, near_misses
from scalerl_verl.names.numbers import number

_FP16 = ("float16", "half", "fp16")


def find_problems(config: DictConfig) -> Iterator[str]:
    """Contradictions between the loss, what it takes as old log-probs, and how the generator records them."""
    yield from _cispo(config)
    yield from _correction(config)
    use = _use_of_recorded(config)
    if use is not None:
        yield from _sampling(config, use)


def _cispo(config: DictConfig) -> Iterator[str]:
    section = OmegaConf.select(config, LOSS_SECTION)
    if section is None:
        return
    if section.get("loss_mode") != CISPO:
        yield from _keys_of_another_loss(config, section)
        return
    yield from _unknown_keys(section)
    try:
        PolicyLossSettings.from_config(section)
    except ScaleRLConfigError as error:
        yield from error.problems
    if not select(config, BYPASS_MODE, False):
        yield (
            f"{BYPASS_MODE}=False recomputes old_log_probs under the weights that are about to be trained: "
            f"the importance ratio of {CISPO} would be 1 and its truncation would never act; set "
            f"{BYPASS_MODE}=True, which keeps the log-probs recorded at sampling"
        )
    fsdp = FSDP
    given = dict([_engine_setting(config, "dtype", "")])
    given |= {path: str(select(config, path, "")) for path in (f"{fsdp}.dtype", f"{fsdp}.mixed_precision.param_dtype")}
    for path, dtype in given.items():
        if dtype.lower() in _FP16:
            yield f"{path}={dtype}: {CISPO} refuses log-probs in FP16; use bfloat16 or float32"


def _keys_of_another_loss(config: DictConfig, section: DictConfig) -> Iterator[str]:
    """verl's own class of the section takes none of our keys, null or not."""
    loss = section.get("loss_mode")
    if LOSS_MODE in near_misses(config):
        return  # a misspelt name of our loss, whose keys these are
    for key in section:
        if str(key).startswith(LOSS_KEYS):
            yield (
                f"{LOSS_SECTION}.{key} is read by {CISPO} only, but loss_mode={loss}: delete it "
                f"(~{LOSS_SECTION}.{key}) or use {CISPO} (of presets that set the loss, the last one wins: "
                "cispo after a baseline)"
            )


def _unknown_keys(section: DictConfig) -> Iterator[str]:
    """Keys that the section's class would refuse with a bare TypeError, inside a worker."""
    from scalerl_verl.loss.verl_config import ScaleRLPolicyLossConfig

    known = [field.name for field in fields(ScaleRLPolicyLossConfig) if not field.name.startswith("_")]
    for key in section:
        if str(key) in known or str(key) == "_target_":
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        meant = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}."
        yield f"{LOSS_SECTION}.{key} does not exist: {meant} Else delete it (~{LOSS_SECTION}.{key})"


def _correction(config: DictConfig) -> Iterator[str]:
    """Where a correction of verl's corrects twice, or nothing."""
    loss = select(config, LOSS_MODE, "vanilla")
    bypass = select(config, BYPASS_MODE, False)
    for key in ("rollout_is", "rollout_rs"):
        value = select(config, f"{CORRECTION}.{key}")
        if value is None:
            continue
        if loss == CISPO:
            yield f"{CORRECTION}.{key} corrects the mismatch that {CISPO} already truncates: set it to null"
        elif bypass and loss != "bypass_mode":
            yield (
                f"{CORRECTION}.{key}={value} has no effect with {BYPASS_MODE}=True and loss_mode={loss}, "
                f"whose ratio is to the recorded log-probs already: set {CORRECTION}.{key}=null"
            )


def _engine_setting(config: DictConfig, key: str, default: str) -> tuple[str, str]:
    """Where vLLM gets a setting from, and its value: verl lets ``engine_kwargs.vllm`` override its own keys."""
    own, engine = f"{ROLLOUT}.{key}", f"{VLLM}.{key}"
    path = own if select(config, engine) is None else engine
    return path, str(select(config, path, default))


def _use_of_recorded(config: DictConfig) -> str | None:
    """What the log-probs recorded at sampling are used for; None if for nothing that must be exact."""
    if select(config, LOSS_MODE) == CISPO:
        return f"they are the denominator of the importance ratio of {CISPO}"
    if select(config, BYPASS_MODE, False):
        return f"they are the denominator of the importance ratio under {BYPASS_MODE}=True"
    if head_settings.trainer_backend(config) is not None:
        return "with the FP32 head they are compared with the trainer's on the first batch and in every step"
    return None


def _sampling(config: DictConfig, use: str) -> Iterator[str]:
    """The recorded log-prob must be that of the distribution the trainer scores."""
    if not select(config, f"{ROLLOUT}.calculate_log_probs", False):
        yield f"{ROLLOUT}.calculate_log_probs=False records no log-probs at sampling: {use}; set it True"
    temperature = number(config, f"{ROLLOUT}.temperature")
    if temperature <= 0:
        yield f"{ROLLOUT}.temperature={temperature}: greedy sampling has no log-probs ({use}); set it above 0"
    path, mode = _engine_setting(config, "logprobs_mode", "processed_logprobs")
    if mode not in ("processed_logprobs", "raw_logprobs"):
        yield f"{path}={mode} records no log-probs: {use}; set {path}=processed_logprobs"
    elif temperature != 1.0 and mode != "processed_logprobs":
        yield (
            f"{path}={mode} with temperature={temperature}: the recorded log-probs would be at temperature 1, the "
            f"trainer scores at the sampling temperature ({use}); set {path}=processed_logprobs"
        )
    top_p, top_k = number(config, f"{ROLLOUT}.top_p"), number(config, f"{ROLLOUT}.top_k")
    if top_p != 1.0 or top_k not in (-1, 0):
        yield (
            f"{ROLLOUT}.top_p={top_p}, top_k={top_k}: the log-probs of truncated sampling are not the model's, which "
            f"the trainer computes ({use}); set top_p=1.0 and top_k=-1"
        )
