# SPDX-License-Identifier: Apache-2.0
"""Whether this process takes part in a run that uses our names.

The driver decides it once, from the composed config, and tells every other process through the environment;
a run that names nothing of ours leaves all patches but the start-up check unapplied.
"""

from __future__ import annotations

import os

from scalerl_verl.names import ACTIVE_ENV, DEFAULT_SYNC_TIMEOUT_S, PLATFORM_ENV
from scalerl_verl.names.asking import is_cpu_platform

ALLOW_UNKNOWN_ENV = "SCALERL_VERL_ALLOW_UNKNOWN_SOURCE"
STATUS_DIR_ENV = "SCALERL_VERL_STATUS_DIR"
SYNC_TIMEOUT_ENV = "SCALERL_VERL_SYNC_TIMEOUT_S"
DRIVER_ENV = "SCALERL_VERL_DRIVER"
ROOT_LEVEL_ENV = "SAGEMAKER_CONTAINER_LOG_LEVEL"

FORWARDED_ENV = (ACTIVE_ENV, PLATFORM_ENV, ALLOW_UNKNOWN_ENV, STATUS_DIR_ENV, SYNC_TIMEOUT_ENV, DRIVER_ENV)
"""Variables every node's processes need; Ray forwards only what runtime_env lists to other nodes."""


def is_checked() -> bool:
    """The driver's start-up check passed for this run (or the user has set the variable that says so)."""
    return os.environ.get(ACTIVE_ENV) == "1"


def is_active() -> bool:
    """The run uses at least one of our names, or runs on our CPU platform."""
    return is_checked() or is_cpu_platform()


def keep_warnings() -> None:
    """Keep Python's level of the root logger, WARNING, where the user asked for no other.

    vLLM's server imports model_hosting_container_standards, which sets the root logger and its handlers to ERROR unless
    one of these variables speaks: in the trainer and the generators no warning of ours, or of verl, would be seen.
    """
    if "LOG_LEVEL" not in os.environ:
        os.environ.setdefault(ROOT_LEVEL_ENV, "WARNING")


_set_here = False


def set_active() -> None:
    """Mark this process and every process it starts as part of a run that uses our names."""
    global _set_here
    keep_warnings()
    if not is_checked():
        _set_here = True
        os.environ[ACTIVE_ENV] = "1"


def clear_active() -> None:
    """Undo `set_active` of an earlier run in this process (Hydra's multirun), not what the user exported."""
    global _set_here
    if _set_here:
        _set_here = False
        os.environ.pop(ACTIVE_ENV, None)


def applies(when: str) -> bool:
    """Whether a patch with condition ``when`` is due in this process."""
    if when == "always":
        return True
    return is_cpu_platform() if when == "cpu" else is_active()


def sync_timeout_s() -> float:
    """Seconds without a sign of life of the receiver after which a weight update fails.

    Raises:
        ValueError: the environment variable is not a positive number.
    """
    text = os.environ.get(SYNC_TIMEOUT_ENV, "")
    if not text:
        return DEFAULT_SYNC_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(f"{SYNC_TIMEOUT_ENV}={text!r} must be a positive number of seconds")
    return value
