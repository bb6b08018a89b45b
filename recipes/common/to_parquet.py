# SPDX-License-Identifier: Apache-2.0
"""Public datasets as the files verl trains from: train.parquet, test.parquet (held out), and a manifest.

    python recipes/common/to_parquet.py --out DIR polaris                 # mathematics
    python recipes/common/to_parquet.py --out DIR polaris eurus-code      # mathematics and code

Each source holds 1,000 prompts out, as the paper does, by a hash of the problem's text: the same problem is never in
both files, whatever its number in the dataset. --input NAME=FILE reads a source from a local JSONL or Parquet file.
Records without a problem or an answer and copies of a problem are left out; the manifest says how many.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

Row = dict[str, Any]
INSTRUCTION = "\n\nThink it through, then give the result on a last line that begins with `Answer:`."


class SourceError(ValueError):
    """The data cannot be made; the message says what to change."""


def text_of(value: Any) -> str:
    """A field as text, empty if it is missing or none (a list, a number that is not finite); 0 and false are values.

    Answers are compared as text: a whole number that was read as 2.0 is written as a response has it, 2.
    """
    if isinstance(value, float | Decimal):
        value = int(value) if math.isfinite(value) and value == value // 1 else value if math.isfinite(value) else ""
    if isinstance(value, bytes):  # Parquet's binary columns
        value = value.decode("utf-8", "surrogateescape")
    text = str(value).strip() if isinstance(value, str | int | float | Decimal) else ""
    # Half a surrogate pair, which JSON can hold, has no bytes in UTF-8.
    return "" if any("\ud800" <= letter <= "\udfff" for letter in text) else text


def math_row(record: Row) -> Row | None:
    """A record with `problem` and `answer`; None if either is missing or blank."""
    problem, answer = text_of(record.get("problem")), text_of(record.get("answer"))
    if not problem or not answer:
        return None
    return make_row("math_dapo", "math", problem + INSTRUCTION, answer)


def code_row(record: Row) -> Row | None:
    """A record in verl's own form whose `ability` is code: the user's message and the tests stay as they are.

    None if it is of another kind, or has no message of the user or no tests.
    """
    turns, model = record.get("prompt"), record.get("reward_model")
    source = text_of(record.get("data_source"))
    if record.get("ability") != "code" or not source or not isinstance(turns, list) or not isinstance(model, dict):
        return None
    users = [turn.get("content") for turn in turns if isinstance(turn, dict) and turn.get("role") == "user"]
    truth = model.get("ground_truth")
    if not users or not isinstance(users[-1], str) or not text_of(users[-1]) or not truth:
        return None
    tests = truth if isinstance(truth, str) else json.dumps(truth)
    return make_row(source, "code", users[-1], tests) if text_of(tests) else None


def make_row(data_source: str, ability: str, prompt: str, truth: str) -> Row:
    """A row as verl's data set and reward manager read it."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"key": hashlib.sha256(prompt.encode()).hexdigest()},
    }


@dataclass(frozen=True)
class Source:
    """A dataset by its id, what makes a row of a record, and the fields that this takes."""

    dataset: str
    to_row: Callable[[Row], Row | None]
    fields: str


SUFFIXES = (".jsonl", ".parquet")
SOURCES = {
    "polaris": Source("POLARIS-Project/Polaris-Dataset-53K", math_row, "problem and answer"),
    "eurus-code": Source(
        "PRIME-RL/Eurus-2-RL-Data",
        code_row,
        "data_source, ability=code, prompt with a message of the user and reward_model with a ground_truth",
    ),
}


def convert(records: Iterable[Row], source: Source) -> tuple[list[Row], int]:
    """Rows of a dataset, each problem once, in the order of a hash of its text; and how many records were left out.

    Raises:
        SourceError: no record can be used.
    """
    rows: dict[str, Row] = {}
    num_records = 0
    columns: list[str] = []
    for record in records:
        num_records += 1
        columns = columns or list(record)
        if (row := source.to_row(record)) is not None:
            rows[row["extra_info"]["key"]] = row
    if columns and not rows:
        raise SourceError(
            f"none of {num_records} records can be used: a record needs {source.fields}, each with text or a number, "
            f"the first one has {', '.join(columns)}: rename or convert the fields"
        )
    return [rows[key] for key in sorted(rows)], num_records - len(rows)


