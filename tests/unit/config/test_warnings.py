# SPDX-License-Identifier: Apache-2.0
"""A warning is seen in a process that has imported vLLM's server, which silenced what is below an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WARN = """
import logging, sys
import verl
from scalerl_verl.cpu.vllm_alias import install_vllm_alias
install_vllm_alias()
import verl.workers.rollout.vllm_rollout.vllm_async_server
logging.basicConfig()
logging.getLogger("scalerl_verl.test").warning("a group was given up")
print("SILENCING", "model_hosting_container_standards" in sys.modules)
"""


@pytest.mark.parametrize(
    "variables, seen",
    [
        ({"SCALERL_VERL_ACTIVE": "1"}, True),
        # What the user asks for stands, and without it, or without our names, vLLM's way does: newer ones leave it be.
        ({"SCALERL_VERL_ACTIVE": "1", "LOG_LEVEL": "ERROR"}, False),
        ({}, False),
    ],
)
def test_warnings_are_seen_beside_the_server(variables: dict[str, str], seen: bool) -> None:
    pytest.importorskip("model_hosting_container_standards")
    unwanted = ("SCALERL_VERL_ACTIVE", "VERL_PLATFORM", "LOG_LEVEL", "SAGEMAKER_CONTAINER_LOG_LEVEL")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted} | variables
    done = subprocess.run(
        [sys.executable, "-c", WARN], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert ("a group was given up" in done.stderr) == (seen or "SILENCING False" in done.stdout)
