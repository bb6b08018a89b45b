# SPDX-License-Identifier: Apache-2.0
"""What of verl and vLLM that we stand on another version changes: ``python -m tests.upstream.watch``."""
