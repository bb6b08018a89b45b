# SPDX-License-Identifier: Apache-2.0
"""What stands under .github calls this repository's own scripts, with no secret and no right to write."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.paths import REPO

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def steps_of(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_lint_tests_and_docs_are_run_by_our_scripts() -> None:
    commands = {step["run"].strip() for workflow in WORKFLOWS for step in steps_of(workflow) if "run" in step}
    assert commands == {"bash tests/run.sh --lint", "bash tests/run.sh --docs", "bash .ci/run"}
    usage = subprocess.run(["bash", "tests/run.sh", "--help"], cwd=REPO, capture_output=True, text=True, check=True)
    assert all(option in usage.stdout for option in ("--lint", "--docs"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_has_no_secret_and_pinned_actions(workflow: Path) -> None:
    text = workflow.read_text()
    assert "secrets" not in re.sub(r"#.*", "", text)
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in steps_of(workflow) if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_form_asks_what_it_can_show(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content["name"] and content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_lint_ends_at_the_first_failure() -> None:
    """`set -e` does not see a failure in the middle of `a && b`."""
    script = (REPO / "tests" / "run.sh").read_text()
    (lint,) = re.findall(r"^lint\(\) \{\n.*?^\}\n", script, re.MULTILINE | re.DOTALL)
    failing = 'ruff() { [ "$1" != check ]; }\nmypy() { :; }\n'
    done = subprocess.run(["bash", "-c", f"set -euo pipefail\n{failing}{lint}lint\necho went on"], capture_output=True)
    assert done.returncode != 0 and b"went on" not in done.stdout
