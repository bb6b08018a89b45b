# SPDX-License-Identifier: Apache-2.0
"""Which models can be interrupted: the start-up check on real tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.quickstart import model as quickstart_model
from scalerl_verl.interruption.settings import (
    find_model_problems,
    find_tokenizer_problems,
    make_script,
    read_settings,
)
from tests.unit.composed import changed

THINKING = quickstart_model.build_tokenizer()
ROLLOUT = "actor_rollout_ref.rollout"


def character_tokenizer(characters: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """A model without markers: every one of these characters is a token."""
    vocab = {token: index for index, token in enumerate(["<unk>", "<eos>", *characters])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


PLAIN = character_tokenizer("".join(map(chr, range(32, 127))))


def problems(tokenizer: Any, total: int = 1000, template: str | None = None, **options: Any) -> list[str]:
    return list(find_tokenizer_problems(tokenizer, read_settings(options), total, template))


def test_a_model_with_a_marker_token_may_be_interrupted() -> None:
    assert problems(THINKING) == []
    script = make_script(THINKING, read_settings(None))
    assert len(script.end_ids) == 1 and script.grace_tokens == 0
    assert script.phrase_ids[-1] == script.end_ids[0] and script.phrase_ids.count(script.end_ids[0]) == 1


def test_a_model_without_thinking_markers_is_refused_with_advice() -> None:
    (problem,) = problems(PLAIN)
    for advice in (
        "'</think>' is neither a token nor in the chat template",
        "algorithm.scalerl.interruption.start_marker and .end_marker",
        "algorithm.scalerl.interruption.plain_text_markers=True",
        f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent",
    ):
        assert advice in problem


@pytest.mark.parametrize("where", ["tokenizer", "config", "setting"])
def test_markers_as_plain_text_are_accepted_where_the_model_knows_them(where: str) -> None:
    template = "{{ messages }}<think></think>"
    if where == "tokenizer":
        assert problems(character_tokenizer("".join(map(chr, range(32, 127))), template)) == []
    elif where == "config":
        assert problems(PLAIN, template=template) == []
    else:
        assert problems(PLAIN, plain_text_markers=True) == []
    script = make_script(PLAIN, read_settings(None))
    assert script.grace_tokens == len("</think>") - 1


def test_a_phrase_that_the_tokenizer_cannot_write_is_refused() -> None:
    (problem,) = problems(THINKING, phrase="Genug überlegt. </think>")
    assert "algorithm.scalerl.interruption.phrase=" in problem and "characters that it knows" in problem
    (problem,) = problems(character_tokenizer("abc", "</think>"), phrase="abc</think>")
    assert "has lost end_marker='</think>'" in problem


@pytest.mark.parametrize("options", [{"thinking_budget": [5, 95]}, {"val_thinking_budget": [5, 95]}])
def test_budgets_are_checked_with_the_phrase_in_this_model_s_tokens(options: dict[str, Any]) -> None:
    assert problems(THINKING, total=100, phrase="</think>", answer_budget=4, **options) == []
    (problem,) = problems(THINKING, total=100, phrase="Oh.</think>", answer_budget=4, **options)
    assert next(iter(options)) in problem and "data.max_response_length=100" in problem


def test_the_check_reads_the_tokenizer_of_the_config(tmp_path: Path) -> None:
    THINKING.save_pretrained(tmp_path / "thinking")
    PLAIN.save_pretrained(tmp_path / "plain")
    config = changed("interruption", {f"{ROLLOUT}.response_length": 200})
    OmegaConf.update(config, "actor_rollout_ref.model.path", str(tmp_path / "thinking"))
    assert list(find_model_problems(config)) == []
    OmegaConf.update(config, "actor_rollout_ref.model.path", str(tmp_path / "plain"))
    assert "needs a model that marks its thinking" in next(find_model_problems(config))
    OmegaConf.update(config, "actor_rollout_ref.model.tokenizer_path", str(tmp_path / "thinking"))
    assert list(find_model_problems(config)) == []
    (tmp_path / "none").mkdir()
    OmegaConf.update(config, "actor_rollout_ref.model.tokenizer_path", str(tmp_path / "none"))
    assert "cannot be loaded" in next(find_model_problems(config))
    # Another loop asks nothing of a tokenizer.
    OmegaConf.update(config, f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    assert list(find_model_problems(config)) == []
