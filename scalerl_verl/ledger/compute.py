# SPDX-License-Identifier: Apache-2.0
"""How much compute a run has spent: arithmetic and state, independent of trainer and logger.

Two tallies are kept. The lineage is what the present weights have cost: it is the x of a scaling curve, and what is
resumed with a checkpoint. What was spent after that checkpoint before the run died trained other weights, which are
gone: it moves to the wasted tally. Their sum is all that was ever spent, so nothing is counted twice or lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

SECONDS_PER_HOUR = 3600.0
X_FIELDS = ("gpu_hours", "generated_tokens", "trained_tokens", "model_flops", "steps")


@dataclass(frozen=True)
class Totals:
    """What a lineage has cost.

    gpu_seconds: GPUs of trainer and generators x wall time, idle, start-up, validation and checkpoints included.
    generated_tokens: sampled by the policy into batches that reached the trainer. trained_tokens: of these, with a
    learning signal, once for every pass of an update over them. model_flops: of the actor's forward and backward passes
    (generation, log-probs, updates); None where the architecture has no counter. steps: training steps.
    """

    gpu_seconds: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    model_flops: float | None = 0.0
    steps: int = 0

    @property
    def gpu_hours(self) -> float:
        """gpu_seconds in hours."""
        return self.gpu_seconds / SECONDS_PER_HOUR

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Totals:
        """Read what `dataclasses.asdict` wrote; keys of a later version are an error.

        Raises:
            ValueError: unknown or missing keys.
        """
        names = {item.name for item in fields(cls)}
        if set(values) != names:
            raise ValueError(f"compute totals have the keys {sorted(values)}; this version writes {sorted(names)}")
        return cls(**values)


@dataclass(frozen=True)
class ValidationPoint:
    """One validation: what its weights had cost and how they did.

    pass_rate: mean over prompts of their mean over generations. stderr: its standard error over prompts, which holds
    the scatter of generations too. num_prompts, num_generations: how many of each (generations in all).
    """

    totals: Totals
    pass_rate: float
    stderr: float
    num_prompts: int
    num_generations: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ValidationPoint:
        """Read what `to_dict` wrote."""
        return cls(**{**values, "totals": Totals.from_dict(values["totals"])})


@dataclass
class ComputeLedger:
    """Counts a run's compute.

    Args:
        num_gpus: GPUs of trainer and generators together.
        totals: of the lineage, up to the last `tick`.
        wasted_gpu_seconds, wasted_tokens: spent on weights that a restart threw away.
        points: validations of this lineage, in order.
    """

    num_gpus: int
    totals: Totals = Totals()
    wasted_gpu_seconds: float = 0.0
    wasted_tokens: int = 0
    points: list[ValidationPoint] = field(default_factory=list)
    _last: float | None = None

    def tick(self, now_s: float) -> Totals:
        """Count the time since the last call (the first only starts the clock) and return the totals.

        now_s: seconds of a monotonic clock.
        """
        if self._last is not None:
            passed = max(now_s - self._last, 0.0)
            self.totals = replace(self.totals, gpu_seconds=self.totals.gpu_seconds + passed * self.num_gpus)
        self._last = now_s
        return self.totals

    def add(
        self,
        generated_tokens: int = 0,
        trained_tokens: int = 0,
        model_flops: float | None = 0.0,
        steps: int | None = None,
    ) -> None:
        """Count work; `steps` is the number of the training step, not an increment."""
        old = self.totals
        flops = None if model_flops is None or old.model_flops is None else old.model_flops + model_flops
        self.totals = replace(
            old,
            generated_tokens=old.generated_tokens + generated_tokens,
            trained_tokens=old.trained_tokens + trained_tokens,
            model_flops=flops,
            steps=old.steps if steps is None else steps,
        )

    def note_validation(self, point: ValidationPoint) -> None:
        """Add a validation; of one step the first counts (a resumed run may validate its first weights again)."""
        if any(old.totals.steps == point.totals.steps for old in self.points):
            return
        self.points.append(point)

    def metrics(self) -> dict[str, float]:
        """What is logged, under `scalerl/compute/`."""
        return to_metrics(self.totals) | {
            "scalerl/compute/wasted_gpu_hours": self.wasted_gpu_seconds / SECONDS_PER_HOUR,
            "scalerl/compute/wasted_tokens": self.wasted_tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that has to survive a restart, as JSON types."""
        return {
            "totals": asdict(self.totals),
            "wasted_gpu_seconds": self.wasted_gpu_seconds,
            "wasted_tokens": self.wasted_tokens,
            "points": [point.to_dict() for point in self.points],
        }

    def restore(self, checkpoint: Mapping[str, Any] | None, log: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continue a lineage.

        Args:
            checkpoint: the state saved with the checkpoint that is resumed; None if the run starts from nothing.
            log: states written at the end of every step by earlier attempts at this run, oldest first. The one of the
                checkpoint's own step also holds what came after its saving (weight sync, validation); what the last one
                holds beyond that is wasted.

        Raises:
            ValueError: a state of another version.
        """
        state = checkpoint or {"totals": asdict(Totals()), "wasted_gpu_seconds": 0.0, "wasted_tokens": 0, "points": []}
        chosen = Totals.from_dict(state["totals"])
        points = state["points"]
        if checkpoint is not None:
            for line in reversed(log):
                end = Totals.from_dict(line["totals"])
                same = end.steps == chosen.steps and end.generated_tokens == chosen.generated_tokens
                if same and end.gpu_seconds >= chosen.gpu_seconds:
                    chosen, points = end, line["points"]
                    break
        # The clock may already run: start-up of this attempt belongs to it.
        started = self.totals
        self.totals = replace(chosen, gpu_seconds=chosen.gpu_seconds + started.gpu_seconds)
        self.points = [ValidationPoint.from_dict(point) for point in points]
        self.wasted_gpu_seconds, self.wasted_tokens = state["wasted_gpu_seconds"], state["wasted_tokens"]
        if log:
            last = Totals.from_dict(log[-1]["totals"])
            spent = last.gpu_seconds + log[-1]["wasted_gpu_seconds"]
            tokens = last.generated_tokens + log[-1]["wasted_tokens"]
            self.wasted_gpu_seconds = max(spent - chosen.gpu_seconds, self.wasted_gpu_seconds)
            self.wasted_tokens = max(tokens - chosen.generated_tokens, self.wasted_tokens)


def to_metrics(totals: Totals) -> dict[str, float]:
    """Totals under the names they are logged by; without FLOPs where they are unknown."""
    values = {f"scalerl/compute/{name}": getattr(totals, name) for name in X_FIELDS}
    return {name: value for name, value in values.items() if value is not None}
