# SPDX-License-Identifier: Apache-2.0
"""``scalerl doctor``: what is installed, bound and active."""
