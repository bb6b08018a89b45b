# SPDX-License-Identifier: Apache-2.0
"""Files of users: ends of lines inside a string, a byte order mark, blank lines, an answer of 0, any locale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import pyarrow.parquet
import pytest

from recipes.common import to_parquet as converter
from recipes.quickstart import report as quickstart_report
from scalerl_verl.config import machine_checks
from scalerl_verl.curriculum import ResamplingRules
from scalerl_verl.curriculum.drop_list import DropList
from scalerl_verl.curriculum.rules import DroppedPrompt
from scalerl_verl.curriculum.sampler import EpochChange
from scalerl_verl.json_lines import read_records, split_lines

REPO = Path(__file__).resolve().parents[2]
LINE_ENDS = "one\u0085two\u2028three\u2029four\x0bfive\x0csix\x1cseven"
ROW = json.dumps({"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "q"}], "reward_model": {}})
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def drop_list(folder: Path, prompt: str) -> DropList:
    return DropList(folder / "dropped.jsonl", ResamplingRules(), lambda key: {"prompt": prompt})


def change(epoch: int) -> EpochChange:
    return EpochChange(epoch, (DroppedPrompt("a" * 32, 15, 16, 40),), (), (), 9, 1)


def test_drop_list_keeps_a_prompt_with_unicode_ends_of_lines(tmp_path: Path) -> None:
    drops = drop_list(tmp_path, LINE_ENDS)
    drops.epoch_began(change(2))
    drops.epoch_began(change(3))
    drops.resumed(2)
    assert [record.get("prompt") for record in read_records(tmp_path / "dropped.jsonl")] == [LINE_ENDS, None]
    superseded = read_records(tmp_path / "dropped.jsonl.superseded")
    assert [(record["epoch"], record.get("prompt")) for record in superseded] == [(3, LINE_ENDS), (3, None)]


def test_drop_list_keeps_half_a_surrogate_pair(tmp_path: Path) -> None:
    drop_list(tmp_path, "\ud83d").epoch_began(change(2))
    assert read_records(tmp_path / "dropped.jsonl")[0]["prompt"] == "\ud83d"


def test_drop_list_is_written_in_any_locale(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.faults.test_files_of_users import change, drop_list; "
        "drops = drop_list(Path(sys.argv[1]), '\\u4f60 \\u00e9'); drops.epoch_began(change(2)); drops.resumed(2); "
        "drops.epoch_began(change(3)); drops.resumed(2)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **C_LOCALE}, cwd=REPO, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [record.get("prompt") for record in read_records(tmp_path / "dropped.jsonl")] == ["\u4f60 \u00e9", None]


def test_json_lines_are_cut_at_line_feeds_only() -> None:
    assert split_lines("") == [] and split_lines("\n") == [""]
    assert split_lines(f"{LINE_ENDS}\n\nlast") == [LINE_ENDS, "", "last"]


def test_validation_dump_and_report_read_prompts_with_unicode_ends_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "0.jsonl"
    file.write_text(json.dumps({"input": LINE_ENDS}, ensure_ascii=False) + "\r\n\n", encoding="utf-8-sig")
    assert read_records(file) == [{"input": LINE_ENDS}]
    assert quickstart_report.read_jsonl(file, "") == [{"input": LINE_ENDS}]


def test_text_that_a_terminal_cannot_show_ends_no_program(tmp_path: Path) -> None:
    """A log has arrows and names, the quickstart's report a plus-minus sign."""
    code = (
        "import sys; from pathlib import Path; from recipes.launch.folder import Paths; "
        "from recipes.launch.progress import explain_failure; from scalerl_verl.terminal import accept_any_text; "
        "accept_any_text(); explain_failure(Paths(Path(sys.argv[1]))); print('\\u00b1')"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.log").write_text("ValueError: caf\u00e9 \u2192\n", encoding="utf-8")
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, **C_LOCALE}, cwd=REPO, capture_output=True, encoding="ascii", timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: caf\\xe9 \\u2192" in done.stdout and done.stdout.endswith("\\xb1\n")


def test_launch_line_with_any_text_is_printed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "recipes/launch/run.py",
        "recipes/tiny-gpu",
        "--out",
        str(tmp_path / "caf\u00e9"),
        "--print",
    ]
    done = subprocess.run(
        command, env={**os.environ, **C_LOCALE}, cwd=REPO, capture_output=True, encoding="ascii", timeout=120
    )
    assert done.returncode == 0 and "/run/checkpoints" in done.stdout, done.stderr


