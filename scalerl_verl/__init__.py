# SPDX-License-Identifier: Apache-2.0
"""ScaleRL (arXiv 2510.13786) for verl, by name. Importing this package imports nothing heavy."""

__version__ = "0.2.0"
