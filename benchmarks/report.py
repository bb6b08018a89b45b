# SPDX-License-Identifier: Apache-2.0
"""Write the generated tables of README.md, docs/ and patches/: of recorded rows, of the code, of the diffs.

python benchmarks/report.py           rewrite them
python benchmarks/report.py --check   exit 1 if one is out of date

Tables only: what is said about them is written by hand, between them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.advantage.table import advantage_table
from benchmarks.evidence import axes, family, fits, recipes, studies, tokens, verl_runs
from benchmarks.fit.table import coverage_table, fit_table
from benchmarks.fork.table import fork_table
from benchmarks.frontend.table import frontend_table
from benchmarks.head import tables as head
from benchmarks.pipeline import tables as pipeline
from benchmarks.planning import updates
from benchmarks.quickstart.table import quickstart_table
from benchmarks.reasoning import table as reasoning
from benchmarks.reference import api, baselines, combinations, commands, keys, launches, patches, works_with
from benchmarks.rows import REPO
from benchmarks.step.table import short_table, step_table

FILES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "step": short_table,
        "works-with": combinations.short_table,
    },
    "docs/get-started.md": {"quickstart": quickstart_table},
    "docs/costs.md": {
        "advantage": advantage_table,
        "fp32-head": head.trainer_table,
        "vllm-head": head.generator_table,
        "frontend": frontend_table,
        "step": step_table,
    },
    "docs/symbols.md": {
        "symbols-summary": keys.symbols_summary,
        "works-with": works_with.works_with_table,
        "symbols": keys.symbols_table,
    },
    "docs/reference.md": {
        "our-keys": keys.keys_table,
        "presets": keys.presets_table,
        "preset-keys": keys.preset_keys_table,
        "metrics": keys.metrics_table,
        "environment": keys.environment_table,
        "commands": keys.commands_table,
        "errors": keys.errors_table,
    },
    "docs/works-with.md": {
        "combinations": combinations.combinations_table,
        "launches": launches.launches_table,
        "refusals": combinations.refusals_table,
        "trials": combinations.trials_table,
    },
    "docs/commands.md": {"commands": commands.command_table},
    "docs/upstream-a-patch.md": {"patches": patches.patch_table},
    "patches/README.md": {"patches": patches.patch_table},
    "docs/scaling.md": {"fit": fit_table, "coverage": coverage_table},
    "docs/evidence-methods.md": {
        "miniature": recipes.comparison_table,
        "where": recipes.recipes_where,
        "family": family.family_table,
        "fits": fits.fits_table,
        "dropped": recipes.dropped_table,
        "late": axes.late_table,
        "many": recipes.many_table,
        "k": recipes.k_table,
        "sizes": recipes.sizes_table,
        "tokens": tokens.tokens_table,
        "axes": axes.axes_table,
        "fits-larger": partial(fits.fits_table, fits.LARGER),
        "study-rate": partial(studies.study_table, "rate", (32, 160)),
        "study-staleness": partial(studies.study_table, "staleness", (64, 128)),
        "study-where": studies.where,
        "fork": fork_table,
        "mismatch": verl_runs.mismatch_table,
        "mismatch-where": verl_runs.mismatch_where,
        "off-policy": partial(verl_runs.off_policy_table, is_gpu=False),
        "off-policy-gpu": partial(verl_runs.off_policy_table, is_gpu=True),
    },
    "docs/pipeline.md": {
        "weight_update": pipeline.weight_update_table,
        "planned-updates": updates.updates_table,
        "measured-updates": updates.measured_table,
        "driver": pipeline.driver_table,
        "pipeline": partial(pipeline.pipeline_table, "gpu-1130"),
        "pipeline-modes": partial(pipeline.pipeline_table, "gpu-1129a"),
        "pipeline-2B": partial(pipeline.pipeline_table, "gpu-1129b"),
    },
    "recipes/smollm2-reasoning/README.md": {
        "runs": reasoning.runs_table,
        "families": reasoning.families_table,
        "beside": reasoning.beside_table,
    },
    "docs/baselines.md": {"keys": baselines.keys_table},
    "docs/api.md": {part: partial(api.section, part) for part in api.SECTIONS},
}


def render(name: str, text: str) -> str:
    """``text`` of the file with each part between ``<!-- generated:NAME -->`` and ``<!-- end:NAME -->`` made anew.

    Raises:
        ValueError: a part's markers are missing, or markers have no part.
    """
    marked = set(re.findall(r"<!-- generated:(\S+) -->", text))
    if marked != set(FILES[name]):
        raise ValueError(f"{name}: markers and parts of benchmarks/report.py differ in {marked ^ set(FILES[name])}")
    for part, make in FILES[name].items():
        pattern = re.compile(rf"(<!-- generated:{part} -->\n).*?(<!-- end:{part} -->)", re.DOTALL)
        body = make()
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    outdated = []
    for name in FILES:
        old = (REPO / name).read_text(encoding="utf-8")
        new = render(name, old)
        if old != new:
            outdated.append(name)
            if not arguments.check:
                (REPO / name).write_text(new, encoding="utf-8")
    if arguments.check and outdated:
        print(f"{', '.join(outdated)} out of date: run python benchmarks/report.py", file=sys.stderr)
    return int(arguments.check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
