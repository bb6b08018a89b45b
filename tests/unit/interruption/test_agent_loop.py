# SPDX-License-Identifier: Apache-2.0
"""The loop ``forced_interruption`` in verl: its real single-turn loop and clients, the quickstart's tokenizer.

Only the engine is a stub (scripted): one stands behind verl's clients in place of a Ray actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopWorker,
    DictConfigWrap,
    _agent_loop_registry,
)
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout import llm_server
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from recipes.quickstart import model as quickstart_model
from scalerl_verl.errors import PatchError, RewardError, ScaleRLConfigError
from scalerl_verl.interruption import verl as agent_loop
from scalerl_verl.interruption.response import RECORD_KEY
from scalerl_verl.interruption.settings import make_script, read_settings
from scalerl_verl.interruption.verl import ForcedInterruptionLoop, ResponseContext, response_context
from scalerl_verl.pipeline.turns import collecting_calls, note_call, note_versions
from scalerl_verl.upstream.activation import ACTIVE_ENV
from scalerl_verl.verl.agent_worker import AgentWorkerMixin
from tests.unit.interruption.scripted import ScriptedEngine

TOKENIZER = quickstart_model.build_tokenizer()
PHRASE = "Stop.</think>"
MESSAGES = [{"role": "user", "content": "7+5"}]


def encode(text: str) -> list[int]:
    """As the tokenizer does, "$" for the end of the turn."""
    return list(TOKENIZER.encode(text.replace("$", TOKENIZER.eos_token), add_special_tokens=False))


@pytest.fixture(autouse=True)
def checked_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(ACTIVE_ENV, "1")
    yield


def make_config(**interruption: Any) -> DictConfig:
    options = {"thinking_budget": [6, 6], "answer_budget": 3, "phrase": PHRASE, **interruption}
    rollout = {"name": "vllm", "prompt_length": 16, "response_length": 40, "ignore_eos": False}
    rollout["agent"] = {"default_agent_loop": "forced_interruption"}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout},
            "algorithm": {"scalerl": {"interruption": options}},
            "data": {},
        }
    )


class Remote:
    """Stands for a Ray actor's method."""

    def __init__(self, call: Any) -> None:
        self.remote = call


def client_of(cls: type[LLMServerClient], config: DictConfig, engine: ScriptedEngine) -> LLMServerClient:
    """A real client of verl whose server is the scripted engine."""

    class Client(cls):  # type: ignore[valid-type,misc]
        async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
            return "server", SimpleNamespace(generate=Remote(self._ask))

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            pass

        async def _ask(self, **kwargs: Any) -> Any:
            return await engine.generate(**kwargs)

    return Client(config)


def make_engine(thinking: str, answer: str = "12$", aborts: list[int] | None = None, **changes: Any) -> ScriptedEngine:
    script = make_script(TOKENIZER, read_settings({"phrase": PHRASE, **changes}))
    prompt_ids = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    return ScriptedEngine(thinking, answer, script.phrase_ids, encode, list(aborts or []), list(prompt_ids))


def run(
    engine: ScriptedEngine,
    config: DictConfig | None = None,
    cls: type[LLMServerClient] = LLMServerClient,
    context: ResponseContext | None = ResponseContext(validation=False, step=1, stop_ids=frozenset()),
    logprobs: bool = True,
    **params: Any,
) -> Any:
    config = config or make_config()

    async def generate() -> Any:
        loop = ForcedInterruptionLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=client_of(cls, config, engine),
            tokenizer=TOKENIZER,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
        )
        agent_loop._context.set(context)
        return await loop.run({"temperature": 1.0, "logprobs": logprobs, **params}, raw_prompt=MESSAGES, session_id=0)

    return asyncio.run(generate())


def text_of(output: Any) -> str:
    return TOKENIZER.decode(output.response_ids).replace(TOKENIZER.eos_token, "$")


def check_masks(output: Any) -> None:
    """Field fault: tokens forced into a response must not enter the ratio."""
    for position, (mask, log_prob) in enumerate(zip(output.response_mask, output.response_logprobs, strict=True)):
        assert log_prob == (-(position + 1) / 1000 if mask else 0.0)


