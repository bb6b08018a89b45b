# SPDX-License-Identifier: Apache-2.0
"""Who grades: reward managers that verl's V1 trainer does not have, and overlong shaping that nothing would apply."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import DictConfig

from scalerl_verl.names import select
from scalerl_verl.names.kinds import is_number
from scalerl_verl.names.rules import or_null

MANAGER = "reward.reward_manager.name"
TAKES_PLACE = {"prime": "naive", "batch": "naive"}
"""Manager of verl's old reward loop that its V1 trainer does not know -> the one that calls the same function."""
_DAPO = "dapo"
_KWARGS = "reward.reward_kwargs"
_OVERLONG, _MAX_LENGTH = f"{_KWARGS}.overlong_buffer_cfg", f"{_KWARGS}.max_resp_len"


def _registered(config: DictConfig) -> str | None:
    """The manager that is looked up by name; None where a user's own is imported."""
    if select(config, "reward.reward_manager.source", "register") != "register":
        return None
    return str(select(config, MANAGER, "naive"))


def _manager(config: DictConfig) -> Iterator[str]:
    name = _registered(config)
    if name in TAKES_PLACE:
        yield (
            f"{MANAGER}={name} is not known to verl's V1 trainer, whose reward workers would fail: set "
            f"{MANAGER}={TAKES_PLACE[name]}. It takes the same reward function, asynchronous or not, calls it for one "
            "response at a time, and has reward.num_workers workers"
        )


def _overlong(config: DictConfig) -> Iterator[str]:
    if not select(config, f"{_OVERLONG}.enable", False):
        return
    name, buffer, longest = _registered(config), select(config, f"{_OVERLONG}.len"), select(config, _MAX_LENGTH)
    if name is not None and name != _DAPO:
        yield (
            f"{_OVERLONG}.enable=True is read by {MANAGER}={_DAPO} only, but {MANAGER}={name}: set {MANAGER}={_DAPO}, "
            f"or {_OVERLONG}.enable=False"
        )
    elif name == _DAPO and not (is_number(buffer) and is_number(longest) and 0 < buffer <= longest):
        yield (
            f"{_OVERLONG}.len={or_null(buffer)}, {_MAX_LENGTH}={or_null(longest)}: the penalty begins len tokens below "
            f"max_resp_len; give both, len above 0 and at most max_resp_len (++{_MAX_LENGTH}="
            "'${data.max_response_length}')"
        )


RULES = (_manager, _overlong)
