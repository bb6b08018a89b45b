# SPDX-License-Identifier: Apache-2.0
"""The folder that a run writes into: whether it can, found out in the driver before anything starts."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from scalerl_verl.curriculum.settings import asks_for_curriculum
from scalerl_verl.names import SAMPLER_SECTION, select
from scalerl_verl.names.asking import only_validates

KEY = "trainer.default_local_dir"
_LOG_FILE = f"{SAMPLER_SECTION}.log_file"
PROBE_BYTES = 2**16


def find_problems(config: DictConfig, is_own_ray: bool) -> Iterator[str]:
    """Folders of the config that cannot be written.

    Args:
        config: the run's.
        is_own_ray: the run starts its Ray itself. In one that runs already the trainer may have another working
            directory, so what a relative path means there is not known here.
    """
    folder = select(config, KEY)
    if folder is not None and not only_validates(config):  # the checkpoint may be somebody else's
        yield from _find_problem(f"{KEY}={folder}", str(folder), "it holds checkpoints and the compute log", is_own_ray)
    log_file = select(config, _LOG_FILE)
    if log_file is not None and asks_for_curriculum(config):
        parent = os.path.dirname(str(log_file))
        yield from _find_problem(f"{_LOG_FILE}={log_file}", parent, "it lists dropped prompts", is_own_ray)


def _find_problem(given: str, folder: str, why: str, is_own_ray: bool) -> Iterator[str]:
    if "://" in folder:
        copies = "; set trainer.default_hdfs_dir to have checkpoints copied elsewhere" if given.startswith(KEY) else ""
        yield f"{given} is a URL, but {why}: set it to a local path{copies}"
        return
    path = Path(folder).expanduser() if given.startswith(_LOG_FILE) else Path(folder)  # verl expands no ~
    if not is_own_ray and not path.is_absolute():
        return
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
