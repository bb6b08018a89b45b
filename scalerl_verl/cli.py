# SPDX-License-Identifier: Apache-2.0
"""The command ``scalerl``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from scalerl_verl.names import COMMAND
from scalerl_verl.planning.command import add_plan
from scalerl_verl.scaling.arguments import add_commands
from scalerl_verl.terminal import accept_any_text

PIPE_CLOSED = 141
"""Exit code where nobody reads the output: a shell's for a program that SIGPIPE ended."""


def _doctor(arguments: argparse.Namespace) -> int:
    from scalerl_verl.doctor.command import run_doctor

    cluster = arguments.cluster or os.environ.get("RAY_ADDRESS") or None
    report = run_doctor(not arguments.no_processes, arguments.run_dir, None if cluster == "local" else cluster)
    print(report.render(arguments.verbose))
    return int(bool(report.problems))


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with one sub-command a task."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="ScaleRL for verl: tools around the plugin.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="check versions, entry points and patches; exits 1 if something is wrong"
    )
    doctor.add_argument("--no-processes", action="store_true", help="do not start a driver, a Ray worker and vLLM")
    doctor.add_argument("--run-dir", help="also read the status files a run wrote to SCALERL_VERL_STATUS_DIR")
    doctor.add_argument(
        "--cluster",
        nargs="?",
        const=os.environ.get("RAY_ADDRESS") or "auto",
        metavar="ADDRESS",
        help="also list the nodes of a running Ray cluster (default where RAY_ADDRESS is set)",
    )
    doctor.add_argument("--verbose", action="store_true", help="show every package, entry point and symbol")
    doctor.set_defaults(run=_doctor)
    add_plan(commands)
    add_commands(commands)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides of `plan` may stand behind options: argparse alone takes the first run of them and refuses the rest."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "plan" and not any(text.startswith("-") for text in rest):
        arguments.overrides += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join([text for text in rest if text.startswith('-')] or rest)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    accept_any_text()
    arguments = _parse(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        return PIPE_CLOSED
    return code


if __name__ == "__main__":
    sys.exit(main())
