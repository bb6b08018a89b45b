# SPDX-License-Identifier: Apache-2.0
"""The command itself: version, help, examples that can be typed, completion."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from scalerl_verl import __version__, cli

COMMANDS = ("doctor", "plan", "fit", "compare", "predict", "backtest", "plot", "sizes", "advise", "completion")


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints that ends with 0 while it parses."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--version") == f"scalerl {__version__}\n"


def test_bare_command_is_usage_and_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == output_of(capsys, "--help")


def test_every_command_is_known_here() -> None:
    assert tuple(cli._commands(cli.build_parser())) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, command, "--help")
    _, found, below = text.partition("\nexamples:\n")
    assert found and "exit codes:" in text
    examples = [line.strip() for line in below.split("\n\n")[0].splitlines()]
    assert len(examples) >= 2
    for example in examples:
        line = re.split(r" {2,}| > ", example)[0]  # what it does stands behind
        program, *words = shlex.split(line)
        assert program == "scalerl" and words[0] == command
        arguments = cli._parse(words)
        assert arguments.command == command and callable(arguments.run)


def test_completion_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "pip install 'scalerl-verl[completion]'" in captured.err


def test_completion_asks_its_package_for_the_shell_and_names_what_is_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = ModuleType("shtab")
    seen = {}

    def complete(parser, shell):
        for name, command in cli._commands(parser).items():
            seen[name] = {action.dest for action in command._actions if getattr(action, "complete", None) == "files"}
        return f"script for {shell}"

    stub.FILE, stub.complete = "files", complete
    monkeypatch.setitem(sys.modules, "shtab", stub)
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out == "script for zsh\n"
    assert seen["fit"] == {"runs"} and seen["plot"] == {"runs", "out"}
    assert seen["doctor"] == {"run_dir"} and seen["plan"] == {"config_path", "model_config"}


def complete_in_bash(script: str, words: Sequence[str]) -> set[str]:
    """What bash offers for the last of the words."""
    line = f'source /dev/stdin <<< "$1"; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; '
    line += "$(complete -p scalerl | sed 's/.*-F \\([^ ]*\\).*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "-c", line, "bash", script], capture_output=True, text=True, timeout=60)
    return set(done.stdout.split())


def test_bash_offers_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert complete_in_bash(script, ["scalerl", "p"]) == {"plan", "predict", "plot"}
    assert complete_in_bash(script, ["scalerl", "fit", "--gro"]) == {"--group", "--group-by"}
    assert complete_in_bash(script, ["scalerl", "plot", "--kind", ""]) == {"curve", "linear"}
