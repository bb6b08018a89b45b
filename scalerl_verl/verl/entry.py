# SPDX-License-Identifier: Apache-2.0
"""Entry point ``verl.plugins: scalerl``: verl imports this module at the end of ``import verl``.

verl logs a failing plugin at DEBUG level and goes on. A run that asks for our names would then fail minutes later,
or train with something else; so this module stops such a run itself. It imports the standard library and our list of
names only.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from scalerl_verl.names.asking import asked_names, asks_on_command_line

WITHOUT_TRAINER = (
    "verl.trainer.main_generation_server",
    "verl.trainer.main_eval",
    "verl.trainer.sft_trainer",
    "verl.trainer.sft_trainer_ray",
)
"""Programs of verl that take Hydra's overrides, also presets, and read no name of ours."""


def _guard_config(cause: str) -> None:
    """Second line of defence for names that stand in a config file: refuse at verl's own config check."""
    import functools
    import importlib

    config_module: Any = importlib.import_module("verl.utils.config")
    original = config_module.validate_config

    @functools.wraps(original)
    def validate_config(config: object, *args: object, **kwargs: object) -> object:
        if asked_names(config):
            raise SystemExit(cause)
        return original(config, *args, **kwargs)

    config_module.validate_config = validate_config


def _load() -> None:
    try:
        from scalerl_verl.verl.install import install_verl

        install_verl()
    except Exception as error:
        cause = (
            f"scalerl_verl failed to load: {type(error).__name__}: {error}\n"
            "Run 'scalerl doctor' for details, reinstall it, or remove its names from the run."
        )
        traceback.print_exc()
        print(cause, file=sys.stderr, flush=True)
        # argv[0] is the script.
        if asks_on_command_line(sys.argv[1:], os.environ):
            # SystemExit is no Exception: verl's blanket handler cannot swallow it.
            raise SystemExit(cause) from error
        _guard_config(cause)
        raise


def refuse_other_program(arguments: Sequence[str]) -> None:
    """Refuse our names on the command line of a program that would ignore them, and calls nothing that we could check.

    Args:
        arguments: those of the interpreter; a program is what follows ``-m``.

    Raises:
        SystemExit: with the reason.
    """
    program = next((name for option, name in itertools.pairwise(arguments) if option == "-m"), "")
    if program in WITHOUT_TRAINER and asks_on_command_line(arguments, {}):
        raise SystemExit(
            f"scalerl_verl refuses to start: {program} ignores our names. Delete them; they work in python -m "
            "verl.trainer.main_ppo"
        )


refuse_other_program(sys.orig_argv)
_load()
