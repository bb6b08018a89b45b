# SPDX-License-Identifier: Apache-2.0
"""The tables of recipes/smollm2-reasoning: what each run gained, and in which families."""

from __future__ import annotations

import math

from benchmarks.markdown import Row, table, where_table
from benchmarks.rows import read_rows

LABELS = {"config": "ScaleRL", "grpo": "GRPO", "dapo": "DAPO", "gspo": "GSPO", "trl": "TRL's GRPO"}
SHARING = ("rollout.gpu_memory_utilization=", "vllm.kv_cache_memory_bytes=", "trainer.save_freq=")
"""Overrides of runs that share a GPU: they change no number that a table has but speed."""
LEARNING_RATE = "actor_rollout_ref.actor.optim.lr="
PACKAGES = ("verl", "trl", "vllm", "torch", "transformers", "flash-attn")


def read_runs() -> dict[tuple[str, int], list[Row]]:
    """Recipe and seed -> validations by step; of a run that was recorded again the newest.

    Raises:
        ValueError: none is recorded.
    """
    runs: dict[tuple[str, int], dict[int, Row]] = {}
    for row in read_rows("reasoning"):
        case = row["case"]
        changes = [*case["preset"], *map(_named, case["overrides"])]
        key = (", ".join([LABELS.get(case["config"], case["config"]), *filter(None, changes)]), case["seed"])
        if case["step"] == 0:
            runs[key] = {}
        runs.setdefault(key, {})[case["step"]] = row
    if not runs:
        raise ValueError("benchmarks/results/reasoning.jsonl holds no rows: python -m benchmarks.reasoning.record")
    return {key: [runs[key][step] for step in sorted(runs[key])] for key in sorted(runs)}


def _named(override: str) -> str:
    """As a table names it: empty for what only says how a GPU is shared."""
    if any(part in override for part in SHARING):
        return ""
    if override.startswith(LEARNING_RATE):
        return f"learning rate {float(override.removeprefix(LEARNING_RATE)):.0e}".replace("e-0", "e-")
    return override


def gain(start: Row, final: Row) -> tuple[float, float]:
    """Of the pass rate, with its standard error as if both were independent: they share problems, so it errs wide."""
    return final["pass_rate"] - start["pass_rate"], math.hypot(start["stderr"], final["stderr"])


def runs_table() -> str:
    """One line a run: held-out pass rates, steps and minutes to the last validation, and where it was made."""
    lines, where = [], {}
    for (recipe, seed), rows in read_runs().items():
        start, final = rows[0], rows[-1]
        rise, error = gain(start, final)
        rates = [f"{row['pass_rate']:.3f} ± {row['stderr']:.3f}" for row in (start, final)]
        minutes = f"{60 * final['gpu_hours'] / final['num_devices']:.1f}"
        lines.append(
            (recipe, seed, *rates, f"{rise:+.3f} ± {error:.3f}", final["case"]["step"], minutes,
             f"{final['peak_gib']:.1f}", final["note"])
        )  # fmt: skip
        where[f"{recipe}, seed {seed}"] = [final]
    heads = ("recipe", "seed", "start", "after", "gain", "steps", "minutes", "trainer's peak GiB", "note")
    return f"{table(heads, lines)}\n\n{where_table(where, PACKAGES)}"


def beside_table(step: int = 20) -> str:
    """One line a run that was recorded with its speed: pass rate after ``step`` steps, what they took, memory."""
    lines = []
    for (recipe, _), rows in read_runs().items():
        reached = next((row for row in rows if row["case"]["step"] == step and "tokens_per_s" in row), None)
        if reached is None:
            continue
        seconds = " / ".join(f"{reached[f'step_s_p{q}']:.1f}" for q in (20, 50, 80))
        minutes = 60 * (reached["gpu_hours"] - rows[0]["gpu_hours"]) / reached["num_devices"]
        rates = [f"{row['pass_rate']:.3f} ± {row['stderr']:.3f}" for row in (rows[0], reached)]
        lines.append(
            (recipe, *rates, f"{minutes:.1f}", seconds, f"{reached['tokens_per_s']:,.0f}", f"{reached['peak_gib']:.1f}")
        )
    heads = ("recipe", "start", f"after {step} steps", "minutes for these", "s a step p20 / p50 / p80", "tokens/s")
    return table((*heads, "trainer's peak GiB"), lines)


def families_table() -> str:
    """One line a run: pass rate of each family at its first and last validation."""
    runs = read_runs()
    families = sorted({family for rows in runs.values() for family in rows[0]["families"]})
    lines = []
    for (recipe, seed), rows in runs.items():
        ends = [[row["families"].get(family) for row in (rows[0], rows[-1])] for family in families]
        cells = [" to ".join(f"{found[0]:.3f} ± {found[1]:.3f}" for found in pair if found) for pair in ends]
        lines.append((recipe, seed, *cells))
    return table(("recipe", "seed", *(f"`{family}`" for family in families)), lines)
