# SPDX-License-Identifier: Apache-2.0
"""Which runs are seeds of one recipe, and what the commands say of groups."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scalerl_verl.cli import main
from scalerl_verl.scaling.grouping import WANDB, choose_groups
from scalerl_verl.scaling.logs.segments import ReadError

PLACES = {name: (f"curves/{name}.jsonl", f"curves/{name}.jsonl") for name in ("base.seed0", "base.seed1", "new.seed0")}
BOTH = {"base": ["base.seed0", "base.seed1"], "new": ["new.seed0"]}
Ask = Callable[..., tuple[int, str, str]]


def group(
    *globs: str, by: str | None = None, places: Mapping[str, Sequence[str]] | None = None
) -> dict[str, list[str]]:
    return choose_groups(Namespace(group=list(globs), group_by=by), PLACES if places is None else places)


def test_runs_are_grouped_by_globs_of_names_paths_or_files() -> None:
    assert group() == {}
    assert group("base=base.*", "new=new*") == BOTH
    assert group("base=curves/base*", "new=*/new*") == BOTH
    assert group("base=*seed1.jsonl", "base=base.seed0", "new=new*")["base"] == ["base.seed1", "base.seed0"]


def test_runs_are_grouped_by_a_pattern_of_names() -> None:
    assert group(by=r"(.+)\.seed\d+") == BOTH
    assert group(by=r"seed(\d)") == {"0": ["base.seed0", "new.seed0"], "1": ["base.seed1"]}


@pytest.mark.parametrize(
    ("globs", "by", "message"),
    [
        (["base=bsae*"], None, "--group base=bsae.* matches no run; the runs are base.seed0, base.seed1, new.seed0"),
        (["base=base*"], None, "run new.seed0 is in no group .base.: .*--group new.seed0=new.seed0, or leave the run"),
        (["base=base*", "all=*"], None, "run base.seed0 is in the groups base and all"),
        (["base"], None, "--group base: give NAME=GLOB, such as base='base.seed"),
        (["=base*"], None, "give NAME=GLOB"),
        (["base="], None, "give NAME=GLOB"),
        (["base=*"], r"(.)", "give one of them"),
        ([], "base", "has 0 capture groups: give a regular expression with one"),
        ([], r"(a)(b)", "has 2 capture groups"),
        ([], "(", "no regular expression"),
        ([], r"(base)\.", "finds no group in run new.seed0"),
        ([], r"(x*)", "finds no group in run base.seed0"),
        ([], WANDB, "run base.seed0 has no W&B group: group by a pattern of names"),
    ],
)
def test_grouping_that_cannot_be_says_what_was_given_and_is_allowed(
    globs: list[str], by: str | None, message: str
) -> None:
    with pytest.raises(ReadError, match=message):
        group(*globs, by=by)


def write_wandb_run(path: Path, name: str) -> Path:
    """The beginning of a run's file: W&B's header, and one record in one chunk."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    record = proto.Record()
    record.run.run_id = path.stem
    record.run.run_group = name
    data = record.SerializeToString()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b":W&B\x00\x00\x00" + bytes(4) + len(data).to_bytes(2, "little") + b"\x01" + data)
    return path


def test_runs_are_grouped_by_the_group_that_wandb_knows(tmp_path: Path) -> None:
    files = {
        name: str(write_wandb_run(tmp_path / name / f"run-{name}.wandb", recipe))
        for name, recipe in (("a", "base"), ("b", "new"), ("c", "base"), ("none", ""))
    }
    places = {name: (str(tmp_path / name), file) for name, file in files.items()}
    unreadable = {"nowhere": ("nowhere",)}
    three = {name: place for name, place in places.items() if name != "none"}
    assert group(by=WANDB, places=three | unreadable) == {"base": ["a", "c"], "new": ["b"]}
    with pytest.raises(ReadError, match="run none has no W&B group"):
        group(by=WANDB, places=places)
    attempts = {"a": (str(tmp_path), files["a"], files["b"])}
    with pytest.raises(ReadError, match="run a is in the W&B groups base and new"):
        group(by=WANDB, places=attempts)


