# SPDX-License-Identifier: Apache-2.0
"""What pip is told on a machine reaches uv."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.paths import REPO

LISTING = r"""
global.index-url='https://mirror.example/simple'
global.extra-index-url='https://one.example/simple\nhttps://two.example/simple'
global.constraint='/etc/limits.txt'
install.find-links='/wheels'
download.find-links='/other'
:env:.find-links='/wheels /more'
:env:.default-timeout='180'
:env:.disable-pip-version-check='1'
"""


def test_environment_wins_over_files_and_lists_keep_their_values(quickstart: Callable[[str], ModuleType]) -> None:
    module = quickstart("uv_settings")
    assert module.settings(module.options(LISTING), {}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_CONSTRAINT": "/etc/limits.txt",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_HTTP_TIMEOUT": "180",
    }


def test_what_the_user_told_uv_stays(quickstart: Callable[[str], ModuleType]) -> None:
    module = quickstart("uv_settings")
    told = {"UV_DEFAULT_INDEX": "https://mine.example", "UV_CONSTRAINT": ""}
    assert not set(module.settings(module.options(LISTING), told)) & set(told)


def test_a_shell_reads_the_lines(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://user:pa$$'word@mirror.example/simple\n", encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    env |= {"PIP_CONFIG_FILE": str(config), "PIP_FIND_LINKS": str(tmp_path)}
    line = f'eval "$({sys.executable} {REPO / "recipes/quickstart/uv_settings.py"})"; env'
    said = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "UV_DEFAULT_INDEX=https://user:pa$$'word@mirror.example/simple" in said
    assert f"UV_FIND_LINKS={tmp_path}" in said
