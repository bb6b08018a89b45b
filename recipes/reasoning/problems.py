# SPDX-License-Identifier: Apache-2.0
"""Problems of reasoning-gym as the files verl trains from, and demonstrations for the supervised phase.

    python recipes/reasoning/problems.py --out DIR [--seed N] [--train 8192] [--test 512] [--demonstrations 32768]

writes DIR/train.parquet, DIR/test.parquet (held out), DIR/demonstrations.parquet, and DIR/problems.json, which says
what they are. One problem in eight is held out, by a hash of its text: neither phase ever trains on it. Needs
reasoning-gym (requirements.txt beside the recipe).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose modules have plain names

from recipes.quickstart.task import is_held_out
from recipes.reasoning.demonstrations import PERFECT, FlawRates, demonstrate
from recipes.reasoning.families import FAMILIES, Entry
from recipes.reasoning.reward import SOURCE_PREFIX

MAX_DRAWS_EACH = 50
"""Draws for a problem that is wanted, at most: a generator of few problems ends there."""
SPLITS = ("test", "train", "demonstrations")
Row = dict[str, Any]


class ProblemsError(ValueError):
    """The problems cannot be made; the message says what to change."""


def stream_entries(family: str, seed: int, split: str) -> Iterator[Entry]:
    """Problems of a split; each split has draws of its own.

    Raises:
        ProblemsError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ProblemsError(
            f"the problems need reasoning-gym ({error}): pip install -r recipes/smollm2-reasoning/requirements.txt"
        ) from error
    # its generators add a problem's number to the seed, so blocks of seeds must not overlap
    block = int.from_bytes(hashlib.sha256(f"{family}/{split}/{seed}".encode()).digest()[:5], "big")
    size = 1 << 22
    dataset = reasoning_gym.create_dataset(family, seed=block, size=size, **FAMILIES[family].settings)
    for index in range(size):
        entry = dataset[index]
        if is_held_out(entry["question"]) == (split == "test"):
            yield entry


def draw_entries(family: str, seed: int, split: str, num: int) -> list[Entry]:
    """``num`` different problems of a split.

    Raises:
        ProblemsError: the family has not that many different ones.
    """
    found: list[Entry] = []
    seen: set[str] = set()
    for draws, entry in enumerate(stream_entries(family, seed, split)):
        if len(found) == num:
            break
        if draws > MAX_DRAWS_EACH * num + 1000:
            raise ProblemsError(
                f"{family} has {len(found)} different problems of the split {split!r} within {draws} draws, {num} were "
                f"asked for: ask for fewer, or widen its settings"
            )
        if entry["question"] not in seen:
            seen.add(entry["question"])
            found.append(entry)
    return found


def problem_row(family: str, entry: Entry, split: str, index: int) -> Row:
    """A row as verl's data set and `reward.py` read it: the ground truth is what reasoning-gym's verifier asks for."""
    known = {"answer": entry["answer"], "metadata": entry["metadata"]}
    return {
        "data_source": SOURCE_PREFIX + family,
        "prompt": [{"role": "user", "content": entry["question"].strip()}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(known)},
        "extra_info": {"split": split, "index": index},
    }


def problem_rows(families: Sequence[str], seed: int, split: str, num: int) -> list[Row]:
    """Different problems, as many of each family, in an order by chance."""
    ends = [num * number // len(families) for number in range(len(families) + 1)]
    drawn = [
        (family, entry)
        for family, start, end in zip(families, ends[:-1], ends[1:], strict=True)
        for entry in draw_entries(family, seed, split, end - start)
    ]
    random.Random(f"order/{split}/{seed}").shuffle(drawn)
    return [problem_row(family, entry, split, index) for index, (family, entry) in enumerate(drawn)]


def demonstration_rows(
    families: Sequence[str], seed: int, num: int, flaws: FlawRates, perfect_share: float
) -> list[Row]:
    """Demonstrations on problems of the training split, the perfect ones first."""
    rng = random.Random(f"demonstrations/{seed}")
    streams = {family: stream_entries(family, seed, "demonstrations") for family in families}
    rows = []
    for index in range(num):
        family = families[index % len(families)]
        entry = next(streams[family])
        flawed = index >= perfect_share * num
        shown = demonstrate(family, entry, rng, flaws if flawed else PERFECT)
        row = {"family": family, "flawed": flawed, "question": entry["question"].strip()}
        rows.append(row | dataclasses.asdict(shown))
    return rows


def write(
    out: Path, families: Sequence[str], seed: int, sizes: dict[str, int], flaws: FlawRates, perfect_share: float
) -> None:
    """Write the files, problems.json last.

    Raises:
        ProblemsError: a family has too few problems.
    """
    import pyarrow
    import pyarrow.parquet

    rows = {split: problem_rows(families, seed, split, sizes[split]) for split in ("test", "train")}
    rows["demonstrations"] = demonstration_rows(families, seed, sizes["demonstrations"], flaws, perfect_share)
    out.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for split, found in rows.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), out / f"{split}.parquet")
        hashes[split] = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    settings = {name: dict(FAMILIES[name].settings) for name in families}
    facts = {
        "seed": seed, "sizes": sizes, "flaws": dataclasses.asdict(flaws), "perfect_share": perfect_share,
        "families": settings, "sha256": hashes,
    }  # fmt: skip
    (out / "problems.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Write the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all of them")
    parser.add_argument("--train", type=int, default=8192, help="problems to train on (default %(default)s)")
    parser.add_argument("--test", type=int, default=512, help="held-out problems (default %(default)s)")
    parser.add_argument("--demonstrations", type=int, default=32768, help="default %(default)s")
    for name, rate in dataclasses.asdict(FlawRates()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=rate, help=f"rate, default {rate}")
    parser.add_argument("--perfect-share", type=float, default=0.6, help="demonstrations without flaws (default 0.6)")
    options = parser.parse_args(argv)
    try:
        rates = {rate.name: getattr(options, rate.name) for rate in dataclasses.fields(FlawRates)}
        if not 0 <= options.perfect_share <= 1:
            raise ProblemsError(f"--perfect-share {options.perfect_share}: give a number from 0 to 1")
        sizes = {split: getattr(options, split) for split in SPLITS}
        families = list(dict.fromkeys(options.families))
        if min(sizes.values()) < len(families):
            raise ProblemsError(f"sizes {sizes} are too small: give {len(families)} or more of each")
        write(options.out, families, options.seed, sizes, FlawRates(**rates), options.perfect_share)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{sizes['train']} training, {sizes['test']} held-out problems and demonstrations in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
