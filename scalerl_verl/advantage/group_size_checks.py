# SPDX-License-Identifier: Apache-2.0
"""verl's data column ``__rollout_n__``, the number of responses to one prompt: values that no prompt can ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from scalerl_verl.columns import ROLLOUT_N
from scalerl_verl.names import ADV_ESTIMATOR, ESTIMATOR, GROUP_SIZE, select, select_list

_MEANING = f"{ROLLOUT_N} is the number of responses to a prompt in place of {GROUP_SIZE}"


def asks_for_sizes(config: DictConfig) -> bool:
    """Whether a training file that can be read has the column."""
    import pyarrow
    import pyarrow.parquet

    for path in select_list(config, "data.train_files"):
        with suppress(OSError, pyarrow.ArrowException):  # the checks of the data name it
            if ROLLOUT_N in pyarrow.parquet.read_schema(Path(path).expanduser()).names:
                return True
    return False


def find_problems(config: DictConfig, key: str, files: Sequence[Path]) -> Iterator[str]:
    """What of the column would fail while the run generates, or train nothing.

    Args:
        config: the run's.
        key: of the files in the config.
        files: all parquet files of this key; they can be read.
    """
    import pyarrow
    import pyarrow.compute
    import pyarrow.parquet

    with_column = [path for path in files if ROLLOUT_N in pyarrow.parquet.read_schema(path).names]
    if not with_column:
        return
    for path in files:
        if path not in with_column:
            yield (
                f"{key}={path} has no column {ROLLOUT_N}, but {with_column[0]} has: {_MEANING}, and verl leaves it "
                "empty where a file lacks it; add the column to every file, or delete it everywhere"
            )
            continue
        column = pyarrow.parquet.read_table(path, columns=[ROLLOUT_N])[ROLLOUT_N]
        if not pyarrow.types.is_integer(column.type):
            found = f"is of type {column.type}"
        elif column.null_count:
            found = f"is empty in {column.null_count} rows"
        elif len(column) and (least := pyarrow.compute.min(column).as_py()) < 1:
            found = f"holds {least}"
        elif len(column) and least < 2 and key == "data.train_files" and select(config, ADV_ESTIMATOR) == ESTIMATOR:
            yield (
                f"{key}={path}: the column {ROLLOUT_N} holds {least}: {ADV_ESTIMATOR}={ESTIMATOR} centres rewards over "
                "the responses to one prompt, which leaves 0 for a single one; correct the column to 2 or more"
            )
            continue
        else:
            continue
        yield f"{key}={path}: the column {ROLLOUT_N} {found}: {_MEANING}, a whole number from 1; correct or delete it"