@pytest.fixture
def ask(write_csv: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Exit code, output and errors of a command over two seeds of each of two recipes, and more runs."""
    paths = [
        write_csv(f"{name}.seed{i}", A=A + 0.004 * i) for name, A in (("base", 0.645), ("new", 0.60)) for i in (0, 1)
    ]

    def call(command: str, *arguments: str, more: Sequence[Path] = ()) -> tuple[int, str, str]:
        code = main([command, *map(str, [*paths, *more]), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def answer_of(out: str) -> dict[str, Any]:
    return json.loads(out)


def test_fit_has_the_seeds_and_the_recipes(ask: Ask) -> None:
    code, out, _ = ask("fit", "--group-by", r"(.+)\.seed\d", "--json")
    answer = answer_of(out)
    assert code == 0
    assert [(entry["run"], entry["group"]) for entry in answer["runs"]] == [
        (f"{name}.seed{i}", name) for name in ("base", "new") for i in (0, 1)
    ]
    base, new = answer["groups"]
    assert base["members"] == ["base.seed0", "base.seed1"] and base["group"] == "base"
    assert base["A"] == pytest.approx((answer["runs"][0]["A"] + answer["runs"][1]["A"]) / 2)
    assert base["spread"] == pytest.approx(0.004 / 2**0.5, rel=0.3) and 0 < base["within"] < 0.004
    assert base["A_interval"][0] < base["A"] < base["A_interval"][1] and base["A_interval"][0] > new["A_interval"][1]
    _, out, _ = ask("fit", "--group", "base=base*", "--group", "new=new*")
    assert "2 of 2" in out and "between seeds" in out


def test_compare_is_between_groups_by_both_rules(ask: Ask) -> None:
    code, out, _ = ask("compare", "--group", "base=base*", "--group", "new=new*", "--reference", "new", "--json")
    answer = answer_of(out)
    (pair,) = answer["pairs"]
    assert code == 0 and (pair["first"], pair["second"]) == ("base", "new")
    assert pair["paper_winner"] == pair["interval_winner"] == "base"
    assert (pair["num_first"], pair["num_second"]) == (2, 2) and pair["spread"] > 0
    assert answer["reference"] == "new" and [row["recipe"] for row in answer["leave_one_out"]] == ["new", "base"]
    _, out, _ = ask("compare", "--group-by", r"(.+)\.seed\d")
    assert "paper's rule" in out and "interval rule" in out and "knows no noise" in out


def test_refused_seed_leaves_its_group_and_is_told(ask: Ask, tmp_path: Path) -> None:
    bad = tmp_path / "new.seed2.csv"
    bad.write_text("\n".join(["compute,score", *(f"{i},0.5" for i in range(1, 12))]))
    alone = tmp_path / "alone.seed0.csv"
    alone.write_text(bad.read_text())
    unread = tmp_path / "base.seed9.csv"
    by_name = ("--group-by", r"(\w+)\.seed\d", "--json")
    code, out, err = ask("compare", *by_name, "--reference", "alone", more=[bad, alone])
    answer = answer_of(out)
    assert code == 4 and "refused: new.seed2: " in err and "refused: alone.seed0: " in err
    assert [(group["group"], len(group["members"])) for group in answer["groups"]] == [("base", 2), ("new", 2)]
    assert len(answer["pairs"]) == 1 and answer["leave_one_out"] == []
    code, out, err = ask("fit", *by_name, more=[unread])
    assert code == 1 and len(answer_of(out)["groups"]) == 2 and err == f"error: {unread} does not exist\n"


def test_wrong_grouping_hides_no_log_that_cannot_be_read(ask: Ask, tmp_path: Path) -> None:
    code, out, err = ask("fit", "--group", "base=x*", more=[tmp_path / "nowhere"])
    assert code == 1 and out == "" and "nowhere does not exist" in err and "--group base=x* matches no run" in err
