# SPDX-License-Identifier: Apache-2.0
"""Every boundary of budgets and phrases, on a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalerl_verl.interruption.budgets import Budgets, InterruptionSettings
from scalerl_verl.interruption.response import RECORD_KEY, InterruptedResponse
from scalerl_verl.interruption.verl import InterruptingClient
from tests.unit.interruption.scripted import (
    EOS,
    PROMPT,
    ScriptedEngine,
    decode,
    encode_chars,
    encode_pairs,
    make_budgets,
    make_script,
)

PHRASE = "Stop.</t>"
PARAMS = {"temperature": 1.0, "logprobs": True}


def settings(budget: int = 8, answer_tokens: int = 4, **changes: Any) -> InterruptionSettings:
    options = {"start_marker": "<t>", "end_marker": "</t>", "phrase": PHRASE, **changes}
    return InterruptionSettings(thinking_budget=(budget, budget), answer_budget=answer_tokens, **options)


def run(
    thinking: str,
    answer: str = "42$",
    total: int = 60,
    pairs: bool = False,
    aborts: list[int] | None = None,
    prompt: str = "",
    params: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[InterruptedResponse, dict[str, Any], ScriptedEngine]:
    chosen = settings(**options)
    script = make_script(chosen, pairs)
    encode = encode_pairs if pairs else encode_chars
    prompt_ids = [*PROMPT, *encode(prompt)]
    engine = ScriptedEngine(thinking, answer, script.phrase_ids, encode, list(aborts or []), prompt_ids)
    client = InterruptingClient(
        engine,
        script,
        make_budgets(chosen, script, total),
        seed=0,
        session=0,
        step=0,
        stop_ids={EOS},
        decode=decode,
    )
    output = asyncio.run(
        client.generate("id", prompt_ids=prompt_ids, sampling_params=params or PARAMS, image_data=None)
    )
    response = client.response
    assert response is not None
    assert output.token_ids == response.token_ids and len(response.mask) == len(output.token_ids) <= total
    for position, (mask, log_prob) in enumerate(zip(response.mask, output.log_probs, strict=True)):
        # Sampled tokens keep the log-prob they were sampled with, those of the phrase have none.
        assert log_prob == (-(position + 1) / 1000 if mask else 0.0)
    assert set(engine.request_ids) == {"id"}, "verl keeps requests of one id on one server"
    return response, output.extra_fields[RECORD_KEY], engine


def test_unclosed_thinking_gets_the_phrase_at_its_budget_and_then_answers() -> None:
    response, record, engine = run("<t>abcdefghijkl")
    assert decode(response.token_ids) == "<t>abcde" + PHRASE + "42$"
    assert response.mask == [1] * 8 + [0] * 9 + [1] * 3
    assert record == {
        "outcome": "interrupted",
        "truncated": False,
        "thinking_tokens": 8,
        "answer_tokens": 3,
        "injected_tokens": 9,
        "thinking_budget": 8,
        "continued_tokens": len(PROMPT) + 17,
        "cached_tokens": (len(PROMPT) + 17) // 4 * 4,
        "clamped": False,
    }
    assert engine.asked == [(0, 8), (17, 4)]


@pytest.mark.fault("the model closes its thinking just before: the phrase lands inside the answer")
@pytest.mark.parametrize(
    ("thinking", "requests"),
    [
        ("<t>ab</t>9$", 2),  # the marker ends one after the budget (grace), see below
        ("<t>a</t>9$", 2),  # ends at the budget
        ("<t></t>99$", 2),  # one before
    ],
)
def test_a_close_in_the_last_tokens_of_the_budget_is_not_interrupted(thinking: str, requests: int) -> None:
    response, record, engine = run(thinking)
    assert decode(response.token_ids) == thinking and all(response.mask)
    assert record["outcome"] == "natural" and not record["truncated"] and record["injected_tokens"] == 0
    assert record["thinking_tokens"] == thinking.index("</t>") + 4
    assert len(engine.asked) == (3 if thinking.startswith("<t>ab") else requests)


@pytest.mark.parametrize("begun", ["<", "</", "</t"])
def test_a_begun_end_marker_may_be_completed_beyond_the_budget(begun: str) -> None:
    thinking = "<t>" + "x" * (5 - len(begun)) + "</t>9$"
    response, record, engine = run(thinking)
    assert decode(response.token_ids) == thinking and record["outcome"] == "natural"
    assert engine.asked[1] == (8, 4 - len(begun))


def test_what_only_looks_like_an_end_marker_is_interrupted_after_it() -> None:
    response, record, _ = run("<t>abcd<5 and more")
    assert decode(response.token_ids) == "<t>abcd<5 a" + PHRASE + "42$"
    assert record["outcome"] == "interrupted" and record["thinking_tokens"] == 8 + 3


def test_grace_is_used_once_however_often_a_marker_is_begun() -> None:
    response, _, engine = run("<t>abcd<<<<<<<<<<")
    assert response.phrase_span == (11, 20) and [limit for _, limit in engine.asked] == [8, 3, 4]


@pytest.mark.fault("the model closes its thinking just before: the phrase lands inside the answer")
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("filling", range(4, 9))
def test_markers_across_token_boundaries_are_found(offset: int, filling: int) -> None:
    """Two characters a token: the marker begins inside a token or at its edge, before, at and after the budget."""
    thinking = "x" * offset + "<t>" + "a" * filling + "</t>" + "9" * 5 + "$"
    thinking += "$" * (len(thinking) % 2)
    response, record, _ = run(thinking, pairs=True, budget=8, total=40)
    closes_at = thinking.index("</t>") + 4
    if closes_at <= 16:
        assert record["outcome"] == "natural" and all(response.mask)
        assert record["thinking_tokens"] == (closes_at + 1) // 2
        assert decode(response.token_ids) == thinking
    else:
        assert (record["outcome"] == "natural") == (decode(response.token_ids) == thinking)


@pytest.mark.fault("the model closes its thinking just before: the phrase lands inside the answer")
def test_no_phrase_lands_behind_a_close_of_several_tokens() -> None:
    for length in range(12):
        thinking = "<t>" + "a" * length + "</t>" + "1234567890" + "$"
        response, record, _ = run(thinking)
        text = decode(response.token_ids)
        assert text.count("</t>") == 1, text
        if record["outcome"] == "interrupted":
            assert text.index(PHRASE) >= 8


def test_a_model_that_is_writing_the_phrase_itself_gets_only_the_rest() -> None:
    phrase = "Stop. Now.</t>"
    response, record, _ = run("<t>aaStop. It is", phrase=phrase, budget=10)
    assert decode(response.token_ids) == "<t>aaStop. Now.</t>42$" and record["injected_tokens"] == len(" Now.</t>")
    assert record["thinking_tokens"] == 10 and response.mask == [1] * 10 + [0] * 9 + [1] * 3
    # Less than its first word is an accident of letters.
    response, record, _ = run("<t>aaaStop. It", phrase=phrase, budget=10)
    assert decode(response.token_ids) == "<t>aaaStop" + phrase + "42$" and record["injected_tokens"] == len(phrase)


@pytest.mark.parametrize("letters", range(6))
def test_a_phrase_begun_inside_a_token_is_completed_or_repeated_but_never_broken(letters: int) -> None:
    """Two characters a token, and the budget of 6 ends anywhere in the phrase that the model is writing."""
    chosen = settings(phrase="Stop. Now.</t>", budget=6)
    script = make_script(chosen, pairs=True)
    response = InterruptedResponse(script, make_budgets(chosen, script, 40), 6, thinks=None)
    sampled = ("<t>" + "a" * letters + "Stop. Now and then")[:12]
    response.add(encode_pairs(sampled), None, stopped=False)
    goes_on = len(sampled.removeprefix("<t>" + "a" * letters)) >= len("Stop.")
    whole = "<t>" + "a" * letters + chosen.phrase if goes_on else sampled + chosen.phrase
    assert decode(response.token_ids) == whole and response.next_limit() == 4
    assert response.phrase_span == (6, len(response.token_ids)) and len(response.token_ids) <= 6 + 7


@pytest.mark.parametrize("answer_tokens", [0, 1, 3])
def test_answer_budget_bounds_the_answer(answer_tokens: int) -> None:
    response, record, engine = run("<t>abcdefghijkl", text := "4242424242", answer_tokens=answer_tokens)
    assert decode(response.token_ids).endswith(PHRASE + text[:answer_tokens])
    assert record["truncated"] and record["answer_tokens"] == answer_tokens
    assert len(engine.asked) == (1 if answer_tokens == 0 else 2)


def test_an_answer_that_ends_with_its_last_token_is_not_truncated() -> None:
    _, record, _ = run("<t>abcdefghijkl", "42$", answer_tokens=3)
    assert not record["truncated"] and record["answer_tokens"] == 3


def test_a_natural_close_leaves_the_rest_of_the_response_to_the_answer() -> None:
    response, record, engine = run("<t>a</t>" + "9" * 100, total=30)
    assert len(response.token_ids) == 30 and record["truncated"] and record["outcome"] == "natural"
    assert engine.asked == [(0, 8), (8, 22)]


@pytest.mark.parametrize("length", range(1, 9))
def test_an_end_of_turn_inside_the_thinking_is_respected(length: int) -> None:
    thinking = ("<t>abcdefgh"[: length - 1]) + "$"
    response, record, engine = run(thinking)
    assert decode(response.token_ids) == thinking and len(engine.asked) == 1
    assert not record["truncated"]
    assert record["outcome"] == ("unclosed" if length > 3 else "no_thinking")


@pytest.mark.parametrize("filler", range(1, 6))
def test_stop_strings_end_a_response_at_any_place(filler: int) -> None:
    thinking = "<t>" + "a" * filler + "##bbbbbbbb"
    response, record, _ = run(thinking, params={**PARAMS, "stop": ["##"]})
    text = decode(response.token_ids)
    if filler <= 3:  # within the budget of 8
        assert text == "<t>" + "a" * filler + "##" and record["outcome"] == "unclosed"
    else:
        assert record["outcome"] == "interrupted"


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("begun", [1, 2, 3])
def test_a_stop_string_that_begins_within_the_budget_ends_the_response(begun: int, pairs: bool) -> None:
    """Two requests hold one half each, and the engine looks for it in each by itself."""
    chars = 16 if pairs else 8
    engine_text = "1" * (chars - begun) + "STOP" + "9" * 20
    response, record, engine = run(engine_text, pairs=pairs, params={**PARAMS, "stop": ["STOP"]})
    # A token of two characters may reach beyond it, as in a single request.
    assert decode(response.token_ids) == engine_text[: chars - begun + 4 + (begun % 2 if pairs else 0)]
    assert not record["truncated"] and len(engine.asked) == 2


def test_a_close_without_an_opening_is_no_thinking() -> None:
    _, record, _ = run("abc</t> is a tag$")
    assert record["outcome"] == "no_thinking" and record["thinking_tokens"] == 0


def test_a_stop_string_is_not_put_together_from_the_phrase_and_the_answer() -> None:
    response, record, _ = run("<t>abcdefghijkl", ">42$", params={**PARAMS, "stop": ["t>>"]})
    assert decode(response.token_ids).endswith(PHRASE + ">42$") and record["answer_tokens"] == 4


def test_a_response_that_opens_no_thinking_is_left_alone() -> None:
    response, record, engine = run("abcdefghijklmnop$")
    assert decode(response.token_ids) == "abcdefghijklmnop$" and record["outcome"] == "no_thinking"
    assert record["thinking_tokens"] == 0 and record["answer_tokens"] == 17
    # Once more before the end it is looked whether it thinks after all.
    _, record, engine = run("a" * 80)
    assert record["outcome"] == "no_thinking" and record["truncated"] and record["answer_tokens"] == 60
    assert [at for at, _ in engine.asked][:2] == [0, 8] and len(engine.asked) == 3


@pytest.mark.parametrize("before", range(6, 30))
def test_thinking_that_opens_after_the_budget_is_interrupted_where_phrase_and_answer_still_fit(before: int) -> None:
    response, record, _ = run("a" * before + "<t>" + "b" * 80, ">42$")
    assert record["outcome"] == "interrupted" and not record["truncated"]
    assert decode(response.token_ids).endswith(PHRASE + ">42$") and len(response.token_ids) <= 60


def test_without_a_start_marker_everything_is_thinking() -> None:
    _, record, _ = run("abcdefghijklmnop$", start_marker=None)
    assert record["outcome"] == "interrupted"


def test_a_template_that_opens_the_thinking_in_the_prompt() -> None:
    response, record, _ = run("abcdefghijkl", prompt="<t>\n")
    assert decode(response.token_ids) == "abcdefgh" + PHRASE + "42$" and record["outcome"] == "interrupted"
    _, record, _ = run("ab</t>9$", prompt="<t>\n")
    assert record["outcome"] == "natural" and record["thinking_tokens"] == 6
    # A prompt that only speaks of the marker opens nothing.
    _, record, _ = run("abcdefghijkl$", prompt="write <t> first")
    assert record["outcome"] == "no_thinking"


def test_a_template_that_closed_the_thinking_in_the_prompt() -> None:
    response, record, engine = run("abcdefghijkl$", prompt="<t>\n\n</t>\n\n")
    assert record["outcome"] == "no_thinking" and all(response.mask) and engine.asked == [(0, 60)]


def test_log_probs_are_left_out_where_none_were_asked_for() -> None:
    chosen = settings()
    script = make_script(chosen)
    engine = ScriptedEngine("<t>abcdefghijkl", "42$", script.phrase_ids)
    client = InterruptingClient(
        engine, script, make_budgets(chosen, script, 60), seed=0, session=0, step=0, stop_ids={EOS}, decode=decode
    )
    output = asyncio.run(client.generate("id", prompt_ids=PROMPT, sampling_params={"logprobs": False}))
    assert output.log_probs is None and len(output.token_ids) == 20


def test_versions_and_preemptions_of_all_requests_are_put_together() -> None:
    chosen = settings()
    script = make_script(chosen)
    engine = ScriptedEngine("<t>abcdefghijkl", "42$", script.phrase_ids)
    client = InterruptingClient(
        engine, script, make_budgets(chosen, script, 60), seed=0, session=0, step=0, stop_ids={EOS}, decode=decode
    )
    output = asyncio.run(client.generate("id", prompt_ids=PROMPT, sampling_params=PARAMS))
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (1, 2)
    assert output.extra_fields["global_steps"] == 2 and output.num_preempted == 2


def test_an_aborted_request_that_nobody_resumes_ends_the_response_as_it_is() -> None:
    response, record, engine = run("<t>abcdefghijkl", aborts=[5])
    assert decode(response.token_ids) == "<t>ab" and len(engine.asked) == 1
    assert record["outcome"] == "unclosed" and not record["truncated"]


def test_an_engine_that_answers_another_request_is_an_error() -> None:
    script = make_script(settings())
    response = InterruptedResponse(script, make_budgets(settings(), script, 60), 8, thinks=True)
    for ids, log_probs in ([1] * 9, None), ([1] * 5, None), ([1] * 8, [0.0] * 7):
        with pytest.raises(ValueError):
            response.add(ids, log_probs, stopped=False)
    assert response.token_ids == []


@given(
    low=st.integers(1, 30),
    spread=st.integers(0, 20),
    answer=st.integers(0, 10),
    thinking=st.text(alphabet="<t/>abS", min_size=1, max_size=80),
    thinks=st.sampled_from([True, False, None]),
    cuts=st.lists(st.booleans(), max_size=4),
)
@example(low=1, spread=6, answer=0, thinking="<<<t>", thinks=None, cuts=[])
def test_no_response_is_longer_than_allowed_and_every_token_is_accounted_for(
    low: int, spread: int, answer: int, thinking: str, thinks: bool | None, cuts: list[bool]
) -> None:
    chosen = settings(answer_tokens=answer)
    script = make_script(chosen)
    total = low + spread + answer + len(script.phrase_ids) + script.grace_tokens
    budgets = Budgets(low, low + spread, answer, script.grace_tokens, total)
    budget = budgets.draw(0, PROMPT, 0)
    response = InterruptedResponse(script, budgets, budget, thinks)
    stream = encode_chars(thinking * 200)
    while (limit := response.next_limit()) is not None:
        position = len(response.token_ids)
        stop = bool(cuts) and cuts.pop()
        take = max(1, limit // 2) if stop else limit
        response.add(stream[position : position + take], None, stopped=stop)
    record = response.record()
    assert len(response.token_ids) <= total
    assert record.thinking_tokens + record.answer_tokens + record.injected_tokens == len(response.token_ids)
    assert sum(response.mask) == record.thinking_tokens + record.answer_tokens
    if record.outcome == "interrupted":
        # One that opens its thinking late is looked at once more where phrase and answer just fit: at the high end.
        in_time = thinks or script.has_opened(response.token_ids[:budget])
        most = (budget if in_time else budgets.high) + script.grace_tokens
        assert budget <= record.thinking_tokens <= most and record.answer_tokens <= answer
