# SPDX-License-Identifier: Apache-2.0
"""Patches of verl, one subject a file."""
