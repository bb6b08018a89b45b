# SPDX-License-Identifier: Apache-2.0
"""Changes of the recipe, one piece each, under which the synchronous run trains its first batch again."""

from __future__ import annotations

from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss"
_VERL_LOSS = {f"{_LOSS}.eps_max": None, f"{_LOSS}._target_": "verl.workers.config.PolicyLossConfig"}
_NO_LOWER_CLIP = {f"{_ACTOR}.clip_ratio_low": 1.0}

TOGGLES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "advantages only centred": {"algorithm.scalerl.adv_norm": "none"},
    "advantages by group": {"algorithm.scalerl.adv_norm": "prompt"},
    "zero variance kept": {"algorithm.scalerl.zero_variance": "keep"},
    "verl's estimator": {"algorithm.adv_estimator": "grpo", "algorithm.scalerl": None},
    "token average": {f"{_ACTOR}.loss_agg_mode": "token-mean"},
    "sample average": {f"{_ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    "cap of 1": {f"{_LOSS}.eps_max": 1.0},
    "no cap": {f"{_LOSS}.eps_max": 1e9},
    "range of ratios": {f"{_LOSS}.token_mask_range": [0.5, 2.0]},
    "ratio of the response": {f"{_LOSS}.sequence_truncation": "product"},
    "verl's cispo": {f"{_LOSS}.loss_mode": "cispo", f"{_ACTOR}.clip_ratio_high": 4.0, **_NO_LOWER_CLIP, **_VERL_LOSS},
    "verl's PPO, no clip": {
        f"{_LOSS}.loss_mode": "vanilla",
        f"{_ACTOR}.clip_ratio_high": 1e9,
        f"{_ACTOR}.clip_ratio_c": 1e9,
        **_NO_LOWER_CLIP,
        **_VERL_LOSS,
    },
    "no curriculum": {"data.sampler": None},
}
"""Name -> config key -> value; None takes the key away."""
