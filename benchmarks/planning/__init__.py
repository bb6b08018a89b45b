# SPDX-License-Identifier: Apache-2.0
"""What `scalerl plan` says of runs that nobody has to start."""
