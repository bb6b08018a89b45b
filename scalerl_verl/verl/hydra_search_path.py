# SPDX-License-Identifier: Apache-2.0
"""Puts the config group ``scalerl`` on Hydra's search path: ``+scalerl=recipe`` needs no ``--config-dir``."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class ScaleRLSearchPath(SearchPathPlugin):
    """Appends our package after verl's own files (a ``--config-dir`` comes after us)."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="scalerl_verl", path="pkg://scalerl_verl.configs")
