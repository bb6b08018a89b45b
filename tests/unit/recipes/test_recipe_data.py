# SPDX-License-Identifier: Apache-2.0
"""Data and reward of the mathematics and code recipes: what verl reads, and who is held out."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet
import pytest

from recipes.common import reward as common_reward
from recipes.common import to_parquet as converter


@pytest.fixture(scope="module")
def to_parquet() -> ModuleType:
    return converter


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    return common_reward


PROBLEMS = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i), "difficulty": "3/8"} for i in range(30)]
TESTS = json.dumps({"inputs": ["3\n", "5\n"], "outputs": ["6\n", "10\n"]})
PROGRAMS = [
    {
        "data_source": "taco",
        "prompt": [{"role": "system", "content": "[ASSESS]"}, {"role": "user", "content": f"Write program {i}."}],
        "ability": "code" if i % 2 else "math",
        "reward_model": {"style": "rule", "ground_truth": TESTS},
        "extra_info": {},
    }
    for i in range(30)
]


def convert(module: ModuleType, tmp_path: Path, sources: list[str], **records: list[dict[str, Any]]) -> Path:
    options = []
    for name, rows in records.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options += ["--input", f"{name.replace('_', '-')}={file}"]
    out = tmp_path / "out"
    assert module.main(["--out", str(out), "--held-out", "5", *options, "--", *sources]) == 0
    return out


def test_files_are_what_verl_reads_and_no_problem_is_in_both(to_parquet: ModuleType, tmp_path: Path) -> None:
    # The dataset repeats a problem, and has one without an answer.
    records = [*PROBLEMS, PROBLEMS[4], {"problem": "Why?", "answer": ""}]
    out = convert(to_parquet, tmp_path, ["polaris"], polaris=records)
    rows = {name: pyarrow.parquet.read_table(out / f"{name}.parquet").to_pylist() for name in ("train", "test")}
    assert (len(rows["train"]), len(rows["test"])) == (25, 5)
    texts = {name: {row["prompt"][0]["content"] for row in found} for name, found in rows.items()}
    assert not texts["train"] & texts["test"] and len(texts["train"] | texts["test"]) == 30
    row = rows["train"][0]
    assert row["data_source"] == "math_dapo" and row["prompt"][0]["role"] == "user"
    number = int(row["prompt"][0]["content"].split()[2])
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(2 * number)}


def test_who_is_held_out_does_not_depend_on_the_order_of_the_dataset(to_parquet: ModuleType, tmp_path: Path) -> None:
    manifests = []
    for name, records in (("a", PROBLEMS), ("b", PROBLEMS[::-1])):
        (tmp_path / name).mkdir()
        out = convert(to_parquet, tmp_path / name, ["polaris"], polaris=records)
        manifests.append(json.loads((out / "manifest.json").read_text()))
    assert manifests[0] == manifests[1]
    assert manifests[0]["sources"]["polaris"]["dataset"] == "POLARIS-Project/Polaris-Dataset-53K"


def test_code_keeps_its_tests_and_the_users_words_only(to_parquet: ModuleType, tmp_path: Path) -> None:
    sources = ["polaris", "eurus-code"]
    out = convert(to_parquet, tmp_path, sources, polaris=PROBLEMS, eurus_code=PROGRAMS)
    rows = pyarrow.parquet.read_table(out / "train.parquet").to_pylist()
    code = [row for row in rows if row["ability"] == "code"]
    assert len(rows) == 25 + 10 and len(code) == 10
    assert all(row["data_source"] == "taco" and len(row["prompt"]) == 1 for row in code)
    assert all(row["reward_model"]["ground_truth"] == TESTS for row in code)


def test_too_few_problems_are_an_error(
    to_parquet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text(json.dumps(PROBLEMS[0]) + "\n")
    assert to_parquet.main(["--out", str(tmp_path / "out"), "--input", f"polaris={file}", "--", "polaris"]) == 1
    assert "polaris has 1 usable problems" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("2 + 2 = 5, no, 4</think>So:\nAnswer: 4", True),
        ("2 + 2 = 4\nAnswer: 4</think>So:\nAnswer: 5", False),
        ("It is \\boxed{4}", True),
        ("Answer: 4</think>", False),
        ("", False),
    ],
)
def test_mathematics_is_graded_behind_the_thinking(reward: ModuleType, response: str, right: bool) -> None:
    expected = {"score": 1.0, "acc": 1.0} if right else {"score": -1.0, "acc": 0.0}
    assert reward.compute_score("math_dapo", response, "4") == expected


@pytest.mark.parametrize(
    ("program", "right"),
    [("print(2 * int(input()))", True), ("print(6)", False), ("1 / 0", False), ("print(", False)],
)
def test_a_program_passes_all_tests_or_fails(reward: ModuleType, program: str, right: bool) -> None:
    response = f"```python\nprint(2 * int(input()))\n```</think>Here:\n```python\n{program}\n```\n"
    assert reward.compute_score("taco", response, TESTS)["acc"] == float(right)


def test_a_response_without_a_program_and_an_unknown_source(reward: ModuleType) -> None:
    assert reward.compute_score("apps", "print(6)", TESTS)["score"] == -1.0
    with pytest.raises(ValueError, match="'gsm8k' is not graded here: use math_dapo or codecontests"):
        reward.compute_score("gsm8k", "4", "4")
