# SPDX-License-Identifier: Apache-2.0
"""Runs of the miniature that each decide one question, and what was expected before any of them ran.

    python -m benchmarks.miniature.studies rate --warm warm/3M --out out/rate --device cuda --seconds 540
    python -m benchmarks.miniature.bench --record out/rate

One process a run, in an order in which a study that is cut off is still balanced; runs that are there are left out.
Several can share a device (--jobs): a network this small keeps it busy for a part of the time only.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

RATES = (2e-4, 4e-4, 1e-4, 8e-4)
"""Of 3M parameters; that of the other recorded runs first, which the other studies have."""


@dataclass(frozen=True)
class Study:
    """A question, the answer that was expected, and its runs: name -> arguments of the bench."""

    question: str
    expected: str
    runs: dict[str, tuple[str, ...]]


def _rate() -> Iterator[tuple[str, tuple[str, ...]]]:
    for rate, recipe in itertools.product(RATES, ("scalerl", "grpo", "gspo", "dapo")):
        yield f"{recipe}.lr{rate:g}", ("--recipe", recipe, "--lr", f"{rate:g}", "--updates", "160")


def _head() -> Iterator[tuple[str, tuple[str, ...]]]:
    for offset, recipe in itertools.product((None, 128, 64, 0), ("scalerl", "no_loss", "gspo")):
        rounding = () if offset is None else ("--head-offset", str(offset))
        yield f"{recipe}.head{offset}", ("--recipe", recipe, "--lr", f"{RATES[0]:g}", *rounding, "--updates", "128")


def _staleness() -> Iterator[tuple[str, tuple[str, ...]]]:
    for k, recipe in itertools.product((8, 64, 32), ("scalerl", "no_loss", "eps_max_1")):
        apart = ("--updates", "128", "--validate-every", str(max(16, k)))
        yield f"{recipe}.k{k}", ("--recipe", recipe, "--lr", f"{RATES[0]:g}", "--k", str(k), *apart)


STUDIES = {
    "rate": Study(
        "Is a recipe's lead its learning rate?",
        "Each at its own best rate, GRPO's gap at 0.3M tokens falls from .035 to .015 or less.",
        dict(_rate()),
    ),
    "head": Study(
        "What does a generator's head in bf16 cost each loss?",
        "Against FP32, offsets of 64 and 128: CISPO at most .005 either way, the clip -.02 and -.14, GSPO -.25 at 128.",
        dict(_head()),
    ),
    "staleness": Study(
        "What do more optimizer steps on a generated batch cost each loss?",
        "CISPO's mean over the curve stays within .02 from k = 8 to 64; the clip loses .02, .1 and .2 at 8, 32 and 64.",
        dict(_staleness()),
    ),
}


def command(study: str, name: str, out: Path, more: list[str]) -> list[str]:
    """Of one run; its files are called after the study's name of it."""
    arguments = STUDIES[study].runs[name]
    recipe = arguments[arguments.index("--recipe") + 1]
    given = ["--study", study, "--suffix", name.removeprefix(recipe), "--out", str(out), "--train-problems", "16384"]
    return [sys.executable, "-m", "benchmarks.miniature.bench", *arguments, *given, *more]


def run_study(study: str, out: Path, more: list[str], seconds: float, jobs: int) -> int:
    """Run what is not there yet; the first exit code that is not 0, after which no run begins."""
    began, codes = time.monotonic(), [0]

    def take(name: str) -> None:
        if (out / f"{name}.facts.json").exists():
            print(f"{name}: there already", flush=True)
        elif time.monotonic() - began > seconds:
            print(f"{name}: no time left", flush=True)
        elif not any(codes):
            codes.append(subprocess.run(command(study, name, out, more), check=False).returncode)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(take, STUDIES[study].runs))
    return next(filter(None, codes), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins after as many")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    known, more = parser.parse_known_args()
    study = STUDIES[known.study]
    print(f"{study.question}\nExpected: {study.expected}", flush=True)
    return run_study(known.study, known.out, more, known.seconds, known.jobs)


if __name__ == "__main__":
    sys.exit(main())
