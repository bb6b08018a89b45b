# SPDX-License-Identifier: Apache-2.0
"""The folder that a run writes into, and the checkpoint that it resumes: known before anything starts."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from scalerl_verl.config.cluster import has_own_ray
from scalerl_verl.curriculum.settings import asks_for_curriculum
from scalerl_verl.names import SAMPLER_LOG_FILE, select
from scalerl_verl.names.asking import only_validates
from scalerl_verl.names.rules import Row, one_of

KEY = "trainer.default_local_dir"
RESUME_MODE, RESUME_PATH = "trainer.resume_mode", "trainer.resume_from_path"
PROBE_BYTES = 2**16
_MODES = ("auto", "disable", "resume_path")


def find_problems(config: DictConfig) -> Iterator[str]:
    """Folders of the config that cannot be written."""
    folder = select(config, KEY)
    if folder is not None and not only_validates(config):  # the checkpoint may be somebody else's
        yield from _find_problem(config, KEY, str(folder), "it holds checkpoints and the compute log")
    log_file = select(config, SAMPLER_LOG_FILE)
    if log_file is not None and asks_for_curriculum(config):
        yield from _find_problem(config, SAMPLER_LOG_FILE, os.path.dirname(str(log_file)), "it lists dropped prompts")


def find_resume_problems(config: DictConfig) -> Iterator[str]:
    """A checkpoint to resume that verl would not find."""
    yield from Row(RESUME_MODE, _MODES, f": {one_of(_MODES)}", default="auto")(config)
    if select(config, RESUME_MODE) != "resume_path":
        return
    given = f"{RESUME_PATH}={select(config, RESUME_PATH)}"
    if not re.search(r"global_step_\d+$", given):
        yield f"{given} with {RESUME_MODE}=resume_path: give the folder of a checkpoint, which ends with global_step_N"
    elif has_own_ray(config) and not Path(str(select(config, RESUME_PATH))).is_dir():
        yield f"{given} is not a directory: correct the path, or set {RESUME_MODE}=auto to take the newest checkpoint"


def _find_problem(config: DictConfig, key: str, folder: str, why: str) -> Iterator[str]:
    given = f"{key}={select(config, key)}"
    if "://" in folder:
        copies = "; set trainer.default_hdfs_dir to have checkpoints copied elsewhere" if key == KEY else ""
        yield f"{given} is a URL, but {why}: set it to a local path{copies}"
        return
    path = Path(folder) if key == KEY else Path(folder).expanduser()  # verl expands no ~
    if not has_own_ray(config) and not path.is_absolute():
        return  # the trainer may have another working directory
    error = try_to_write(path.absolute())
    if error is not None:
        yield (
            f"{given} cannot be written on this machine ({error}): {why}; set it to a path that this user may write "
            "and that has room (what other nodes can write is not known here)"
        )


def try_to_write(folder: Path) -> OSError | None:
    """Write a file into a folder, making the folder for it, and remove both; what kept it from that, if anything."""
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".scalerl_probe_") as stream:
            stream.write(bytes(PROBE_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return error
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # it was not made, or another run writes there already
                path.rmdir()
    return None