def test_the_loop_is_registered_in_verl() -> None:
    entry = _agent_loop_registry["forced_interruption"]
    assert entry == {"_target_": "scalerl_verl.interruption.verl.ForcedInterruptionLoop"}


@pytest.mark.fault("tokens forced into the thinking enter the ratio")
@pytest.mark.parametrize("cls", [LLMServerClient, FullyAsyncLLMServerClient])
def test_interrupted_response_in_verl_s_output(cls: type[LLMServerClient]) -> None:
    engine = make_engine("<think>7+5+7+5+7+5")
    output = run(engine, cls=cls)
    assert text_of(output) == "<think>7+5+7" + PHRASE + "12$"
    assert output.response_mask == [1] * 6 + [0] * 6 + [1] * 3
    check_masks(output)
    assert output.prompt_ids == engine.prompt_ids
    record = output.extra_fields[RECORD_KEY]
    assert record["outcome"] == "interrupted" and record["continued_tokens"] == len(engine.prompt_ids) + 12
    assert output.extra_fields["max_global_steps"] == 2 and output.extra_fields["min_global_steps"] == 1
    fields = output.as_dict()
    assert fields["response_mask"].sum() == 9 and fields["rollout_log_probs"].shape == fields["responses"].shape


@pytest.mark.fault("a request that spans versions carries one version")
def test_weight_versions_of_sampled_tokens_are_joined_over_the_requests() -> None:
    """By the pipeline, from what its client noted: the loop knows nothing of versions, and the phrase has none."""
    engine = make_engine("<think>7+5+7+5+7+5")
    original, versions = engine.generate, [[[3, 2], [4, 4]], [[4, 1], [5, 2]]]

    async def noting(request_id: str, **kwargs: Any) -> Any:
        output = await original(request_id, **kwargs)
        output.extra_fields |= {"versions": versions[len(engine.asked) - 1], "reissues": len(engine.asked)}
        output.extra_fields["prefix_version"] = 3
        note_call(kwargs["prompt_ids"], output)
        return output

    engine.generate = noting  # type: ignore[method-assign]
    with collecting_calls():
        output = run(engine)
        note_versions([output])
    assert output.extra_fields["versions"] == [[3, 2], [4, 5], [5, 2]] and output.extra_fields["reissues"] == 3
    assert sum(count for _, count in output.extra_fields["versions"]) == sum(output.response_mask)


def test_natural_close_is_one_request_and_verl_s_own_output() -> None:
    engine = make_engine("<think>7</think>12$")
    output = run(engine)
    assert text_of(output) == "<think>7</think>12$" and set(output.response_mask) == {1}
    assert len(engine.asked) == 1 and output.extra_fields[RECORD_KEY]["outcome"] == "natural"


