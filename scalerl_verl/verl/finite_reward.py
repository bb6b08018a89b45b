# SPDX-License-Identifier: Apache-2.0
"""Rewards that no batch can hold, refused where the response is scored (AgentLoopWorker)."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from scalerl_verl.advantage.passing import judge, reward_infos
from scalerl_verl.errors import RewardError
from scalerl_verl.interruption.verl import current_context


def require_finite_reward(config: Any, output: AgentLoopOutput, is_scored: bool) -> None:
    """Refuse a reward that is no finite number or cannot be judged, in the training of a pipeline run.

    Its group counts as failed.

    Args:
        config: the run's config.
        output: the last of a response, which has its reward; not checked against a type when it was put there.
        is_scored: responses are scored one by one; if not, None stands for a reward that is still to come.

    Raises:
        RewardError: the reward is NaN, infinite or no number at all, or what comes with it neither passes nor fails.
    """
    context = current_context()
    is_training = context is not None and not context.validation
    # Other trainers may use verl's worker with a config of their own.
    if not is_training or OmegaConf.select(config, "trainer.v1.trainer_mode") != "pipeline_rl":
        return
    reward: Any = output.reward_score
    if reward is None and not is_scored:
        return
    try:
        is_finite = math.isfinite(reward)
    except (TypeError, OverflowError):
        is_finite = False
    if not is_finite:
        raise RewardError(
            f"the reward of a response is {reprlib.repr(reward)}; a reward function must return finite numbers "
            "(reward.custom_reward_function, or the one of the prompt's data_source)"
        )
    judge(config, [reward], reward_infos([output.extra_fields]))
