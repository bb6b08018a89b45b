# SPDX-License-Identifier: Apache-2.0
"""Classes that verl makes by name, where a run of ours needs those of verl: we put our subclasses in their place."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from scalerl_verl import names
from scalerl_verl.names import PROMPT_MEAN, select
from scalerl_verl.names.asking import loss_agg_mode, loss_mode
from scalerl_verl.names.rules import Rule, one_of, or_null

OURS = "scalerl_verl.loss.verl_config"
"""Module of our classes."""
_VERL = "verl.workers.config"
_STRATEGY = f"{names.ACTOR}.strategy"


def _paths(name: str) -> tuple[str, ...]:
    """Where a class of verl's is imported from. A config that is checked again has our class already."""
    return f"{_VERL}.{name}", f"{_VERL}.actor.{name}", f"{OURS}.ScaleRL{name}"


def _actor_class(config: DictConfig) -> Iterator[str]:
    given, known = select(config, names.ACTOR_CLASS), names.ACTOR_CLASSES
    if loss_agg_mode(config) == PROMPT_MEAN and not any(given in _paths(name) for name in known):
        yield (
            f"{names.ACTOR_CLASS}={or_null(given)} with {names.LOSS_AGG_MODE}={PROMPT_MEAN}: only verl's own "
            f"classes know the mode here; {one_of(f'{_VERL}.{name}' for name in known)}"
        )


def _loss_class(config: DictConfig) -> Iterator[str]:
    path = f"{names.LOSS_SECTION}._target_"
    given = select(config, path)
    if loss_mode(config) in names.LOSSES and given is not None and given not in _paths("PolicyLossConfig"):
        yield (
            f"{path}={given} with {names.LOSS_MODE}={loss_mode(config)}: this loss reads its keys by a class of "
            f"its own, and would not read yours; set {path}={_VERL}.PolicyLossConfig, or another loss_mode"
        )


def _engine(config: DictConfig) -> Iterator[str]:
    """Row weights and declared metrics need our loss, which stands in front of verl's engines only."""
    paths = (names.LOSS_MODE, names.LOSS_AGG_MODE, names.ADV_ESTIMATOR)
    used = [f"{path}={value}" for path in paths if (value := str(select(config, path))) in names.VALUES[path]]
    given = select(config, _STRATEGY)
    if used and given not in names.STRATEGIES:
        yield (
            f"{_STRATEGY}={or_null(given)} with {' and '.join(used)}: our loss works in verl's own "
            f"engines only, and another engine would train without the weights of rows; {one_of(names.STRATEGIES)}"
        )


_RECORDS = f"{names.ROLLOUT}.enable_rollout_routing_replay"
_BALANCE = f"{names.ROLLOUT}.moe_load_balance_metrics_interval"
_REPLAYING = ("megatron", "veomni")
"""verl's engines that replay the routing of experts."""


def _routing(config: DictConfig) -> Iterator[str]:
    """Experts of every token that are recorded for nothing, or replayed without a record."""
    strategy = select(config, _STRATEGY)
    mode = f"{names.ACTOR}.{strategy}.router_replay.mode"
    if strategy in _REPLAYING and select(config, mode) == "R3" and not select(config, _RECORDS, False):
        yield (
            f"{mode}=R3 with {_RECORDS}=False: verl replays what the generator chose, which nobody records, and fails "
            f"on the first batch; set {_RECORDS}=True, or {mode}=disabled"
        )
    if not select(config, _RECORDS, False) or select(config, _BALANCE, 0):
        return
    unless = f"set {_RECORDS}=False, or {_BALANCE}=1 if verl's load-balance metrics are what you want"
    if strategy not in _REPLAYING:
        yield (
            f"{_RECORDS}=True with {_STRATEGY}={or_null(strategy)}: verl replays the routing of experts in its engines "
            f"{' and '.join(_REPLAYING)} only, so it would be recorded for nothing; {unless}"
        )
    elif select(config, mode) != "R3":
        yield f"{_RECORDS}=True with {mode}={select(config, mode)}: nothing replays it; set {mode}=R3, or {unless}"


def _mode(config: DictConfig) -> Iterator[str]:
    given = str(select(config, names.TRAINER_MODE, "sync"))
    if given not in names.VERL_MODES and given.casefold() in names.VERL_MODES:
        yield f"{names.TRAINER_MODE}={given} does not exist: did you mean {given.casefold()}?"


RULES: tuple[Rule, ...] = (_actor_class, _loss_class, _engine, _routing, _mode)