@pytest.mark.fault("a thinking budget that is counted from zero after a weight update")
@pytest.mark.parametrize("aborted_after", [0, 1, 3, 5])
def test_one_budget_for_a_response_that_weight_updates_interrupt(
    aborted_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field fault: a thinking budget counted from zero when a request is resumed after a weight update."""
    skip_the_wait(monkeypatch)
    undisturbed = run(make_engine("<think>7+5+7+5+7+5"), cls=FullyAsyncLLMServerClient)
    engine = make_engine("<think>7+5+7+5+7+5", aborts=[aborted_after, 0, 99, 1, 0])
    output = run(engine, cls=FullyAsyncLLMServerClient)
    assert output.response_ids == undisturbed.response_ids and output.response_mask == undisturbed.response_mask
    check_masks(output)
    # What is left of the budget is asked for, in the thinking and in the middle of the answer.
    assert engine.asked[:3] == [(0, 6), (aborted_after, 6 - aborted_after), (aborted_after, 6 - aborted_after)]
    assert engine.asked[3:] == [(12, 3), (13, 2), (13, 2)]
    assert output.extra_fields["max_global_steps"] == len(engine.asked)


@pytest.mark.fault("abort and resume yield more tokens than the response length")
def test_aborts_never_add_up_to_more_than_the_response_length(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_the_wait(monkeypatch)
    engine = make_engine("<think>7</think>" + "1" * 99, aborts=[5, 1, 1, 8, 0, 9, 4])
    output = run(engine, cls=FullyAsyncLLMServerClient)
    assert len(output.response_ids) == 40 and output.extra_fields[RECORD_KEY]["truncated"]
    check_masks(output)


def skip_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's client waits a second before it resumes."""

    async def sleep(_: float) -> None:
        return None

    monkeypatch.setattr(llm_server, "asyncio", SimpleNamespace(sleep=sleep, gather=asyncio.gather))


def test_validation_has_budgets_of_its_own() -> None:
    config = make_config(val_thinking_budget=[9, 9], val_answer_budget=2)
    context = ResponseContext(validation=True, step=0, stop_ids=frozenset())
    output = run(make_engine("<think>7+5+7+5+7+5+7", "12345$"), config, context=context)
    assert text_of(output) == "<think>7+5+7+5+" + PHRASE + "12" and output.extra_fields[RECORD_KEY]["truncated"]


def test_end_tokens_of_the_generation_config_end_a_response_at_the_budget() -> None:
    """verl reports the same reason for an end of turn and for the limit."""
    other_end = encode("~")[0]
    engine = make_engine("<think>7+5+~")  # as many tokens as the budget: seven with the end, so ask for seven
    config = make_config(thinking_budget=[6, 6])
    context = ResponseContext(validation=False, step=1, stop_ids=frozenset({other_end}))
    assert text_of(run(engine, config, context=context)) == "<think>7+5+~"
    engine = make_engine("<think>7+5+~")
    assert PHRASE in text_of(run(engine, config))


def test_the_worker_tells_validation_and_end_tokens() -> None:
    """Our `_run_agent_loop` in front of a stand-in for that of verl's worker."""
    seen = []

    class Worker:
        def __init__(self, ends: Any) -> None:
            self.config = None
            self.model_config = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))

        async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, *, agent_name: str, **_: Any) -> str:
            seen.append(agent_loop._context.get())
            return agent_name

    class Ours(AgentWorkerMixin, Worker):
        pass

    for ends, expected in (None, set()), (7, {7}), ([7, 8], {7, 8}):
        for validate in (True, False):
            run = Ours(ends)._run_agent_loop({}, trajectory={"validate": validate, "step": 7}, agent_name="x")
            assert asyncio.run(run) == "x"
            step = 0 if validate else 7
            assert seen[-1] == ResponseContext(validation=validate, step=step, stop_ids=frozenset(expected))
    assert agent_loop._context.get() is None


def score(reward: Any, *, mode: str | None = "pipeline_rl", validate: bool = False, is_scored: bool = True) -> None:
    """Our `_compute_score` in front of a stand-in that assigns ``reward`` to the last output."""
    trainer = {} if mode is None else {"v1": {"trainer_mode": mode}}

    class Worker:
        config = OmegaConf.create({"trainer": trainer})
        model_config = SimpleNamespace(generation_config=None)
        reward_loop_worker_handles = ["a worker"] if is_scored else None

        async def _compute_score(self, outputs: list[Any], kwargs: Any) -> None:
            outputs[-1].reward_score = reward

    class Ours(AgentWorkerMixin, Worker):
        pass

    worker = Ours()
    OmegaConf.set_struct(worker.config, True)  # as Hydra composes it
    outputs = [
        SimpleNamespace(
            reward_score=value,
            extra_fields={"reward_extra_info": {}},
            prompt_ids=[],
            response_ids=[],
            response_mask=[],
        )
        for value in (float("nan"), None)
    ]
    with response_context(worker, {"validate": validate, "step": 1}):
        asyncio.run(worker._compute_score(outputs, {}))


NO_NUMBERS = [float("nan"), float("-inf"), np.float32("nan"), None, "1.0", [1.0], {"score": 1.0}, 10**400]


@pytest.mark.parametrize("reward", NO_NUMBERS, ids=lambda reward: repr(reward)[:20])
def test_reward_that_is_no_finite_number_is_an_error_of_its_response(reward: Any) -> None:
    with pytest.raises(RewardError, match=r"the reward of a response is .*must return finite numbers"):
        score(reward)


