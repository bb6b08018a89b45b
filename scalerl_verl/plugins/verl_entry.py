# SPDX-License-Identifier: Apache-2.0
"""Entry point ``verl.plugins: scalerl``: verl imports this module at the end of ``import verl``.

verl logs a failing plugin at DEBUG level and goes on. A run that asks for our names would then fail minutes later,
or train with something else; so this module stops such a run itself. It imports the standard library only.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Any

_NAMES = r"(scalerl|scalerl_cispo|prompt-mean|gloo)"
_HEADS = r"""impl_backend['"]?[=:]\s*['"]?fp32|head_dtype['"]?[=:]\s*['"]?float32"""
_ON_COMMAND_LINE = re.compile(
    rf"^\+{{0,2}}(scalerl[@=]|algorithm\.scalerl\b|\S*poll_interval_s=)|^\+{{0,2}}[\w.@]+=['\"]?{_NAMES}['\"]?$|{_HEADS}"
)
_IN_YAML = re.compile(rf"^\s*(scalerl:|poll_interval_s:|[\w]+: ['\"]?{_NAMES}['\"]?$)|{_HEADS}", re.MULTILINE)


def asks_for_us(argv: list[str], environ: dict[str, str]) -> bool:
    """Whether a command line or environment uses one of our names (before any config is composed)."""
    by_env = environ.get("SCALERL_VERL_ACTIVE") == "1" or environ.get("VERL_PLATFORM", "").lower() == "cpu"
    # argv[0] is the script; a value that merely contains our name (a path) asks for nothing.
    return by_env or any(_ON_COMMAND_LINE.search(argument) for argument in argv[1:])


def _guard_config(cause: str) -> None:
    """Second line of defence for names that stand in a config file: refuse at verl's own config check."""
    import functools
    import importlib

    config_module: Any = importlib.import_module("verl.utils.config")
    original = config_module.validate_config

    @functools.wraps(original)
    def validate_config(config: object, *args: object, **kwargs: object) -> object:
        from omegaconf import OmegaConf

        if _IN_YAML.search(OmegaConf.to_yaml(config)):
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
