# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM, one subject a file."""
