# SPDX-License-Identifier: Apache-2.0
"""Start-up checks of the importance ratio: losses of ours, and log-probs that must be of one distribution.

The log-probs recorded at sampling are compared with the trainer's by our losses, by every loss of verl's under
``bypass_mode`` and by the checks of the FP32 head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from omegaconf import DictConfig, OmegaConf

from scalerl_verl.head.settings import trainer_backend
from scalerl_verl.loss.policy_loss import find_loss
from scalerl_verl.loss.settings import PolicyLossSettings
from scalerl_verl.names import BYPASS_MODE, CORRECTION, FSDP, LOSS_MODE, LOSS_SECTION, LOSSES, ROLLOUT, VLLM, select
from scalerl_verl.names.asking import LOSS_KEYS, is_bypassed, loss_mode, near_misses
from scalerl_verl.names.keys import KEYS
from scalerl_verl.names.numbers import number
from scalerl_verl.names.reading import unknown_keys
from scalerl_verl.names.rules import refusals, under

_FP16 = ("float16", "half", "fp16")


def _uses_loss_of_ours(config: DictConfig) -> bool:
    return loss_mode(config) in LOSSES


def _loss_of_ours(config: DictConfig) -> Iterator[str]:
    from scalerl_verl.loss.verl_config import ScaleRLPolicyLossConfig

    section = OmegaConf.select(config, LOSS_SECTION)
    # The section's class would refuse them with a bare TypeError, inside a worker.
    known = [field.name for field in fields(ScaleRLPolicyLossConfig) if not field.name.startswith("_")]
    for problem in unknown_keys(LOSS_SECTION, (key for key in section if key != "_target_"), known):
        yield f"{problem} (or delete it: ~{problem.split(' ', 1)[0]})"
    yield from refusals(PolicyLossSettings.from_config, section)
    if not is_bypassed(config):
        yield (
            f"{BYPASS_MODE}=False recomputes old_log_probs under the weights that are about to be trained: the "
            f"importance ratio of {loss_mode(config)} would be 1 and its truncation would never act; set "
            f"{BYPASS_MODE}=True, which keeps the log-probs recorded at sampling"
        )
    given = dict([_engine_setting(config, "dtype", "")])
    given |= {path: str(select(config, path, "")) for path in (f"{FSDP}.dtype", f"{FSDP}.mixed_precision.param_dtype")}
    for path, dtype in given.items():
        if dtype.lower() in _FP16:
            yield f"{path}={dtype}: {loss_mode(config)} refuses log-probs in FP16; use bfloat16 or float32"


def _keys_of_another_loss(config: DictConfig) -> Iterator[str]:
    """verl's own class of the section takes none of our keys, null or not; a loss of ours those that it lists."""
    if LOSS_MODE in near_misses(config):
        return  # a misspelt name of our loss, whose keys these are
    loss, readers = loss_mode(config), {name: find_loss(name).options for name in LOSSES}
    for key in OmegaConf.select(config, LOSS_SECTION) or ():
        reading = [name for name, options in readers.items() if str(key) in options]
        is_ours = str(key) in KEYS[LOSS_SECTION] or (loss not in LOSSES and str(key).startswith(LOSS_KEYS))
        if is_ours and loss not in reading:
            others = " or ".join(reading or readers)
            yield (
                f"{LOSS_SECTION}.{key} is read by {others} only, but loss_mode={loss}: delete it "
                f"(~{LOSS_SECTION}.{key}) or set {LOSS_MODE}={others} (of presets that set the loss, the last one "
                "wins: cispo after a baseline)"
            )


def _correction(config: DictConfig) -> Iterator[str]:
    """Where a correction of verl's corrects twice, or nothing."""
    loss = loss_mode(config)
    for key in ("rollout_is", "rollout_rs"):
        path = f"{CORRECTION}.{key}"
        value = select(config, path)
        if value is not None and loss in LOSSES:
            yield f"{path} corrects the mismatch that {loss} already corrects: set it to null"
        elif value is not None and is_bypassed(config) and loss != "bypass_mode":
            yield (
                f"{path}={value} has no effect with {BYPASS_MODE}=True and loss_mode={loss}, whose ratio is to the "
                f"recorded log-probs already: set {path}=null"
            )


def _engine_setting(config: DictConfig, key: str, default: str) -> tuple[str, str]:
    """Where vLLM gets a setting from, and its value: verl lets ``engine_kwargs.vllm`` override its own keys."""
    own, engine = f"{ROLLOUT}.{key}", f"{VLLM}.{key}"
    path = own if select(config, engine) is None else engine
    return path, str(select(config, path, default))


def _use_of_recorded(config: DictConfig) -> str | None:
    """What the log-probs recorded at sampling are used for; None if for nothing that must be exact."""
    if _uses_loss_of_ours(config):
        return f"they are the denominator of the importance ratio of {loss_mode(config)}"
    if is_bypassed(config):
        return f"they are the denominator of the importance ratio under {BYPASS_MODE}=True"
    if trainer_backend(config) is not None:
        return "with the FP32 head they are compared with the trainer's on the first batch and in every step"
    return None


def _sampling(config: DictConfig) -> Iterator[str]:
    """The recorded log-prob must be that of the distribution the trainer scores."""
    use, temperature = _use_of_recorded(config), number(config, f"{ROLLOUT}.temperature")
    if not select(config, f"{ROLLOUT}.calculate_log_probs", False):
        yield f"{ROLLOUT}.calculate_log_probs=False records no log-probs at sampling: {use}; set it True"
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


RULES = (
    under(_uses_loss_of_ours, _loss_of_ours),
    _keys_of_another_loss,
    _correction,
    under(_use_of_recorded, _sampling),
)
