# SPDX-License-Identifier: Apache-2.0
"""Public datasets as the files verl trains from: train.parquet, test.parquet (held out), and a manifest.

    python recipes/common/to_parquet.py --out DIR polaris                 # mathematics
    python recipes/common/to_parquet.py --out DIR polaris eurus-code      # mathematics and code

Each source holds 1,000 prompts out, as the paper does, by a hash of the problem's text: the same problem is never in
both files, whatever its number in the dataset. --input NAME=FILE reads a source from a local JSONL or Parquet file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
INSTRUCTION = "\n\nThink it through, then give the result on a last line that begins with `Answer:`."


def math_row(record: Row) -> Row | None:
    """A record with `problem` and `answer`; None if either is empty."""
    problem, answer = str(record.get("problem") or "").strip(), str(record.get("answer") or "").strip()
    if not problem or not answer:
        return None
    return make_row("math_dapo", "math", problem + INSTRUCTION, answer)


def code_row(record: Row) -> Row | None:
    """A record in verl's own form whose `ability` is code: the user's message and the tests stay as they are."""
    if record.get("ability") != "code":
        return None
    users = [turn["content"] for turn in record["prompt"] if turn["role"] == "user"]
    truth = record["reward_model"]["ground_truth"]
    if not users or not truth:
        return None
    return make_row(record["data_source"], "code", users[-1], truth if isinstance(truth, str) else json.dumps(truth))


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
    """A dataset by its id and what makes a row of a record."""

    dataset: str
    to_row: Callable[[Row], Row | None]


SOURCES = {
    "polaris": Source("POLARIS-Project/Polaris-Dataset-53K", math_row),
    "eurus-code": Source("PRIME-RL/Eurus-2-RL-Data", code_row),
}


def convert(records: Iterable[Row], source: Source) -> list[Row]:
    """Rows of a dataset, each problem once, in the order of a hash of its text."""
    rows = {row["extra_info"]["key"]: row for record in records if (row := source.to_row(record)) is not None}
    return [rows[key] for key in sorted(rows)]


def read_records(source: Source, file: Path | None) -> Iterator[Row]:
    """Records of a local file, or of the dataset by id."""
    if file is not None and file.suffix == ".jsonl":
        with file.open(encoding="utf-8") as stream:
            yield from (json.loads(line) for line in stream if line.strip())
    elif file is not None:
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file).to_pylist()
    else:
        import datasets

        yield from datasets.load_dataset(source.dataset, split="train")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", choices=SOURCES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=1000, help="prompts of each source (default 1000)")
    parser.add_argument("--input", action="append", default=[], metavar="NAME=FILE", help="a local file instead")
    arguments = parser.parse_args(argv)
    files = dict(text.split("=", 1) for text in arguments.input)
    train: list[Row] = []
    test: list[Row] = []
    counts: dict[str, Any] = {}
    for name in arguments.sources:
        source = SOURCES[name]
        rows = convert(read_records(source, Path(files[name]) if name in files else None), source)
        if len(rows) <= arguments.held_out:
            print(f"error: {name} has {len(rows)} usable problems, --held-out {arguments.held_out}", file=sys.stderr)
            return 1
        test += rows[: arguments.held_out]
        train += rows[arguments.held_out :]
        counts[name] = {"dataset": source.dataset, "train": len(rows) - arguments.held_out, "test": arguments.held_out}
    write(arguments.out, train, test, counts)
    print(json.dumps(counts))
    return 0


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
    (out / "manifest.json").write_text(json.dumps({"sources": counts, "sha256": hashes}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
