# SPDX-License-Identifier: Apache-2.0
"""``algorithm.scalerl.fast_frontend``: one answer a request from vLLM's front end, when it is complete, without text.

verl asks vLLM for everything so far after every token, and for text, of which it reads the last answer's token ids and
log-probs only: the front end of an engine then does more work than the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.generator.replicas import replicas_of
from scalerl_verl.names import FAST_FRONTEND as KEY
from scalerl_verl.names import ROLLOUT, select
from scalerl_verl.names.reading import plain

MARK = "scalerl_fast_frontend"
"""Key of ``rollout.custom``, verl's place for settings of others: a server is told the rollout's section only."""


FACT = "fast_frontend"
"""Of a server's process in ``scalerl doctor --run-dir``."""


def is_asked(config: DictConfig) -> bool:
    """Whether a composed config asks for it."""
    return select(config, KEY, False) is True


def is_marked(rollout: Any) -> bool:
    """Whether the rollout section that a server was started with asks for it."""
    custom = rollout.custom  # of anything: verl does not look at it
    return isinstance(custom, Mapping) and bool(custom.get(MARK, False))


def find_problems(config: DictConfig) -> Iterator[str]:
    """Generators that it does not reach."""
    if not is_asked(config):
        return
    wanted = {
        f"{ROLLOUT}.name": ("vllm", "it is a setting of vLLM's requests"),
        f"{ROLLOUT}.disaggregation.enabled": (False, "verl starts servers of its own for it, which do not know it"),
    }
    for path, (value, why) in wanted.items():
        given = select(config, path, value)
        if given != value:
            yield f"{path}={given} with {KEY}=True: {why}; set {KEY}=False, or {path}={value}"
    custom = plain(select(config, f"{ROLLOUT}.custom", {}))
    if not isinstance(custom, Mapping):
        yield f"{ROLLOUT}.custom={custom} with {KEY}=True: it is a section; set the keys below it, or set it to null"


def complete(config: DictConfig) -> None:
    """Hand the setting to the servers, through the rollout's section."""
    if is_asked(config):
        with open_dict(config):
            OmegaConf.update(config, f"{ROLLOUT}.custom.{MARK}", True, force_add=True)


def check_replicas(trainer: Any) -> None:
    """Refuse generators that would do without it, since somebody put another server in the place of ours.

    Args:
        trainer: verl's V1 trainer of any mode, initialised.

    Raises:
        ScaleRLConfigError: which class launches the servers, and what to change.
    """
    if not is_asked(trainer.config):
        return
    from scalerl_verl.generator.server import ScaleRLReplica

    others = {type(replica) for replica in replicas_of(trainer) if not isinstance(replica, ScaleRLReplica)}
    if others:
        names = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in others))
        raise ScaleRLConfigError(
            [f"{KEY}=True, but the servers are launched by {names}, which does not know it: set {KEY}=False, or leave "
             f"{ROLLOUT}.name=vllm to verl and scalerl_verl"]
        )  # fmt: skip


def final_only(sampling_params: Mapping[str, Any]) -> dict[str, Any] | None:
    """verl's parameters of a request, with one answer when it is complete; None where they do not allow that.

    Text is made only where stop strings are looked for in it; log-probs are kept as numbers in lists, not as objects.
    Several responses of one request stay as they are: verl returns one, and which one depends on the order of answers.
    """
    from vllm.sampling_params import RequestOutputKind

    if sampling_params.get("n", 1) != 1 or "output_kind" in sampling_params:
        return None
    fast = {**sampling_params, "output_kind": RequestOutputKind.FINAL_ONLY}
    if not sampling_params.get("stop"):
        fast.setdefault("detokenize", False)
    if sampling_params.get("prompt_logprobs") is None:  # verl slices those, which fails on a prompt of one token
        fast.setdefault("flat_logprobs", True)
    return fast
