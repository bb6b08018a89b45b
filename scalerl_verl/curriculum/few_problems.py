# SPDX-License-Identifier: Apache-2.0
"""Says when a run has so few problems that no-positive-resampling is likely to hurt it."""

from __future__ import annotations

from scalerl_verl.names import SAMPLER_SECTION

FEW_STEPS = 100
"""Optimizer steps of a pass over the problems. At 64 the pass rate fell from the third pass on (0.3M parameters, 2,048
problems); the paper's runs, which gain from it, have about 1,100. Between the two nothing was measured."""
HARMLESS_PASSES = 2
"""The first pass drops nothing, and the second is the first to be shorter."""


def few_problems_warning(num_problems: int, problems_a_step: int, num_steps: float) -> str | None:
    """What to say at start, or None.

    Args:
        num_problems: distinct prompts of the training data.
        problems_a_step: prompts of an optimizer step (verl's ``ppo_mini_batch_size``).
        num_steps: optimizer steps of the whole run.
    """
    steps_a_pass = num_problems / problems_a_step
    if steps_a_pass >= FEW_STEPS or num_steps <= HARMLESS_PASSES * steps_a_pass:
        return None
    return (
        f"no-positive-resampling on few problems: a pass over {num_problems:,} problems takes {steps_a_pass:.0f} "
        f"optimizer steps, and this run makes {num_steps:.0f}. Once most problems are mastered, only those without a "
        "signal are left: with 64 steps a pass a small model lost pass rate from the third pass on. Use more problems "
        f"or no sampler (~{SAMPLER_SECTION}); {SAMPLER_SECTION}.readmit_after_epochs=1 brings mastered problems back, "
        "which was not measured"
    )
