# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym for a pretrained model: problems, demonstrations, the supervised phase, the reward."""
