# SPDX-License-Identifier: Apache-2.0
"""Tables and the pages that hold them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import report
from benchmarks.markdown import table, where_table
from benchmarks.reference.patches import read_patch
from benchmarks.rows import newest_run


def made(command: str = "python x", **more: Any) -> dict[str, Any]:
    row = {"hardware": "a GPU", "driver": "7", "versions": {"torch": "2", "ray": "3"}, "commit": "c" * 40}
    return {**row, "command": command, **more}


def test_rows_of_one_place_are_one_line() -> None:
    text = where_table({"a": [made()], "b": [made()]}, ("torch", "vllm"))
    assert text == table(
        ("measured on", "versions", "commit", "command at that commit"),
        [("a GPU, driver 7", "torch 2", "`cccccccccc`", "`python x`")],
    )


def test_rows_of_other_machines_commits_or_unclean_trees_are_told_apart() -> None:
    rows = [made(), made(dirty=True), made(commit="d" * 40), made(versions={"torch": "2.1"})]
    text = where_table({"a": rows, "b": [made("python y")]}, ("torch",), has_commands=False)
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == ["| a; b", "| a", "| a", "| a"]
    assert "`cccccccccc` (dirty)" in text and "`dddddddddd`" in text


def test_a_part_without_markers_and_markers_without_a_part_are_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/scaling.md.*\{'(fit|coverage)', '(fit|coverage)'\}"):
        report.render("docs/scaling.md", "no markers")
    text = "<!-- generated:fit -->\n<!-- end:fit -->\n<!-- generated:other -->\n<!-- end:other -->\n"
    with pytest.raises(ValueError, match="'other'"):
        report.render("docs/scaling.md", text)


def test_a_bench_that_never_ran_is_named() -> None:
    with pytest.raises(ValueError, match=r"nothing.jsonl holds no rows"):
        newest_run("nothing")


def test_a_diff_without_its_head_is_refused(tmp_path) -> None:
    (tmp_path / "a.patch").write_text("Subject: a\nBase: verl 1\n---\n")
    with pytest.raises(ValueError, match=r"no line 'Status: "):
        read_patch(tmp_path / "a.patch")