@pytest.mark.parametrize("reward", [0.5, 1, True, np.float64(1), torch.tensor(1.0)], ids=repr)
def test_reward_that_is_a_number_passes(reward: Any) -> None:
    score(reward)


def test_rewards_outside_of_the_training_of_a_pipeline_run_are_left_alone() -> None:
    """Also where a reward is still to come, and under a trainer whose config has no modes."""
    score(float("nan"), validate=True)
    score(None, is_scored=False)
    for mode in ("sync", None):
        score(float("nan"), mode=mode)


def test_responses_in_flight_at_once_do_not_share_their_context() -> None:
    worker = SimpleNamespace(model_config=SimpleNamespace(generation_config=None))

    async def one(validate: bool) -> bool:
        with response_context(worker, {"validate": validate, "step": 1}):
            await asyncio.sleep(0)
            context = agent_loop._context.get()
            assert context is not None
            return context.validation is validate

    async def both() -> list[bool]:
        return await asyncio.gather(*(asyncio.create_task(one(index % 2 == 0)) for index in range(10)))

    assert all(asyncio.run(both()))


def test_responses_of_a_group_draw_their_own_budgets_and_the_same_when_reissued() -> None:
    drawn = []
    config = make_config(thinking_budget=[2, 12])
    for step in (1, 1, 9):
        lengths = []
        for session in range(12):
            engine = make_engine("<think>" + "7+5+" * 9)
            loop_output = run_session(engine, config, session, step)
            lengths.append(loop_output.extra_fields[RECORD_KEY]["thinking_budget"])
        drawn.append(lengths)
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 4
    assert drawn[2] != drawn[0], "the next visit of the prompt draws anew"


def run_session(engine: ScriptedEngine, config: DictConfig, session: int, step: int) -> Any:
    async def generate() -> Any:
        loop = ForcedInterruptionLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=client_of(LLMServerClient, config, engine),
            tokenizer=TOKENIZER,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            hf_model_type="qwen3",
        )
        agent_loop._context.set(ResponseContext(validation=False, step=step, stop_ids=frozenset()))
        return await loop.run({"logprobs": True}, raw_prompt=MESSAGES, session_id=session, uid="changes with a restart")

    return asyncio.run(generate())


def test_outside_a_checked_run_and_outside_verl_s_worker_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PatchError, match="AgentLoopWorker"):
        run(make_engine("<think>7"), context=None)
    monkeypatch.delenv(ACTIVE_ENV)
    with pytest.raises(PatchError, match="has not checked"):
        run(make_engine("<think>7"))


def test_loop_ends_a_response_where_the_engine_s_context_ends() -> None:
    """Room for prompt, thinking (6 tokens) and phrase (6), and for none of the answer's."""
    engine = make_engine("<think>7+5+7+5+7+5")
    room = len(engine.prompt_ids) + 12
    output = run(engine, context=ResponseContext(False, 1, frozenset(), max_model_len=room))
    assert text_of(output) == "<think>7+5+7" + PHRASE
    record = output.extra_fields[RECORD_KEY]
    assert (record["outcome"], record["truncated"], record["clamped"]) == ("interrupted", True, True)


def test_missing_log_probs_are_an_error_and_not_zeros() -> None:
    engine = make_engine("<think>7+5")
    original = engine.generate

    async def forgetful(request_id: str, **kwargs: Any) -> Any:
        output = await original(request_id, **kwargs)
        output.log_probs = None
        return output

    engine.generate = forgetful  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="log-probs"):
        run(engine)


def test_unknown_keys_of_the_section_stop_the_loop() -> None:
    with pytest.raises(ScaleRLConfigError, match="budgets does not exist"):
        run(make_engine("<think>7"), make_config(budgets=[1, 2]))


def test_the_method_behind_ours_takes_what_we_pass() -> None:
    import inspect

    names = list(inspect.signature(inspect.unwrap(AgentLoopWorker._run_agent_loop)).parameters)
    assert names[:3] == ["self", "sampling_params", "trajectory"]


def test_a_prompt_that_names_the_loop_of_a_run_with_another_default_is_refused() -> None:
    config = make_config()
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "single_turn_agent"
    with pytest.raises(ScaleRLConfigError, match="but the default is another loop"):
        run(make_engine("<think>7$"), config)
