# SPDX-License-Identifier: Apache-2.0
"""The runner of verl's own tests, on a stub of such a suite: what it counts, and what it takes for a difference.

verl's tests themselves take hours and run by hand, see verl_suite.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.upstream.verl_suite import ENDED, FILE, STATES, TIMED_OUT, Suite, find_suspects, run_suite, verdict

STUB = """
import os, signal, time
from pathlib import Path
import pytest

ACTIVE = os.environ.get("SCALERL_VERL_ACTIVE") == "1"
if os.environ.get("VERL_USE_EXTERNAL_PLUGINS") != "none":  # as the plugin does when verl loads it
    Path(os.environ["SCALERL_VERL_STATUS_DIR"]).mkdir()

class TestOne:
    def test_same(self): pass

class TestTwo:
    def test_same(self): raise KeyError("in every state")

def test_wants_a_gpu(): pytest.skip("no GPU")
def test_breaks_under_the_plugin(): assert not ACTIVE
def test_fails_in_another_way(): raise (TypeError if ACTIVE else ValueError)("twice")
def test_hangs(): time.sleep(60)
def test_ends_badly(end_badly): pass

@pytest.fixture
def end_badly():
    yield
    raise OSError("in the teardown")

def test_unsteady():
    seen = Path(FOLDER) / os.environ.get("SCALERL_VERL_ACTIVE", "0")
    seen.touch()
    first = not seen.read_text()
    seen.write_text("ran")
    assert not (ACTIVE and first)
"""
KILLED = "import os\nfrom tests.helper import number\ndef test_dies(): os.kill(os.getpid(), number)\n"
FACTS = {"commit": "stub", "dirty": False}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    root = tmp_path_factory.mktemp("suite")
    (root / "tests").mkdir()
    (root / "tests" / "__init__.py").write_text("")
    (root / "tests" / "helper.py").write_text("number = 9\n")
    (root / "tests" / "test_stub.py").write_text(f"FOLDER = {str(root)!r}\n{STUB}")
    (root / "tests" / "test_killed.py").write_text(KILLED)
    names = [path.relative_to(root) for path in sorted(root.rglob("*.py"))]
    return Suite(root, names, root / "logs", limit_s=60, test_limit_s=3)


CHOSEN = [Path("tests/test_killed.py"), Path("tests/test_stub.py")]


@pytest.fixture(scope="module")
def record(suite: Suite) -> dict[str, Any]:
    found = run_suite(suite, CHOSEN, list(STATES), FACTS, suite.root / "record.json", jobs=2, tries=2)
    assert json.loads((suite.root / "record.json").read_text()) == found
    return found


def test_outcomes_are_counted_by_test_and_by_file(record: dict[str, Any]) -> None:
    assert record["counts"]["without"] == {
        "failed": 3, "files ended": 1, "files killed by SIGKILL": 1, "passed": 3, "skipped": 1, "timed out": 1,
    }  # fmt: skip
    (first,) = record["files"]["tests/test_stub.py"]["runs"]["installed"]
    assert first["TestOne::test_same"] == "passed", "two classes may have a test of the same name"
    assert first["TestTwo::test_same"] == "failed: KeyError"
    assert first["test_ends_badly"] == "failed: OSError"
    assert record["files_that_loaded_the_plugin"] == {"without": 0, "installed": 1, "active": 1}


def test_difference_counts_only_if_it_is_there_again(record: dict[str, Any]) -> None:
    stub, twice = "tests/test_stub.py::", {"without": ["failed: ValueError"] * 2, "active": ["failed: TypeError"] * 2}
    assert record["differences"] == {
        f"{stub}test_breaks_under_the_plugin": {
            "without": ["passed"] * 2, "installed": ["passed"], "active": ["failed: AssertionError"] * 2,
        },
        f"{stub}test_fails_in_another_way": {**twice, "installed": ["failed: ValueError"]},
    }  # fmt: skip
    assert list(record["unsteady"]) == [f"{stub}test_unsteady"]
    assert verdict(record) == 1


def test_run_that_was_ended_goes_on(suite: Suite, record: dict[str, Any]) -> None:
    logs = sorted(suite.logs.rglob("*.log"))
    assert len(logs) == 3 + 3 + 2, "each file in each state, and the differing one twice more"
    for log in logs:
        log.unlink()
    again = run_suite(suite, CHOSEN, list(STATES), FACTS, suite.root / "record.json", tries=2)
    assert again == record and not list(suite.logs.rglob("*.log"))


def test_file_that_never_ends_is_killed_and_not_run_in_the_other_states(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    file = Path("tests/test_never.py")
    (tmp_path / file).write_text("import time\ntime.sleep(60)\n")
    short = Suite(tmp_path, [file], tmp_path / "logs", limit_s=1, test_limit_s=60)
    found = run_suite(short, [file], list(STATES), FACTS, tmp_path / "record.json")
    assert found["timed_out"] == [str(file)] and found["differences"] == {}
    assert found["files"][str(file)]["runs"] == {"without": [{FILE: TIMED_OUT}]}


def test_daemon_of_a_killed_file_does_not_stay(tmp_path: Path) -> None:
    """As a Ray or vLLM process in a session of its own; the next file would share the machine with it."""
    (tmp_path / "tests").mkdir()
    file, told = Path("tests/test_daemon.py"), tmp_path / "pid"
    (tmp_path / file).write_text(
        "import os, signal, subprocess\n"
        "daemon = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(told)!r}, 'w').write(str(daemon.pid))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    outcomes, _ = Suite(tmp_path, [file], tmp_path / "logs", limit_s=60, test_limit_s=60).run(file, "without")
    assert outcomes == {FILE: "killed by SIGKILL"}
    stat = Path(f"/proc/{told.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_states_that_are_not_what_they_are_called_are_no_success(record: dict[str, Any]) -> None:
    clean = {"differences": {}, "files_that_loaded_the_plugin": {"without": 0, "installed": 1}}
    assert verdict(clean) == 0
    for wrong in ({"without": 1, "installed": 1}, {"without": 0, "installed": 0}):
        assert verdict({**clean, "files_that_loaded_the_plugin": wrong}) == 1


def test_file_stands_for_its_tests_only_where_one_side_never_ended() -> None:
    ended, timed_out = {FILE: ENDED, "a": "passed"}, {FILE: TIMED_OUT}
    assert find_suspects({"without": [ended], "active": [timed_out]}) == {"active": {FILE}}
    assert find_suspects({"without": [ended], "active": [timed_out, ended]}) == {}
    assert find_suspects({"without": [ended], "active": [timed_out, {FILE: ENDED}]}) == {"active": {"a"}}
    assert find_suspects({"without": [timed_out], "active": [timed_out]}) == {}
