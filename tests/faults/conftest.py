# SPDX-License-Identifier: Apache-2.0
"""The fault tests that need a real run share the launcher of the end-to-end tests."""

from tests.e2e.conftest import run_verl, tiny_assets

__all__ = ["run_verl", "tiny_assets"]
