# SPDX-License-Identifier: Apache-2.0
"""The recipes' rewards: a response that ended inside its thinking is wrong, whatever draft it holds."""

from __future__ import annotations

import asyncio
import json
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from recipes.common import reward as common_reward
from recipes.quickstart import reward as quickstart_reward
from scalerl_verl.interruption.response import INTERRUPTED, NATURAL, NO_THINKING, RECORD_KEY, UNCLOSED, LengthRecord
from tests.paths import RECIPES
from tests.unit.recipes.test_recipes import compose_recipe

WRONG, RIGHT = {"score": -1.0, "acc": 0.0}, {"score": 1.0, "acc": 1.0}
PROGRAM = "```python\nprint(2 * int(input()))\n```"
TESTS = json.dumps({"inputs": ["3\n"], "outputs": ["6\n"]})


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    return common_reward


def record(outcome: str | None) -> dict[str, Any]:
    """What verl hands on of a response of `forced_interruption`; of another loop's response nothing."""
    return {RECORD_KEY: LengthRecord(outcome, False, 5, 3, 0, 10).as_dict()} if outcome is not None else {}


CASES = [
    # the marker decides where there is one
    ("<think>hm</think>Answer: 42", None, False, True),
    ("<think>Answer: 42</think> I do not know", None, False, False),
    ("hm</think>Answer: 42", None, False, True),
    ("<think>maybe\nAnswer: 42", None, False, False),
    ("<think>maybe\nAnswer: 42", None, True, False),
    # of several ends the last one
    ("a</think>Answer: 42</think>Answer: 7", None, True, False),
    ("a</think>Answer: 7</think>Answer: 42", None, True, True),
    ("a</think>Answer: 42<think>no, Answer: 42", None, True, False),
    # no marker: what stood in front of the response decides
    ("Answer: 42", None, False, True),
    ("Answer: 42", None, True, False),
    ("Answer: 42", "no_thinking", True, True),
    ("Answer: 42", "unclosed", False, False),
    ("hm Time is up. </think>Answer: 42", "interrupted", True, True),
    ("hm</think>Answer: 42", "natural", True, True),
    ("", None, False, False),
]


@pytest.mark.parametrize(("response", "outcome", "thinks_from_start", "right"), CASES)
def test_only_an_answer_behind_the_last_end_of_the_thinking_counts(
    reward: ModuleType, response: str, outcome: str | None, thinks_from_start: bool, right: bool
) -> None:
    given = reward.compute_score("math_dapo", response, "42", record(outcome), thinks_from_start=thinks_from_start)
    assert given == (RIGHT if right else WRONG)


def test_program_inside_an_unclosed_thinking_is_wrong(reward: ModuleType) -> None:
    assert reward.compute_score("taco", f"<think>Let me see.\n{PROGRAM}", TESTS) == WRONG
    assert reward.compute_score("taco", f"Let me see.\n{PROGRAM}", TESTS, record("unclosed")) == WRONG
    assert reward.compute_score("taco", f"Let me see.</think>\n{PROGRAM}", TESTS) == RIGHT


def test_end_marker_that_the_text_has_lost_is_an_error_and_no_wrong_answer(reward: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"has no '</think>': give .*reward_kwargs\.end_marker the marker of"):
        reward.compute_score("math_dapo", "hm Answer: 42", "42", record("natural"))
    markers = {"start_marker": "[T]", "end_marker": "[/T]"}
    assert reward.compute_score("math_dapo", "hm[/T]Answer: 42", "42", record("natural"), **markers) == RIGHT
    assert reward.compute_score("math_dapo", "[T]Answer: 42", "42", **markers) == WRONG


def test_reward_knows_the_record_and_its_outcomes(reward: ModuleType) -> None:
    assert reward.RECORD_KEY == RECORD_KEY
    assert {NATURAL, INTERRUPTED, UNCLOSED, NO_THINKING} == {"natural", "interrupted", "unclosed", "no_thinking"}


def byte_tokenizer() -> Any:
    """A token a byte, as a transformers tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(("outcome", "right"), [("unclosed", False), ("no_thinking", True), (None, False)])
def test_record_reaches_the_reward_through_verl(
    outcome: str | None, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's own manager and function loader, with the config of a recipe."""
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.protocol import DataProto
    from verl.trainer.ppo.reward import get_custom_reward_fn

    monkeypatch.setenv("SCALERL_RECIPES", str(RECIPES))
    config = compose_recipe("scalerl-8b-math")
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer.encode("Answer: 42")])
    data = DataProto.from_dict(
        {"responses": ids, "attention_mask": torch.ones(1, 3 + ids.shape[1], dtype=torch.long)},
        non_tensors={
            "data_source": np.array(["math_dapo"]),
            "reward_model": np.array([{"ground_truth": "42"}], dtype=object),
            "extra_info": np.array([{"key": "x"}], dtype=object),
            "tool_extra_fields": np.array([record(outcome)], dtype=object),
        },
    )

    async def grade() -> dict[str, Any]:
        return await NaiveRewardManager(config, tokenizer, get_custom_reward_fn(config)).run_single(data)

    assert asyncio.run(grade())["reward_extra_info"] == (RIGHT if right else WRONG)


@pytest.mark.parametrize(
    ("response", "right"),
    [("<think>1+1=2</think>2", True), ("<think>1+1=2", False), ("2", False), ("<think>2</think>2</think>2", False)],
)
def test_quickstart_grades_exactly_one_closed_thinking(response: str, right: bool) -> None:
    """Also the reward of tiny-gpu."""
    assert quickstart_reward.compute_score("scalerl/chain_sum", response, "2") == (RIGHT if right else WRONG)
