# SPDX-License-Identifier: Apache-2.0
"""What this machine tells pip, said to uv: uv reads neither pip's files nor its variables.

``python uv_settings.py`` prints ``export UV_...`` lines for a shell. It runs before anything is installed and needs the
standard library alone.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

LISTS = {
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""Options of pip that take several values: uv's variable, and what stands between its values."""

VALUES = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("HTTPS_PROXY", "HTTP_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "no-index": ("UV_NO_INDEX",),
    "keyring-provider": ("UV_KEYRING_PROVIDER",),
}
"""Options of pip that take one value: the variables that say the same to uv."""

SECTIONS = ("global", "install", ":env:")
"""Parts of pip's configuration that hold for ``pip install``; a later one wins."""


def options(listing: str) -> dict[str, str]:
    """Read the output of ``pip config list``: option to value, as ``pip install`` would take it."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listing.splitlines():
        match = re.fullmatch(r"(global|install|:env:)\.([^=]+)=(.*)", line)
        if match:
            found[match[1]][match[2]] = str(ast.literal_eval(match[3]))
    return {name: value for section in SECTIONS for name, value in found[section].items()}


def settings(options: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for uv; one that the user has set already is the user's and stays away.

    With several indexes pip takes the best version of all, and uv the first index that has the name: uv is told to do
    as pip does.
    """
    wanted = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for option, value in options.items():
        if option in LISTS:
            name, between = LISTS[option]
            wanted[name] = between.join(value.split())
        for name in VALUES.get(option, ()):
            wanted[name] = value
    return {name: value for name, value in wanted.items() if value and name not in environ}


def main() -> int:
    """Print the lines; a Python without pip has no configuration but the variables."""
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    if pip.returncode == 0:
        given = options(pip.stdout)
    else:
        given = {name[4:].lower().replace("_", "-"): os.environ[name] for name in os.environ if name.startswith("PIP_")}
    for name, value in settings(given, os.environ).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
