# SPDX-License-Identifier: Apache-2.0
"""Length control: forced interruption of thinking, budgets, markers, lengths; NumPy at most."""
