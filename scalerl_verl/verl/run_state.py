# SPDX-License-Identifier: Apache-2.0
"""What our pieces know of a run in verl's trainer, in one object (driver)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scalerl_verl.advantage.length_step import ValidationLengths, make_alarm
from scalerl_verl.advantage.step import AdvantageStep
from scalerl_verl.advantage.verl_optimizer_steps import StepRows
from scalerl_verl.curriculum.verl import Counts, Key
from scalerl_verl.generator.health import EngineWatch
from scalerl_verl.interruption.lengths import TruncationAlarm
from scalerl_verl.ledger.verl import RunLedger, start_ledger
from scalerl_verl.loss.ratio_watch import RatioWatch


@dataclass
class RunState:
    """The state of a run.

    Args:
        alarm: of responses that are cut.
        ledger: of compute; None in a run that uses none of our names (the CPU platform alone is none).
        division: the optimizer steps that the batch in hand is divided into; None where verl divides it.
        step: what was found when the advantages of the batch in hand were computed; None before the first.
        first_version: of the weights whose first batch is still to be compared with the generator's log-probs.
        ratios: what is made of the log-ratios of every update.
        rejected: visits of the prompts that dynamic sampling gave up since the last batch, for the curriculum.
        validation: the lengths of the validation in progress, if it is watched.
        engines: which are asked, now and then, whether they live.
    """

    alarm: TruncationAlarm
    ledger: RunLedger | None = None
    division: StepRows | None = None
    step: AdvantageStep | None = None
    first_version: int | None = None
    ratios: RatioWatch = field(default_factory=RatioWatch)
    rejected: dict[Key, Counts] = field(default_factory=dict, repr=False)
    validation: ValidationLengths | None = field(default=None, repr=False)
    engines: EngineWatch = field(default_factory=EngineWatch, repr=False)

    @classmethod
    def start(cls, config: Any) -> RunState:
        """The state at the start of an attempt; the ledger's clock runs from here."""
        return cls(make_alarm(config), start_ledger(config))
