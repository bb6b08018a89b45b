# SPDX-License-Identifier: Apache-2.0
"""The table of the front end: medians of the newest run of each case, failed turns and trials left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rows as recorded
from benchmarks.frontend.engine import SIZES, make_tokenizer
from benchmarks.frontend.table import frontend_table


def row(impl: str, value: float, run_id: str = "new", size: str = "0.28B", **changes: Any) -> dict[str, Any]:
    case = {"size": size, "params": 280_000_000, "requests": 256, "tokens": 1024}
    made = {"case": case, "impl": impl, "value": value, "seconds": 10.0, "frontend_cpu_s": 5.0, "failed": False}
    where = {"run_id": run_id, "hardware": "a card", "versions": {"vllm": "0.24.0"}, "commit": "c" * 40, "command": "c"}
    return {**made, **where, **changes}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)

    def write(*rows: dict[str, Any]) -> None:
        text = "".join(f"{json.dumps(each)}\n" for each in rows)
        (tmp_path / "frontend.jsonl").write_text(text, encoding="utf-8")

    return write


def test_line_has_medians_of_the_newest_run_and_no_failed_turn(record: Any) -> None:
    record(
        row("verl", 1.0, run_id="old"),
        row("verl", 9.0, size="tiny"),
        *(row("verl", value) for value in (90.0, 100.0, 400.0)),
        row("scalerl_verl", 200.0),
        row("scalerl_verl", 9000.0, failed=True),
        row("engine alone", 250.0, frontend_cpu_s=1.0),
        row("LLM.generate", 400.0, frontend_grew_mib=7),
        row("scalerl_verl", 200.0, frontend_grew_mib=1234),
    )
    speed, cost = frontend_table().split("\n\n")[:2]
    assert speed.splitlines()[2] == "| 0.28B | 256 x 1,024 | 100 | 200 | 250 | 400 | 2.00 | 0.50 |"
    assert cost.splitlines()[2] == "| 0.28B | 256 x 1,024 | 50% | 50% |  | 1,234 |"


def test_each_rival_is_compared_within_the_newest_run_that_has_it(record: Any) -> None:
    record(
        row("verl", 100.0, run_id="served"),
        row("scalerl_verl", 200.0, run_id="served"),
        row("scalerl_verl", 300.0, run_id="library"),
        row("LLM.generate", 400.0, run_id="library"),
    )
    assert frontend_table().splitlines()[2] == "| 0.28B | 256 x 1,024 | 100 | 200 |  | 400 | 2.00 | 0.75 |"


def test_way_without_a_turn_is_an_empty_cell(record: Any) -> None:
    record(row("verl", 100.0))
    assert frontend_table().splitlines()[2] == "| 0.28B | 256 x 1,024 | 100 |  |  |  |  |  |"


def test_no_rows_are_an_error_that_says_what_to_run(record: Any) -> None:
    record()
    with pytest.raises(ValueError, match=r"python -m benchmarks\.frontend\.bench"):
        frontend_table()


@pytest.mark.parametrize("name", SIZES)
def test_size_is_what_its_name_says(name: str) -> None:
    if name != "tiny":
        assert SIZES[name].num_params == pytest.approx(float(name.removesuffix("B")) * 1e9, rel=0.02)


def test_every_id_of_the_made_up_tokenizer_is_text() -> None:
    tokenizer = make_tokenizer(5000)
    assert len(tokenizer) == 5000
    assert tokenizer.decode(range(300, 303)) and len({tokenizer.decode([at]) for at in range(257, 5000)}) == 4743
