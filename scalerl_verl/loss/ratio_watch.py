# SPDX-License-Identifier: Apache-2.0
"""What the driver makes of a batch's log-ratios: the part that age explains, and an alarm of few effective tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from scalerl_verl.loss.age_split import EXPLAINED_BY_AGE, PREFIX, SQUARE_OF_ALL, SQUARE_OF_ENGINES, explained_by_age
from scalerl_verl.names import LOW_ESS_FRAC, MAX_STALENESS

ESS, ESS_ALARM = f"{PREFIX}/ess_frac", f"{PREFIX}/ess_alarm_max"
_logger = logging.getLogger(__name__)


@dataclass
class RatioWatch:
    """Looks at the metrics of each update.

    Args:
        engines_square: the engines' mean square log-ratio, of the last batch with a whole response of age 0; None
            before the first. Many batches have no such response, and two engines differ today as they did before.
        has_warned: whether the alarm was said.
    """

    engines_square: float | None = None
    has_warned: bool = False

    def observe(self, metrics: dict[str, float]) -> None:
        """Add what follows from the metrics of an update; say the alarm the first time that it is raised."""
        if SQUARE_OF_ALL in metrics:
            self.engines_square = metrics.get(SQUARE_OF_ENGINES, self.engines_square)
            part = explained_by_age(metrics, self.engines_square)
            if part is not None:
                metrics[EXPLAINED_BY_AGE] = part
        if ESS not in metrics:
            return
        # Not a number is no good sign, either.
        raised = not metrics[ESS] >= LOW_ESS_FRAC
        metrics[ESS_ALARM] = float(raised)
        if raised and not self.has_warned:
            self.has_warned = True
            _logger.warning(_message(metrics))


def _message(metrics: dict[str, float]) -> str:
    part = metrics.get(EXPLAINED_BY_AGE)
    said = "" if part is None else f" Age explains {part:.0%} of the mean square log-ratio ({EXPLAINED_BY_AGE})."
    return (
        f"the importance ratios of a batch leave {metrics[ESS]:.1%} of its tokens in effect ({ESS}; alarm below "
        f"{LOW_ESS_FRAC:.0%}): they spread by more than their mean, so that few tokens make up the gradient.{said} If "
        f"age is the cause, lower {MAX_STALENESS} or the learning rate. If the engines are, check that both sides have "
        "the FP32 head (+scalerl=fp32_head), one dtype, one temperature and the weights that were sent. This is said "
        f"once; {ESS_ALARM} is 1 in every such step"
    )
