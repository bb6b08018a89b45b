# SPDX-License-Identifier: Apache-2.0
"""No-positive-resampling: prompts the policy has mastered are not drawn again (PyTorch's Sampler at most)."""

from scalerl_verl.curriculum.history import PassHistory, Visit, tally_visits
from scalerl_verl.curriculum.rules import DroppedPrompt, ResamplingRules, choose_drops
from scalerl_verl.curriculum.sampler import EpochChange, NoPositiveResampling

__all__ = [
    "DroppedPrompt",
    "EpochChange",
    "NoPositiveResampling",
    "PassHistory",
    "ResamplingRules",
    "Visit",
    "choose_drops",
    "tally_visits",
]
