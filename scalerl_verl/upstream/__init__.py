# SPDX-License-Identifier: Apache-2.0
"""The only package that touches private upstream names; `table.SYMBOLS` lists every one of them."""
