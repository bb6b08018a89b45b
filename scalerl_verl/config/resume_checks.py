# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a run is told to resume: whether verl can find it, known before engines start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from scalerl_verl.names import select

MODE, PATH = "trainer.resume_mode", "trainer.resume_from_path"
_MODES = ("auto", "disable", "resume_path")


def find_problems(config: DictConfig, is_own_ray: bool) -> Iterator[str]:
    """What is wrong with the choice of a checkpoint.

    Args:
        config: the run's.
        is_own_ray: the run starts its Ray itself; the trainer of another one may see other files.
    """
    mode = select(config, MODE, "auto")
    if mode not in _MODES:
        yield f"{MODE}={mode}: use one of {', '.join(_MODES)}"
    if mode != "resume_path":
        return
    path = select(config, PATH)
    if path is None or not re.search(r"global_step_\d+$", str(path)):
        yield f"{PATH}={path} with {MODE}=resume_path: give the folder of a checkpoint, which ends with global_step_N"
    elif is_own_ray and not Path(str(path)).is_dir():
        yield f"{PATH}={path} is not a directory: correct the path, or set {MODE}=auto to take the newest checkpoint"
