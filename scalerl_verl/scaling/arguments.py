# SPDX-License-Identifier: Apache-2.0
"""Arguments of the curve commands; imports nothing heavy, so that `scalerl --help` is quick."""

from __future__ import annotations

import argparse
from typing import Any

EXIT_CODES = """exit codes: 0 done, and A is identified in every fit; 1 a file or an argument is wrong; 2 usage;
3 done, but A is not identified in at least one fit; 4 refused: the data of at least one run hold no curve.
If several hold, 1 comes before 4, and 4 before 3. All other runs are printed first. `plot`, `sizes` and
`advise` have no 3: they end with 0 when the file is written or the answer given."""
EXAMPLES = {
    "fit": r"""examples:
  scalerl fit runs/*                               A, B, C_mid of each run
  scalerl fit run.csv --json                       columns compute,score[,stderr] need no options
  scalerl fit runs/a --bootstrap 1000 --rivals     also resamples and rival curves
  scalerl fit curves/* --group-by '(.+)\.seed\d+'  seeds of one recipe as one curve""",
    "compare": r"""examples:
  scalerl compare runs/a runs/b --reference a
  scalerl compare curves/* --group base='base.seed*' --group new='new.seed*'
  scalerl compare wandb/offline-run-* --group-by wandb --x tokens""",
    "predict": """examples:
  scalerl predict runs/a                          at the end, twice and four times the compute
  scalerl predict runs/a --at 1e5 --reach .6 .7
  scalerl predict runs/a --budget 1e5             is it worth going on?""",
    "backtest": """examples:
  scalerl backtest runs/*
  scalerl backtest runs/a --shares .3 .5 --x tokens""",
    "plot": """examples:
  scalerl plot runs/* --out curves.html
  scalerl plot runs/a runs/b --out lines.svg --kind linear --until 1e5
  scalerl plot runs/* --out curves.png --json     also what was drawn""",
    "sizes": r"""examples:
  scalerl sizes runs/* --by 'qwen-(?P<parameters>[\d.]+b)' --at 14b 32b
  scalerl sizes runs/* --by 'batch(?P<batch>\d+)' --x tokens""",
    "advise": r"""examples:
  scalerl advise runs/* --by 'n(?P<n>\d+)-b(?P<batch>\d+)' --budget 1e4
  scalerl advise runs/* --by 'n(?P<n>\d+)' --budget 1e3 1e4""",
}
RUNS_HELP = """a folder of a run, or a log file: verl's JSONL, TensorBoard events, W&B offline run, CSV or Parquet with
columns compute,score[,stderr]"""


def add_commands(commands: Any) -> None:
    """Add the curve commands to the sub-parsers of `scalerl`."""
    fit = _command(commands, "fit", "fit A, B, C_mid with intervals and a verdict")
    fit.add_argument(
        "--bootstrap",
        type=int,
        default=0,
        metavar="N",
        help="make N bootstrap resamples, too (1000 give steady intervals)",
    )
    fit.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default 0)")
    fit.add_argument(
        "--rivals",
        action="store_true",
        help="fit rival curves, too, and test all of them on later points that were held out",
    )
    _add_grouping(fit)
    compare = _command(commands, "compare", "compare two or more recipes by their curves")
    compare.add_argument(
        "--tie", type=_positive, default=0.02, help="ceilings closer than this are tied (default 0.02)"
    )
    compare.add_argument(
        "--reference", help="recipe that the others are compared with, one by one (default: the first)"
    )
    _add_grouping(compare)
    predict = _command(commands, "predict", "scores at more compute, compute to reach a score, worth of going on")
    predict.add_argument(
        "--at", type=float, nargs="+", default=[], metavar="C", help="amounts of compute to predict the score at"
    )
    predict.add_argument(
        "--reach", type=float, nargs="+", default=[], metavar="S", help="scores to predict the compute for"
    )
    predict.add_argument(
        "--budget", type=float, metavar="C", help="say whether going on to this total compute is worth it"
    )
    backtest = _command(commands, "backtest", "fit the first part of a run, predict the rest, report the error")
    backtest.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75],
        help="shares of the compute to forecast from (default 0.25 0.5 0.75)",
    )
    plot = _command(commands, "plot", "draw points, fits and extrapolations to PNG, SVG, PDF or HTML")
    plot.add_argument("--out", required=True, help="file to write: .png, .svg, .pdf or .html")
    plot.add_argument(
        "--kind", choices=("curve", "linear"), default="curve", help="draw the curve, or F(R) as lines in log-log axes"
    )
    plot.add_argument(
        "--until", type=float, metavar="C", help="extrapolate up to this compute (default: 4 times the data)"
    )
    plot.add_argument("--title", default="", help="title of the picture")
    sizes = _command(
        commands, "sizes", "power laws of ceiling and speed over the size of the model, or another setting"
    )
    _add_setting(sizes)
    sizes.add_argument("--at", type=_size, nargs="+", default=[], metavar="SIZE", help="further sizes: 14b, 135m, 4096")
    advise = _command(commands, "advise", "the setting that measured curves favour at a budget of compute")
    _add_setting(advise)
    advise.add_argument(
        "--budget", type=float, nargs="+", required=True, metavar="C", help="total compute of a run, in the unit of --x"
    )


def _command(commands: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help_text,
        description=help_text,
        epilog=f"{EXAMPLES[name]}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUNS_HELP)
    parser.add_argument("--join", action="store_true", help="take all RUNs as attempts at one run")
    parser.add_argument("--names", nargs="+", help="names of the runs (default: folder or file names)")
    parser.add_argument("--x", help="gpu_hours, tokens, trained_tokens, flops, steps or the name of a metric or column")
    parser.add_argument("--y", help="the score: name of a metric or column, or a part of it that only one has")
    parser.add_argument(
        "--R0",
        default="auto",
        help="score at zero compute: a number, taken as exact; `fit`; or `auto`: what was measured at step 0 (a row at "
        "zero compute) is an observation of it, without one it is fitted",
    )
    parser.add_argument("--method", choices=("profile", "paper"), default="profile", help="default: profile")
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="C", help="leave out points with less compute")
    parser.add_argument("--level", type=float, default=0.95, help="confidence level of the intervals (default 0.95)")
    parser.add_argument(
        "--errors",
        choices=("relative", "absolute"),
        default="relative",
        help="relative: standard errors are weights only; absolute: they are the noise",
    )
    parser.add_argument("--grid-A", metavar="FROM:TO:STEP", help="method paper: values of A (0.45:0.8:0.005)")
    parser.add_argument(
        "--grid-C-mid", metavar="FROM:TO:NUM[,...]", help="method paper: values of C_mid (100:40000:100)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run)
    return parser


def _add_setting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--by",
        required=True,
        metavar="REGEX",
        help=r"finds the settings in the names of the runs, a named part each: 'n(?P<n>\d+)'; a number may end in k, m "
        "or b. Runs with the same settings are seeds",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return value


def _size(text: str) -> float:
    from scalerl_verl.scaling.fit.settings import read_number

    try:
        return read_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_grouping(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=GLOB",
        help="runs whose name or path fits GLOB are seeds of one recipe, NAME: one curve with the spread between "
        "seeds; once for each recipe",
    )
    parser.add_argument(
        "--group-by",
        metavar="REGEX",
        help=r"the same by the names of all runs: its capture group finds the recipe, as that of '(.+)\.seed\d+'; "
        "`wandb` takes the group of W&B's runs",
    )


def _run(arguments: argparse.Namespace) -> int:
    from scalerl_verl.scaling.commands import run_command

    return run_command(arguments)