FILES = {
    "mark": "\ufeff" + ROW + "\n" + ROW + "\n",
    "blank": "\n\n  \n" + ROW + "\n",
    "mark and blank": "\ufeff\n" + ROW + "\n",
    "list": f"[{ROW},\n{ROW}]",
    "list behind a mark": f"\ufeff[{ROW}]",
    "over several lines": json.dumps(json.loads(ROW), indent=2) + "\n" + ROW,
    "carriage returns": ROW + "\r\n" + ROW + "\r\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_columns_are_found_where_verl_finds_rows(tmp_path: Path, text: str) -> None:
    import datasets

    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8", newline="")
    assert machine_checks._json_columns(file) == ["data_source", "prompt", "reward_model"]
    rows = datasets.load_dataset("json", data_files=str(file), cache_dir=str(tmp_path / "cache"))["train"]
    assert rows[0]["data_source"] == "openai/gsm8k"


@pytest.mark.parametrize(
    ("text", "said"), [("", "holds no record"), ("[]", "holds no record"), ("3\n", "needs objects"), ("{", "Expecting")]
)
def test_file_without_a_record_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        machine_checks._json_columns(file)


@pytest.fixture(scope="module")
def to_parquet() -> ModuleType:
    return converter


def truths(module: ModuleType, tmp_path: Path, text: str) -> set[str]:
    file, out = tmp_path / "records.jsonl", tmp_path / "out"
    file.write_text(text, encoding="utf-8", newline="")
    assert module.main(["--out", str(out), "--held-out", "1", "--input", f"polaris={file}", "--", "polaris"]) == 0
    rows = [
        row for name in ("train", "test") for row in pyarrow.parquet.read_table(out / f"{name}.parquet").to_pylist()
    ]
    return {row["reward_model"]["ground_truth"] for row in rows}


def test_answer_of_zero_is_an_answer(
    to_parquet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["0", "1", "false", "2.0", "0.5", '""', '" "', "null", "NaN", '"0"']
    lines = [f'{{"problem": "number {i}?", "answer": {answer}}}\n' for i, answer in enumerate(answers)]
    assert truths(to_parquet, tmp_path, "".join(lines)) == {"0", "1", "False", "2", "0.5"}
    counts = json.loads(capsys.readouterr().out)["polaris"]
    assert (counts["train"], counts["test"], counts["left_out"]) == (5, 1, 4)


def test_records_behind_a_mark_between_blank_lines_and_with_line_ends_are_read(
    to_parquet: ModuleType, tmp_path: Path
) -> None:
    lines = [json.dumps({"problem": f"{i} {LINE_ENDS}", "answer": i}, ensure_ascii=False) for i in range(3)]
    assert truths(to_parquet, tmp_path, "\ufeff\n" + "\r\n\n".join(lines)) == {"0", "1", "2"}


def test_wrong_command_line_is_refused_at_once_and_nothing_is_fetched_or_written(
    to_parquet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_parquet, "read_records", lambda *_: pytest.fail("a source was read"))
    file = tmp_path / "records.jsonl"
    file.touch()
    (tmp_path / "records.csv").touch()
    given = ["Polaris=" + str(file), "eurus-code=" + str(file), "polaris", f"polaris={tmp_path}/records.csv"]
    given += [f"polaris={tmp_path}/none.jsonl"]
    options = [option for text in given for option in ("--input", text)]
    code = to_parquet.main(["--out", str(tmp_path / "out"), "--held-out", "0", *options, "--", "polaris", "polaris"])
    assert code == 1 and not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    for part in (
        "polaris is given more than once",
        "--held-out 0: give a whole number from 1",
        "Polaris is none of the sources given (polaris",
        "eurus-code is none of the sources given",
        "--input polaris: give NAME=FILE",
        "records.csv: the file's name must end in .jsonl or .parquet",
        "none.jsonl: the file does not exist",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"problem": 1}\n{', "a.jsonl cannot be read at or after line 2 (Expecting"),
        ("a.jsonl", b"[1]\n", "line 1 (it is no object"),
        ("a.jsonl", b"\xff\xfe{}", "a.jsonl cannot be read at or after line 0 ('utf-8' codec"),
        ("a.parquet", b"PAR", "a.parquet is no Parquet file"),
    ],
)
def test_file_of_another_kind_is_refused(
    to_parquet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert to_parquet.main(["--out", str(tmp_path / "out"), "--input", f"polaris={file}", "--", "polaris"]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_program_without_a_message_or_tests_is_left_out(to_parquet: ModuleType) -> None:
    turns = [{"role": "user", "content": "Write it."}]
    good = {"ability": "code", "data_source": "taco", "prompt": turns, "reward_model": {"ground_truth": {"inputs": []}}}
    assert to_parquet.code_row(good) is not None
    for key, values in {
        "prompt": [None, "text", ["text"], [{"content": "x"}], [{"role": "user"}], [{"role": "user", "content": [1]}]],
        "reward_model": [None, "rule", [1], {"ground_truth": ""}, {"ground_truth": "\ud800"}],
        "ability": [None],
        "data_source": [None, ""],
    }.items():
        for value in values:
            assert to_parquet.code_row({**good, key: value}) is None, (key, value)
    assert to_parquet.code_row({key: value for key, value in good.items() if key != "data_source"}) is None


def test_answer_that_is_no_text_and_text_that_is_none_in_utf_8_are_left_out(to_parquet: ModuleType) -> None:
    expected = {"4": "4", b"4": "4", Decimal("4.00"): "4", Decimal("0.50"): "0.50", float("inf"): "", "\ud800": ""}
    assert {value: to_parquet.text_of(value) for value in expected} == expected
    assert [to_parquet.text_of(value) for value in (["4"], {"a": 4}, [], b"\xff")] == [""] * 4


def test_records_with_other_fields_are_refused_with_both_names(
    to_parquet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"question": "1 + 1?", "solution": 2}\n', encoding="utf-8")
    assert to_parquet.main(["--out", str(tmp_path / "out"), "--input", f"polaris={file}", "--", "polaris"]) == 1
    said = capsys.readouterr().err
    assert "a record needs problem and answer" in said and "the first one has question, solution: rename" in said


def test_folder_that_cannot_be_written_is_refused_before_anything_is_read(
    to_parquet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_parquet, "read_records", lambda *_: pytest.fail("a source was read"))
    (tmp_path / "file").touch()
    assert to_parquet.main(["--out", str(tmp_path / "file" / "out"), "polaris"]) == 1
    assert f"{tmp_path}/file is no folder that can be written" in capsys.readouterr().err


def test_dataset_that_cannot_be_fetched_is_refused_with_the_way_out(
    to_parquet: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stub_without_network(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", stub_without_network)
    assert to_parquet.main(["--out", str(tmp_path / "out"), "polaris"]) == 1
    assert "cannot be fetched (no route): give a local file with --input NAME=FILE" in capsys.readouterr().err
