# SPDX-License-Identifier: Apache-2.0
"""The command ``scalerl``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from scalerl_verl import __version__
from scalerl_verl.names import COMMAND
from scalerl_verl.planning.command import add_plan
from scalerl_verl.scaling.arguments import add_commands
from scalerl_verl.terminal import accept_any_text, run_to_end, say

USAGE = 2
"""Exit code where nothing was asked, as argparse's for what it does not understand."""

EPILOG = """exit codes: 0 done; 1 a file, an argument or the installation is wrong; 2 usage; 3 done, but the answer is
not the wanted one: a run does not fit, a ceiling is not identified; 4 refused: the data of a run hold no curve.

examples:
  scalerl doctor                               is the plugin loaded and patched in every kind of process?
  scalerl plan recipe=scalerl --gpus 8         whether a run fits a cluster
  scalerl fit runs/*                           where runs will end
  scalerl COMMAND --help                       more examples of a command"""
DOCTOR_EPILOG = """exit codes: 0 all is well; 1 something is wrong, said first; 2 usage

examples:
  scalerl doctor                               starts a driver, a Ray worker and vLLM, and asks each
  scalerl doctor --no-processes --verbose      this process only, with every package and symbol
  scalerl doctor --run-dir status              also what a run wrote to SCALERL_VERL_STATUS_DIR
  scalerl doctor --cluster auto                also the nodes of the Ray cluster that runs here"""
COMPLETION_EPILOG = """needs shtab: pip install 'scalerl-verl[completion]'
exit codes: 0 printed; 1 shtab is missing; 2 usage

examples:
  scalerl completion bash > ~/.local/share/bash-completion/completions/scalerl
  scalerl completion zsh > ~/.zfunc/_scalerl   with fpath+=~/.zfunc before compinit in .zshrc"""
FILES = ("runs", "out", "run_dir", "config_path", "model_config")
"""Arguments of all commands that are files or folders."""


def _doctor(arguments: argparse.Namespace) -> int:
    from scalerl_verl.doctor.command import run_doctor

    cluster = arguments.cluster or os.environ.get("RAY_ADDRESS") or None
    report = run_doctor(not arguments.no_processes, arguments.run_dir, None if cluster == "local" else cluster)
    say(report.render(arguments.verbose))
    return int(bool(report.problems))


def _complete(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        print("error: completion needs shtab: pip install 'scalerl-verl[completion]'", file=sys.stderr)
        return 1
    parser = build_parser()
    for command in _commands(parser).values():
        for action in command._actions:
            if action.dest in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    say(shtab.complete(parser, shell=arguments.shell))
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


class _Parser(argparse.ArgumentParser):
    """Prints help and version as commands print; argparse would pass over output that cannot be written."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and file is not None and file is sys.stdout:
            say(message.removesuffix("\n"))
        else:
            super()._print_message(message, file)


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with one sub-command a task."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog=COMMAND, description="ScaleRL for verl: tools around the plugin.", epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    about = "check versions, entry points and patches; exits 1 if something is wrong"
    doctor = commands.add_parser("doctor", help=about, description=about, epilog=DOCTOR_EPILOG, formatter_class=raw)
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
    about = "print a script that completes commands and options in a shell"
    completion = commands.add_parser(
        "completion", help=about, description=about, epilog=COMPLETION_EPILOG, formatter_class=raw
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell to write for")
    completion.set_defaults(run=_complete)
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
    return run_to_end(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parse(argv)
    if arguments.command is None:
        build_parser().print_help(sys.stderr)
        return USAGE
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
