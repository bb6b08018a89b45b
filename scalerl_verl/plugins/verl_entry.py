# SPDX-License-Identifier: Apache-2.0
"""Entry point ``verl.plugins: scalerl``: verl imports this module at the end of ``import verl``.

verl logs a failing plugin at DEBUG level and goes on. A run that asks for our names would then fail minutes later,
or train with something else; so this module stops such a run itself. It imports the standard library only.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

_OUR_WORDS = ("scalerl", "prompt-mean", "poll_interval_s", "backend=gloo", "backend: gloo")
"""As they stand on a command line or in YAML."""


def asks_for_us(argv: list[str], environ: dict[str, str]) -> bool:
    """Whether a command line or environment uses one of our names (before any config is composed)."""
    by_env = environ.get("SCALERL_VERL_ACTIVE") == "1" or environ.get("VERL_PLATFORM", "").lower() == "cpu"
    # argv[0] is the script: a path that happens to contain our name asks for nothing.
    return by_env or any(word in argument for argument in argv[1:] for word in _OUR_WORDS)


def _guard_config(cause: str) -> None:
    """Second line of defence for names that stand in a config file: refuse at verl's own config check."""
    import functools
    import importlib

    config_module: Any = importlib.import_module("verl.utils.config")
    original = config_module.validate_config

    @functools.wraps(original)
    def validate_config(config: object, *args: object, **kwargs: object) -> object:
        from omegaconf import OmegaConf

        if any(word in OmegaConf.to_yaml(config) for word in _OUR_WORDS):
            raise SystemExit(cause)
        return original(config, *args, **kwargs)

    config_module.validate_config = validate_config


def _load() -> None:
    try:
        from scalerl_verl.plugins.install import install_verl

        install_verl()
    except Exception as error:
        cause = (
            f"scalerl_verl failed to load: {type(error).__name__}: {error}\n"
            "Run 'scalerl doctor' for details, reinstall it, or remove its names from the run."
        )
        traceback.print_exc()
        print(cause, file=sys.stderr, flush=True)
        if asks_for_us(sys.argv, dict(os.environ)):
            # SystemExit is no Exception: verl's blanket handler cannot swallow it.
            raise SystemExit(cause) from error
        _guard_config(cause)
        raise


_load()
