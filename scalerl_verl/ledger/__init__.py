# SPDX-License-Identifier: Apache-2.0
"""What a run has spent and reached: compute, validation records, the log of every step, the forecast."""
