# SPDX-License-Identifier: Apache-2.0
"""The simulator's view of what the pipeline benchmark measured, at its own size and at sizes out of reach here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.pipeline.runs import MODES
from benchmarks.pipeline.simulator import Rates, Simulation
from scalerl_verl.pipeline.admission import AdmissionRule

SLEEP_S = 1.0
"""What verl's client waits before it sends an aborted request again."""
WAYS = {"pipeline_rl keep": "keep", "pipeline_rl recompute": "recompute", "separate_async": "abort", "sync": "sync"}
LARGE = ((80, 64), (1000, 800))
"""(devices, of them generating), the paper's ratio."""


def rates_from(keep: dict[str, float], slots: int) -> Rates:
    """Speeds of one generator and one trainer from the keep run (medians).

    A decoding step is what busy generators with all their slots in use take for a token each.
    """
    tokens = keep["batch_tokens"]
    return Rates(
        num_replicas=1,
        slots=slots,
        step_s=slots * (1 - keep["generator_idle_fraction"]) / keep["trained_tokens_per_s"],
        train_s_per_token=keep["work_s"] / tokens,
        update_s=keep["update_s"],
        pause_s=keep["pause_s"],
    )


def simulate(rates: Rates, rival_s: float, case: dict[str, Any], batch_groups: int, steps: int) -> dict[str, float]:
    """Mode -> trained tokens per second of simulated time; aborting updates take ``rival_s``, for which all wait."""
    speeds = {}
    for mode, way in WAYS.items():
        mine = replace(rates, update_s=rival_s, pause_s=rival_s, resume_s=SLEEP_S) if way == "abort" else rates
        rule = AdmissionRule(batch_groups, 0 if way == "sync" else case["k"])
        simulation = Simulation(
            rule, mine, way, case["group"],
            lambda rng: min(case["longest"], 1 + int(rng.expovariate(1 / case["mean_length"]))),
        )  # fmt: skip
        speeds[mode] = simulation.run(steps).tokens_per_s
    return speeds


def predicted_rows(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the simulator for every regime in which a run has both modes that give its rates.

    Raises:
        ValueError: the keep or the separate_async run is missing.
    """
    rows = []
    for regime in dict.fromkeys(row["case"]["regime"] for row in measured):
        medians: dict[str, dict[str, float]] = {}
        mine = [row for row in measured if row["case"]["regime"] == regime and row["impl"] in WAYS]
        for row in mine:
            medians.setdefault(row["impl"], {})[row["metric"]] = row["p50"]
        if not {MODES[0], MODES[2]} <= set(medians):
            continue
        keep = next(row for row in mine if row["impl"] == MODES[0])
        rates = rates_from(medians[MODES[0]], keep["case"]["slots"])
        rival_s = medians[MODES[2]]["update_s"]
        sizes = ((max(2, keep["num_devices"]), max(2, keep["num_devices"]) - 1), *LARGE)
        for devices, generating in sizes:
            # More trainer devices train proportionally faster; a batch grows with the generators; a pause stays.
            trainers = devices - generating
            sized = replace(rates, num_replicas=generating, train_s_per_token=rates.train_s_per_token / trainers)
            speeds = simulate(sized, rival_s, keep["case"], keep["case"]["prompts"] * generating, steps=20)
            facts = {key: keep[key] for key in ("run_id", "hardware", "num_devices", "versions", "commit", "dirty")}
            rows += [
                {
                    **facts, "case": {**keep["case"], "simulated_devices": devices}, "impl": f"simulator: {mode}",
                    "metric": "trained_tokens_per_s", "unit": "tokens/s", "peak_gib": None, "command": keep["command"],
                    "utc": keep["utc"], **{f"p{q}": speed for q in (20, 50, 80, 95)},
                }
                for mode, speed in speeds.items()
            ]  # fmt: skip
    if not rows:
        raise ValueError(f"rates come from {MODES[0]} and {MODES[2]}, and no regime has rows of both")
    return rows
