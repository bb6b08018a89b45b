# SPDX-License-Identifier: Apache-2.0
"""``scalerl plan``: whether a run fits a cluster, from shapes alone; nothing is started and no weight is read."""