def read_records(source: Source, file: Path | None) -> Iterator[Row]:
    """Records of a local file, or of the dataset by id.

    Raises:
        SourceError: the dataset cannot be fetched, or the file not be read as what its name says.
    """
    if file is None:
        import datasets

        try:
            records = datasets.load_dataset(source.dataset, split="train")
        except (OSError, ValueError) as error:  # the library's own are of these kinds
            raise SourceError(
                f"{source.dataset} cannot be fetched ({error}): give a local file with --input NAME=FILE"
            ) from error
        yield from records
    elif file.suffix.lower() == ".jsonl":
        yield from read_json_lines(file)
    else:
        import pyarrow.parquet

        try:
            yield from pyarrow.parquet.read_table(file).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise SourceError(f"{file} is no Parquet file ({error})") from error


def read_json_lines(file: Path) -> Iterator[Row]:
    """Objects of a JSON Lines file, also behind a byte order mark and between blank lines."""
    number = 0
    try:
        # JSON leaves other ends of lines as they are inside a string.
        with file.open(encoding="utf-8-sig", newline="\n") as stream:
            for line in stream:
                number += 1
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("it is no object such as {...}")
                    yield record
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one, before it reaches its line
        raise SourceError(f"{file} cannot be read at or after line {number} ({error})") from error


def choose_files(inputs: Sequence[str], sources: Sequence[str], held_out: int, out: Path) -> dict[str, Path]:
    """Local files by the source they stand for.

    Raises:
        SourceError: everything that is wrong with the command line.
    """
    files: dict[str, Path] = {}
    problems = [f"{name} is given more than once" for name in dict.fromkeys(sources) if sources.count(name) > 1]
    if held_out < 1:
        problems.append(f"--held-out {held_out}: give a whole number from 1")
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problems.append(f"--out {out}: {folder} is no folder that can be written; give another")
    for text in inputs:
        name, _, file = text.partition("=")
        if not file:
            problems.append(f"--input {text}: give NAME=FILE")
        elif name not in sources:
            problems.append(f"--input {text}: {name} is none of the sources given ({', '.join(sources)})")
        elif name in files:
            problems.append(f"--input {text}: {name} has a file already, {files[name]}")
        elif Path(file).suffix.lower() not in SUFFIXES:
            problems.append(f"--input {text}: the file's name must end in {' or '.join(SUFFIXES)}")
        elif not Path(file).is_file():
            problems.append(f"--input {text}: the file does not exist")
        else:
            files[name] = Path(file)
    if problems:
        raise SourceError("\n".join(problems))
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", choices=SOURCES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=1000, help="prompts of each source (default 1000)")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=FILE", help="a local file instead")
    arguments = parser.parse_args(argv)
    try:
        files = choose_files(arguments.input, arguments.sources, arguments.held_out, arguments.out)
        train, test, counts = collect(arguments.sources, files, arguments.held_out)
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        write(arguments.out, train, test, counts)
    except OSError as error:
        print(f"error: --out {arguments.out} cannot be written ({error}): give another folder", file=sys.stderr)
        return 1
    print(json.dumps(counts))
    return 0


def collect(
    sources: Sequence[str], files: dict[str, Path], held_out: int
) -> tuple[list[Row], list[Row], dict[str, Any]]:
    """Rows to train on, rows held out, and what of each source went where.

    Raises:
        SourceError: a source has too few problems, or its file cannot be read.
    """
    train: list[Row] = []
    test: list[Row] = []
    counts: dict[str, Any] = {}
    for name in sources:
        source, file = SOURCES[name], files.get(name)
        rows, num_left_out = convert(read_records(source, file), source)
        if len(rows) <= held_out:
            raise SourceError(
                f"{name} has {len(rows)} usable problems ({num_left_out} records have no problem or answer, or are "
                f"copies) and --held-out is {held_out}: lower it, or give more"
            )
        test += rows[:held_out]
        train += rows[held_out:]
        counts[name] = {"dataset": source.dataset, "train": len(rows) - held_out}
        counts[name] |= {"test": held_out, "left_out": num_left_out}
    return train, test, counts


def write(out: Path, train: list[Row], test: list[Row], counts: dict[str, Any]) -> None:
    """Both files, and a manifest with their hashes: two runs trained on the same data if theirs are equal."""
    import pyarrow
    import pyarrow.parquet

    out.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for name, rows in (("train", train), ("test", test)):
        path = out / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        text = "".join(json.dumps(row, sort_keys=True) for row in rows)
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()
    (out / "manifest.json").write_text(
        json.dumps({"sources": counts, "sha256": hashes}, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
