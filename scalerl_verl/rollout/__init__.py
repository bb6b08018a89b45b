# SPDX-License-Identifier: Apache-2.0
"""Length control: forced interruption of thinking, length penalty, truncation alarm; NumPy at most."""
