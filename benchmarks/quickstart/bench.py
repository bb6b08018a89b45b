# SPDX-License-Identifier: Apache-2.0
"""Does the quickstart learn, with every seed? Runs recipes/quickstart/run.sh and records start and final pass rates.

python -m benchmarks.quickstart.bench --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from benchmarks.rows import REPO, append_rows, run_facts

MIN_GAIN = 0.15
"""A gain of .15 is what the recipe promises; standard errors of start and final are about .02 each."""


def run_seed(seed: int, out: Path, extra: list[str]) -> dict[str, Any]:
    """One fresh quickstart run; its summary.json.

    Raises:
        RuntimeError: the run failed.
    """
    script = REPO / "recipes" / "quickstart" / "run.sh"
    command = ["bash", str(script), "--fresh", "--seed", str(seed), "--out", str(out), *extra]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {code}")
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def verify(summary: dict[str, Any]) -> list[str]:
    """What keeps this summary from counting as learning; empty if nothing does."""
    problems = []
    if summary["gain"] < MIN_GAIN:
        problems.append(f"gain {summary['gain']:.3f} is below {MIN_GAIN}")
    if not summary["clear"]:
        problems.append("error bars of start and final overlap")
    return problems


def make_rows(seed: int, summary: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one seed: pass rates with standard errors, and the cost of the run."""
    case = {"seed": seed, "steps": summary["steps"], "generated_tokens": summary["generated_tokens"]}
    values = {
        "start_pass_rate": (summary["start"]["pass_rate"], summary["start"]["stderr"], "fraction"),
        "final_pass_rate": (summary["final"]["pass_rate"], summary["final"]["stderr"], "fraction"),
        "gain": (summary["gain"], summary["gain_stderr"], "fraction"),
        "wall": (summary["wall_s"], None, "s"),
    }
    return [
        {
            "case": case,
            "impl": "scalerl_verl",
            "metric": metric,
            # One run has one value; its spread is the standard error, not a percentile.
            "p20": value,
            "p50": value,
            "p80": value,
            "stderr": stderr,
            "unit": unit,
            "peak_gib": summary["peak_gib"],
            "error": None,
            **facts,
        }
        for metric, (value, stderr, unit) in values.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("extra", nargs="*", help="further arguments of run.sh")
    arguments = parser.parse_args()
    facts = run_facts(uuid.uuid4().hex[:12])
    failed = False
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            summary = run_seed(seed, Path(folder), arguments.extra)
            if seed == arguments.seeds[0]:
                shutil.copy(Path(folder) / "learning_curve.png", REPO / "docs" / "quickstart.png")
        problems = verify(summary)
        print(f"seed {seed}: {'; '.join(problems) if problems else 'learned'}", flush=True)
        failed |= bool(problems)
        # A seed that did not learn is recorded too: leaving it out would be choosing.
        append_rows("quickstart", make_rows(seed, summary, facts))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
