# SPDX-License-Identifier: Apache-2.0
"""vLLM side: nothing to do beyond being loaded."""


def register() -> None:
    """Called by vLLM in every process."""
