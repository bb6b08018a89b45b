# SPDX-License-Identifier: Apache-2.0
"""Both archives build without a network and hold the package and nothing else."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
import zipfile
from configparser import ConfigParser
from pathlib import Path

import markdown
import pytest

import scalerl_verl
from tests.paths import REPO

DESCRIPTION = "docs/package/description.md"
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "scalerl_verl", DESCRIPTION)


def copy_sources(folder: Path) -> Path:
    """Copy what the archives are made from to the new ``folder``, and return it."""
    for name in SOURCES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), built from a copy of what they may hold and what they must not."""
    source = copy_sources(tmp_path_factory.mktemp("source"))
    for name in ("tests", "benchmarks", "docs", "recipes"):
        (source / name).mkdir(exist_ok=True)
        (source / name / "__init__.py").write_text("")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (source / "dist").glob("*.whl")
    (sdist,) = (source / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_wheel_holds_the_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    wheel, _ = archives
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(path.relative_to(REPO))
        for path in (REPO / "scalerl_verl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if not re.match(r"scalerl_verl-[\d.]+\.dist-info/", name)} == package
    assert "scalerl_verl/py.typed" in package
    assert {Path(name).suffix for name in package} == {".py", ".typed", ".yaml", ".json"}


def test_wheel_is_for_any_platform_and_needs_nothing_that_moves_a_version(archives: tuple[Path, Path]) -> None:
    wheel, _ = archives
    assert wheel.name == f"scalerl_verl-{scalerl_verl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        meta = email.message_from_bytes(archive.read(name))
        points = ConfigParser()
        points.read_string(archive.read(name.replace("METADATA", "entry_points.txt")).decode())
    assert meta["Version"] == scalerl_verl.__version__
    needed = [line for line in meta.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert sorted(re.split(r"[^\w-]", line)[0] for line in needed) == ["numpy", "packaging", "scipy"]
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"scalerl": "scalerl_verl.cli:main"},
        "verl.plugins": {"scalerl": "scalerl_verl.verl.entry"},
        "vllm.general_plugins": {"scalerl": "scalerl_verl.verl.vllm_entry:register"},
    }


def test_sdist_makes_the_same_package(archives: tuple[Path, Path]) -> None:
    wheel, sdist = archives
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        files = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    assert {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"} <= names
    mine = {name for name in files if name.startswith("scalerl_verl/")}
    assert mine == {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("scalerl_verl/")}
    assert [n for n in files if n.split("/")[0] in ("tests", "benchmarks", "docs", "recipes")] == [DESCRIPTION]


def test_description_can_be_read_outside_of_the_repository(archives: tuple[Path, Path]) -> None:
    """On the page of a package index a path leads nowhere."""
    wheel, _ = archives
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        meta = email.message_from_bytes(archive.read(name))
    assert meta["Description-Content-Type"] == "text/markdown"
    text = (REPO / DESCRIPTION).read_text()
    payload = meta.get_payload(decode=True)
    assert isinstance(payload, bytes) and payload.decode().strip() == text.strip()
    elements = ElementTree.fromstring(f"<page>{markdown.markdown(text, extensions=['fenced_code'])}</page>").iter()
    addresses = [value for element in elements for key, value in element.items() if key in ("href", "src")]
    assert addresses and [address for address in addresses if not address.startswith("https://")] == []


def test_version_is_one_that_an_index_takes() -> None:
    """That the archives have this one, the test of the wheel says."""
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", scalerl_verl.__version__)


def test_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (REPO / "docs" / "changelog.md").read_text(), re.MULTILINE)
    assert headings[0] == scalerl_verl.__version__
    assert len(headings) == len(set(headings))


def test_citation_has_this_version() -> None:
    (cited,) = re.findall(r"^version: (\S+)", (REPO / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == scalerl_verl.__version__
