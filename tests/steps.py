# SPDX-License-Identifier: Apache-2.0
"""Our training step in front of stand-ins for verl's trainer."""

from __future__ import annotations

from typing import Any

from scalerl_verl.advantage.length_step import make_alarm
from scalerl_verl.verl.run_state import RunState
from scalerl_verl.verl.trainer import ScaleRLTrainer


def in_front_of(stub: type, ledger: bool = False) -> Any:
    """A class of ``stub`` with `ScaleRLTrainer` in front, made as ``stub`` is.

    Args:
        stub: stands for a trainer of verl's; its instances have a ``config``.
        ledger: count compute, as every run with our names does; off for a config that is not a whole one.
    """

    class Trainer(ScaleRLTrainer, stub):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            stub.__init__(self, *args, **kwargs)
            self.scalerl = RunState.start(self.config) if ledger else RunState(make_alarm(self.config))

    return Trainer
