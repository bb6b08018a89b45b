# SPDX-License-Identifier: Apache-2.0
"""The identity of a prompt, which is its content, and a column that carries it through verl.

verl copies every column of the data to each response in its TransferQueue, in all trainer modes, and saves them with a
checkpoint of an asynchronous trainer: an id in a column finds its way back from any result. verl's own ``uid`` names
one draw of one row and its group of responses; ``extra_info.index`` names a row.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMN = "scalerl_prompt_id"
_CHUNK_ROWS = 1024
_MEDIA_KEYS = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}
_EXTRAS = ("tools_kwargs", "interaction_kwargs")
"""What verl reads in ``extra_info`` and hands to the tools and the interactions of an agent loop."""
_logger = logging.getLogger(__name__)


class UnmarkedDataError(ValueError):
    """The rows of a data set cannot be marked with their prompts; ``fix`` is what makes it possible."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


def prompt_id(row: Mapping[str, Any], prompt_key: str = "prompt", media_keys: tuple[str, ...] = ()) -> str:
    """Hash of what makes one row a task: 32 hexadecimal digits.

    That is its data source (by which verl chooses the reward function), prompt messages, ground truth and media, and
    where there are any its agent loop and the arguments of its tools and interactions. It is the same for every order
    of rows and keys. Keys without a value do not count: files of other columns that are read together fill them in.
    Nothing else counts, ``extra_info.index`` least of all: rows with equal content are one prompt.

    Args:
        row: a row of the data in verl's format; ``reward_model["ground_truth"]`` may be missing.
        prompt_key: column of the messages.
        media_keys: columns of images, videos or audio.
    """
    reward_model = row.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else reward_model
    content = [row.get("data_source"), row[prompt_key], truth, [row.get(key) for key in media_keys]]
    extra_info = row.get("extra_info")
    given = [extra_info.get(key) if isinstance(extra_info, Mapping) else None for key in _EXTRAS]
    extras = [_filled(_canonical(value)) for value in (row.get("agent_name"), *given)]
    # Added only where there are some: checkpoints hold the ids of rows without, and those may not change.
    content += [extras] if any(extras) else []
    text = json.dumps(_canonical(content), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(value: Any) -> Any:
    """``value`` for JSON: no empty keys, bytes by their hash, without the name of the file that they came from."""
    if isinstance(value, Mapping):
        in_bytes = isinstance(value.get("bytes"), (bytes, bytearray))
        left_out = ("path",) if in_bytes else ()
        return {str(key): _canonical(item) for key, item in value.items() if item is not None and key not in left_out}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


def _filled(value: Any) -> Any:
    """``value`` without keys that hold nothing at any depth: reading files together fills in whole trees of them."""
    if isinstance(value, Mapping):
        items = {key: _filled(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not None} or None
    return value


def label_dataset(dataset: Any, data_config: Any) -> list[str]:
    """Add the column `COLUMN` to a data set of verl.

    Args:
        dataset: verl's RLHFDataset, or one like it: ``dataset.dataframe`` is a ``datasets.Dataset`` whose columns end
            up in the rows; changed in place.
        data_config: the section ``data`` of the config.

    Returns:
        The id of each row.

    Raises:
        UnmarkedDataError: another kind of dataset, or the column is taken or does not arrive.
    """
    name = type(dataset).__name__
    dataframe: Any = getattr(dataset, "dataframe", None)
    if not _is_readable(dataframe):
        raise UnmarkedDataError(
            f"{name}.dataframe is {type(dataframe).__name__}, and only the rows of a datasets.Dataset can be marked "
            "with their prompt",
            "derive data.custom_cls from RLHFDataset, which keeps one",
        )
    if COLUMN in dataframe.column_names:
        raise UnmarkedDataError(f"the data has a column {COLUMN!r}, a name that scalerl_verl uses", "rename it")
    ids = list(_hash_rows(dataframe, data_config))
    dataset.dataframe = dataframe.add_column(COLUMN, ids)
    if ids and dataset[0].get(COLUMN) != ids[0]:
        raise UnmarkedDataError(
            f"{name} does not pass on all columns of its dataframe ({COLUMN} is missing in its rows)", "pass it on"
        )
    return ids


def count_copies(ids: Sequence[str]) -> tuple[int, int]:
    """(rows beyond the first of their prompt, prompts that have several rows)."""
    several = [count for count in Counter(ids).values() if count > 1]
    return sum(several) - len(several), len(several)


def warn_of_copies(ids: Sequence[str], key: str) -> None:
    """Say how many rows of a data set are copies, if any.

    Args:
        ids: the prompt of each row.
        key: the config key that names the files.
    """
    copies, prompts = count_copies(ids)
    if copies:
        _logger.warning(
            "%s: %d of %d rows are copies of %d prompts (same data source, messages, ground truth and media). Copies "
            "count as one prompt in standard errors, prompt counts and no-positive-resampling, and each is generated "
            "for itself. Leave one row of each if that is not what they are for.",
            key,
            copies,
            len(ids),
            prompts,
        )


def find_copies(dataset: Any, data_config: Any, key: str) -> None:
    """`warn_of_copies` of training data that nothing marks.

    Says nothing of data of another kind than verl's, or with images, videos or audio, which may take long to read.
    """
    dataframe: Any = getattr(dataset, "dataframe", None)
    prompt_key = data_config.get("prompt_key", "prompt")
    if _is_readable(dataframe) and prompt_key in dataframe.column_names and not _media_keys(dataframe, data_config):
        warn_of_copies(list(_hash_rows(dataframe, data_config)), key)


def _is_readable(dataframe: Any) -> bool:
    return hasattr(dataframe, "add_column") and hasattr(dataframe, "with_format")


def _media_keys(dataframe: Any, data_config: Any) -> tuple[str, ...]:
    wanted = [data_config.get(key, default) for key, default in _MEDIA_KEYS.items()]
    return tuple(key for key in wanted if key in dataframe.column_names)


def _hash_rows(dataframe: Any, data_config: Any) -> Iterator[str]:
    """Ids in the order of rows, read as Arrow so that no image is decoded."""
    prompt_key = data_config.get("prompt_key", "prompt")
    columns = dataframe.column_names
    media_keys = _media_keys(dataframe, data_config)
    if prompt_key not in columns:
        raise UnmarkedDataError(
            f"data.prompt_key={prompt_key} is no column of the data (found: {', '.join(columns)})",
            "set data.prompt_key to the column of the messages",
        )
    wanted = ["data_source", prompt_key, "reward_model", *media_keys, "agent_name"]
    extra_info = dataframe.features.get("extra_info")
    if isinstance(extra_info, Mapping) and any(key in extra_info for key in _EXTRAS):
        wanted.append("extra_info")
    rows = dataframe.select_columns([key for key in wanted if key in columns]).with_format("arrow")
    for start in range(0, len(rows), _CHUNK_ROWS):
        for row in rows[start : start + _CHUNK_ROWS].to_pylist():
            yield prompt_id(row, prompt_key, media_keys)
