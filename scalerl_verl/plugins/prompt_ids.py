# SPDX-License-Identifier: Apache-2.0
"""A stable id of each prompt, and a column that carries it through verl.

verl copies every column of the training data to each response in its TransferQueue, in all trainer modes, and saves
them with a checkpoint of an asynchronous trainer: an id in a column finds its way back from any result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

COLUMN = "scalerl_prompt_id"
_CHUNK_ROWS = 1024
_MEDIA_KEYS = {"image_key": "images", "video_key": "videos", "audio_key": "audios"}


def prompt_id(row: Mapping[str, Any], prompt_key: str = "prompt", media_keys: tuple[str, ...] = ()) -> str:
    """Hash of data source, prompt messages, ground truth and media of one row: 32 hexadecimal digits.

    The same for every order of rows and keys. Keys without a value do not count: files of other columns that are read
    together fill them in. Rows with equal content get equal ids.

    Args:
        row: a row of the data in verl's format; ``reward_model["ground_truth"]`` may be missing.
        prompt_key: column of the messages.
        media_keys: columns of images, videos or audio.
    """
    reward_model = row.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else reward_model
    content = [row.get("data_source"), row[prompt_key], truth, [row.get(key) for key in media_keys]]
    text = json.dumps(_canonical(content), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(value: Any) -> Any:
    """``value`` for JSON: no empty keys, bytes by their hash."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


def label_dataset(dataset: Any, data_config: Any) -> list[str]:
    """Add the column `COLUMN` to verl's training data.

    Args:
        dataset: verl's RLHFDataset, or one like it: ``dataset.dataframe`` is a ``datasets.Dataset`` whose columns end
            up in the rows; changed in place.
        data_config: the section ``data`` of the config.

    Returns:
        The id of each row.

    Raises:
        ValueError: another kind of dataset, or the column is taken or does not arrive.
    """
    dataframe: Any = getattr(dataset, "dataframe", None)
    if not hasattr(dataframe, "add_column") or not hasattr(dataframe, "with_format"):
        raise ValueError(
            f"{type(dataset).__name__}.dataframe is {type(dataframe).__name__}: data.sampler marks each prompt in a "
            "datasets.Dataset, as verl's RLHFDataset keeps it; derive data.custom_cls from RLHFDataset, or delete "
            "the section (~data.sampler)"
        )
    if COLUMN in dataframe.column_names:
        raise ValueError(f"the training data has a column {COLUMN!r}, a name that data.sampler uses: rename it")
    ids = list(_hash_rows(dataframe, data_config))
    dataset.dataframe = dataframe.add_column(COLUMN, ids)
    if ids and dataset[0].get(COLUMN) != ids[0]:
        raise ValueError(
            f"{type(dataset).__name__} does not pass on all columns of its dataframe ({COLUMN} is missing in its "
            "rows): data.sampler needs it to know the prompt of each result; pass it on, or delete the section "
            "(~data.sampler)"
        )
    return ids


def _hash_rows(dataframe: Any, data_config: Any) -> Iterator[str]:
    """Ids in the order of rows, read as Arrow so that no image is decoded."""
    prompt_key = data_config.get("prompt_key", "prompt")
    columns = dataframe.column_names
    media = [data_config.get(key, default) for key, default in _MEDIA_KEYS.items()]
    media_keys = tuple(key for key in media if key in columns)
    wanted = [key for key in ("data_source", prompt_key, "reward_model", *media_keys) if key in columns]
    if prompt_key not in columns:
        raise ValueError(f"data.prompt_key={prompt_key} is no column of the data (found: {', '.join(columns)})")
    rows = dataframe.select_columns(wanted).with_format("arrow")
    for start in range(0, len(rows), _CHUNK_ROWS):
        for row in rows[start : start + _CHUNK_ROWS].to_pylist():
            yield prompt_id(row, prompt_key, media_keys)
