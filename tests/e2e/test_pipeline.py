# SPDX-License-Identifier: Apache-2.0
"""PipelineRL-k on the real stack: one trainer rank, one vLLM replica on the CPU, weights over gloo.

One run, killed with k = 1 and resumed with k = 4. Every fourth prompt of it goes through verl's tool_agent, with a
calculator.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scalerl_verl.ledger.verl import STATE_FILE
from tests.e2e.compute_checks import check_ledger, read_states
from tests.e2e.conftest import RunVerl
from tests.e2e.launching import (
    FIRST_KINDS,
    GROUP_SIZE,
    INTERRUPTED,
    KL_AND_ENTROPY,
    NUM_PROMPTS,
    OVERLONG,
    PROBE,
    VerlRun,
    kill,
    last_step,
)
from tests.e2e.pipeline_data import PiecewiseScorer, Response, read_responses
from tests.e2e.probe.scalerl_test_calculator import with_tools
from tests.e2e.weights import compare_updates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

STEPS, SAVE_EVERY, KILLED, NUM_ROWS = 22, 3, 5, 32
FIRST_K, K = 1, 4
KL_COEF = 0.1
LOOPS = ("single_turn_agent", "calculator_agent")
LONG = (
    "data.max_response_length=160",
    "actor_rollout_ref.rollout.max_model_len=192",
    # fewer slots than requests: some wait in the engine while weights change
    "actor_rollout_ref.rollout.max_num_seqs=24",
)
PRESETS = (
    # the recipe without its curriculum, which drops prompts: these tests count them
    "+scalerl=[setup,cispo,prompt_mean,advantage,fp32_head,pipeline,cpu]",
    "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
)
RECIPE = ("+scalerl=[recipe,pipeline,cpu]", *PRESETS[1:])
PREFIX = "scalerl/pipeline"


def _overrides(folder: Path, k: int) -> list[str]:
    """Most responses are short, and so are the steps that train them: a long one goes through several.

    The model learns little enough for that to stay so.
    """
    return [
        *LONG,
        f"data.train_files={folder}/tools.parquet",
        f"actor_rollout_ref.model.path={folder}/uneven",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/loops.yaml",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={PROBE}/scalerl_test_tools.py",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        "actor_rollout_ref.rollout.multi_turn.format=counting",
        f"trainer.v1.pipeline_rl.max_staleness={k}",
        f"trainer.save_freq={SAVE_EVERY}",
        f"trainer.total_training_steps={STEPS}",
        "reward.custom_reward_function.name=gated_score",
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_assets: Path) -> Path:
    """Of both runs, with a model that knows tools, and the agent loop of each prompt."""
    path = tmp_path_factory.mktemp("pipeline")
    shutil.copytree(tiny_assets / "uneven", path / "uneven")
    tokenizer = AutoTokenizer.from_pretrained(path / "uneven")
    tokenizer.chat_template = with_tools(tokenizer.chat_template)
    tokenizer.save_pretrained(path / "uneven")
    rows = pandas.read_parquet(tiny_assets / "mixed.parquet")
    rows["agent_name"] = [LOOPS[row % 4 == 3] for row in range(len(rows))]
    rows.to_parquet(path / "tools.parquet")
    (path / "loops.yaml").write_text(f"- name: {LOOPS[True]}\n  _target_: scalerl_test_calculator.CalculatorLoop\n")
    return path


@pytest.fixture(scope="module")
def killed(run_verl: RunVerl, folder: Path) -> VerlRun:
    """Every process gets SIGKILL some steps after a checkpoint, whatever it is doing.

    A prompt of the batch after each checkpoint (rows come in order, 8 a step) is held until that is written: something
    is in flight at any of them.
    """

    def end(processes: set[int]) -> None:
        saved = (folder / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
        gate = folder / "weights" / "gate.json"
        if gate.parent.exists():
            held = NUM_PROMPTS * (2 * SAVE_EVERY if saved else SAVE_EVERY) % NUM_ROWS
            gate.with_suffix(".new").write_text(json.dumps([held]))
            gate.with_suffix(".new").rename(gate)
        if last_step(folder) >= KILLED:
            for process in processes:
                kill(process)

    return run_verl("killed", *_overrides(folder, FIRST_K), presets=PRESETS, folder=folder, each_second=end)


@pytest.fixture(scope="module")
def saved(folder: Path, killed: VerlRun) -> int:
    """Step of the last checkpoint that is complete."""
    return int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.fixture(scope="module")
def run(run_verl: RunVerl, folder: Path, killed: VerlRun, saved: int) -> VerlRun:
    """The same folder, resumed and trained to its end, with validations on the way."""
    assert killed.code == -signal.SIGKILL, killed.tail()
    assert KILLED <= last_step(folder) < STEPS
    assert 0 < saved < STEPS
    os.rename(folder / "metrics.jsonl", folder / "metrics-killed.jsonl")
    os.rename(folder / "weights", folder / "weights-killed")
    validation = ["trainer.test_freq=10", "actor_rollout_ref.rollout.val_kwargs.n=2"]
    lines = [*_overrides(folder, K), *validation, "trainer.resume_mode=auto"]
    return run_verl("resumed", *lines, presets=PRESETS, folder=folder)


@pytest.fixture(scope="module")
def responses(run: VerlRun) -> list[Response]:
    """Of the resumed run."""
    assert run.code == 0, run.tail()
    return read_responses(run.folder / "weights")


@pytest.fixture(scope="module")
def before(folder: Path, saved: int) -> list[Response]:
    """Of the killed run, up to its checkpoint: what the resumed one stands on."""
    return [response for response in read_responses(folder / "weights-killed") if response.step <= saved]


def test_killed_run_resumes_from_its_checkpoint_and_ends(run: VerlRun, saved: int) -> None:
    assert run.code == 0, run.tail()
    assert run.leftover_processes == 0
    assert sorted(run.metrics) == list(range(saved + 1, STEPS + 1))
    assert any(name.startswith("val-") for name in run.metrics[10])
    assert re.search(r"generated again \([1-9]\d* were unfinished\)", run.log), (
        "nothing was in flight at the checkpoint: this run tests nothing"
    )


def test_every_version_reaches_the_engine_unchanged(run: VerlRun, saved: int) -> None:
    assert compare_updates(run.folder / "weights") == STEPS - saved + 1
    sent = [torch.load(run.folder / "weights" / f"sent-{n}.pt") for n in (0, STEPS - saved)]
    assert any(not torch.equal(sent[0][name], sent[1][name]) for name in sent[0]), "training changed nothing"


@pytest.mark.fault("a staleness bound of 0 or 1 that is off by one")
def test_no_trained_token_is_older_than_k_versions(run: VerlRun, responses: list[Response], folder: Path) -> None:
    """Before the kill, with its k, and over the resumption with a greater one."""
    for of_run, k in ((read_responses(folder / "weights-killed"), FIRST_K), (responses, K)):
        ages = Counter(response.step - 1 - version for response in of_run for version, _ in response.runs)
        assert 0 <= min(ages) and max(ages) <= k
        assert max(ages) >= 1, "nothing was off-policy: the bound was not tested"


@pytest.mark.fault("a request that spans versions carries one version")
def test_responses_straddle_versions_and_every_token_has_one(responses: list[Response]) -> None:
    """Fault: a request that spans versions carries one version label."""
    for response in responses:
        assert sum(count for _, count in response.runs) == sum(response.mask)
        assert len(response.tokens) == len(response.mask) == len(response.log_probs)
        versions = [version for version, _ in response.runs]
        assert versions == sorted(set(versions))
    spans = Counter(len(response.runs) for response in responses)
    assert max(spans) >= 3, f"no response went through several updates: {spans}"


@pytest.mark.fault("a request that spans versions carries one version")
def test_log_probs_are_those_of_the_weights_that_sampled_each_token(
    run: VerlRun, responses: list[Response], tiny_assets: Path, saved: int
) -> None:
    """Recomputed piecewise under the recorded weights; under the version before they are others."""
    scorer = PiecewiseScorer(tiny_assets / "model", run.folder / "weights", first=saved)
    whole = [response for response in responses if all(response.mask)]
    chosen = sorted(whole, key=lambda response: len(response.runs))[-24:]
    errors, wrong = [], []
    for response in chosen:
        recorded = torch.tensor(response.log_probs)
        errors.append(float((scorer.score(response) - recorded).abs().max()))
        wrong.append(float((scorer.score(response, version_shift=-1) - recorded).abs().max()))
    # FP32 on both sides, other kernels: rounding of up to 160 steps of attention.
    assert max(errors) < 2e-4, errors
    assert min(wrong) > 10 * max(errors), "the weights of two versions are too alike for this test to tell them apart"


@pytest.mark.works_with("tools", "CISPO", "prompt average", "advantages", "FP32 head", "PipelineRL-k")
@pytest.mark.fault("a request that spans versions carries one version")
def test_tools_are_called_between_requests_and_train(responses: list[Response], tiny_assets: Path) -> None:
    """verl's tool_agent: what the calculator returns stands between two requests, and is of no version."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_assets / "model")
    called = [response for response in responses if not all(response.mask)]
    of_tools = {response.content for response in called}
    assert 32 <= len(called) and len(of_tools) == NUM_ROWS // 4, "not every prompt with a tool called it"
    for response in called:
        start = response.mask.index(0)
        end = start + response.mask[start:].index(1) if 1 in response.mask[start:] else len(response.mask)
        said = tokenizer.decode(response.tokens[:start], skip_special_tokens=True)
        wanted = len(said) + sum(letter.isdigit() for letter in said)
        assert f"={wanted}" in tokenizer.decode(response.tokens[start:end])
        assert all(response.mask[end:]), "a second tool call"
    assert {len(response.runs) for response in called} >= {1, 2}, "no response with a tool went through an update"
    assert max(response.step - 1 - response.runs[0][0] for response in called) >= 1


def test_updates_keep_requests_and_lose_nothing(run: VerlRun, responses: list[Response]) -> None:
    assert sum(metrics[f"{PREFIX}/kept_requests"] for metrics in run.metrics.values()) > len(run.metrics)
    for metrics in run.metrics.values():
        assert metrics[f"{PREFIX}/tokens_lost"] == 0 and metrics[f"{PREFIX}/recomputed_tokens"] == 0
        assert 0 < metrics[f"{PREFIX}/swap_s"] < metrics[f"{PREFIX}/pause_s"]
        assert metrics[f"{PREFIX}/transfer_s"] > 0
    assert all(response.reissues == 0 for response in responses)


def test_metrics_tell_what_the_data_say(run: VerlRun, responses: list[Response]) -> None:
    for step, metrics in run.metrics.items():
        ages: Counter[int] = Counter()
        for response in responses:
            if response.step == step:
                for version, count in response.runs:
                    ages[step - 1 - version] += count
        assert metrics[f"{PREFIX}/staleness_max"] == max(ages)
        assert [metrics[f"{PREFIX}/staleness_tokens/{age}_sum"] for age in range(K + 1)] == [
            ages[age] for age in range(K + 1)
        ]
        assert 0 <= metrics[f"{PREFIX}/generator_idle_fraction"] <= 1
        assert 0 <= metrics[f"{PREFIX}/trainer_idle_fraction"] <= 1


def test_log_ratios_are_split_by_age(run: VerlRun, responses: list[Response], folder: Path) -> None:
    """FP32 on both sides: what was sampled by the weights that train differs by rounding, older tokens by training."""
    prefix, oldest, known = "scalerl/mismatch", 0, False
    # The first batch of all was sampled under the weights that it trained.
    first = json.loads((folder / "metrics-killed.jsonl").read_text(encoding="utf-8").split("\n")[0])["data"]
    assert first[f"{prefix}/explained_by_age_frac"] == 0
    assert 0 < first[f"{prefix}/engines/log_ratio_abs_mean"] == first[f"{prefix}/age_0/log_ratio_abs_mean"] < 1e-4
    for step, metrics in run.metrics.items():
        rows = [response for response in responses if response.step == step]
        ages = {step - 1 - version for response in rows for version, _ in response.runs}
        assert {age for age in range(K + 1) if f"{prefix}/age_{age}/log_ratio_abs_mean" in metrics} == ages
        has_fresh = any({version for version, _ in response.runs} == {step - 1} for response in rows)
        assert (f"{prefix}/engines/log_ratio_abs_mean" in metrics) == has_fresh
        if has_fresh:
            assert metrics[f"{prefix}/engines/log_ratio_abs_mean"] < 1e-4
        known = known or has_fresh
        assert (f"{prefix}/explained_by_age_frac" in metrics) == known
        assert metrics[f"{prefix}/ess_alarm_max"] == 0
        oldest = max(oldest, *ages)
    last = [metrics for metrics in run.metrics.values() if f"{prefix}/age_{oldest}/log_ratio_abs_mean" in metrics]
    assert oldest >= 1 and all(metrics[f"{prefix}/age_{oldest}/log_ratio_abs_mean"] > 1e-4 for metrics in last)


@pytest.mark.fault("resuming from a checkpoint skips or repeats prompts")
def test_no_prompt_is_lost_or_doubled_by_resuming_and_nothing_is_thrown_away(
    before: list[Response], responses: list[Response], saved: int
) -> None:
    """Fault: resume from a checkpoint, and prompts are skipped or repeated, long ones most."""
    assert {response.step for response in before} == set(range(1, saved + 1))
    assert {response.step for response in responses} == set(range(saved + 1, STEPS + 1))
    groups = Counter(response.group for response in [*before, *responses])
    assert len(groups) == STEPS * NUM_PROMPTS and set(groups.values()) == {GROUP_SIZE}
    # 176 prompts of a file of 32, in its order: five passes and half of a sixth.
    contents = Counter({response.group: response.content for response in [*before, *responses]}.values())
    assert Counter(contents.values()) == {6: 16, 5: 16}


def test_compute_of_a_killed_run_is_neither_lost_nor_counted_twice(
    killed: VerlRun, run: VerlRun, before: list[Response], responses: list[Response], saved: int
) -> None:
    check_ledger(run, num_gpus=2, wall_s=killed.seconds + run.seconds)
    state = json.loads((run.folder / "checkpoints" / f"global_step_{saved}" / STATE_FILE).read_text())
    first, last = run.metrics[saved + 1], run.metrics[STEPS]
    own = first["scalerl/data/generated_tokens_sum"]
    assert first["scalerl/compute/generated_tokens"] == state["totals"]["generated_tokens"] + own
    assert 3600 * first["scalerl/compute/gpu_hours"] > state["totals"]["gpu_seconds"] > 0
    sampled = sum(sum(response.mask) for response in [*before, *responses])
    assert last["scalerl/compute/generated_tokens"] == sampled
    states = read_states(run)
    attempt, rest = states[: saved - STEPS], states[saved - STEPS :]
    assert [s["totals"]["steps"] for s in rest] == list(range(saved + 1, STEPS + 1))
    assert [s["totals"]["steps"] for s in attempt] == list(range(1, len(attempt) + 1))
    # What the killed attempt had done after its checkpoint is spent, on weights that are gone.
    wasted = attempt[-1]["totals"]["generated_tokens"] - state["totals"]["generated_tokens"]
    assert last["scalerl/compute/wasted_tokens"] == max(0, wasted)


@pytest.fixture(scope="module")
def short(run_verl: RunVerl, tiny_assets: Path) -> VerlRun:
    """Two steps of the recipe with what many runs have besides: dynamic sampling, adapters that are trained alone, a KL
    loss, entropy, overlong shaping, and forced interruption.

    The first 16 prompts, ten of them without a signal, start under version 0, and with k = 1 none of them may be left
    after the second step.
    """
    run = run_verl(
        "dynamic",
        f"data.train_files={tiny_assets}/kinds.parquet",
        *INTERRUPTED,
        *KL_AND_ENTROPY,
        *OVERLONG,
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora.merge=True",
        "algorithm.filter_groups.enable=True",
        # not by the reward, which overlong shaping makes another one for each length
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=4",
        "trainer.v1.pipeline_rl.max_staleness=1",
        "trainer.total_training_steps=2",
        presets=RECIPE,
    )
    assert run.code == 0, run.tail()
    return run


@pytest.mark.works_with(
    "LoRA",
    "CISPO",
    "prompt average",
    "advantages",
    "curriculum",
    "FP32 head",
    "interruption",
    "PipelineRL-k",
    "fast front end",
)
@pytest.mark.fault("a generator trains with adapters that it never gets")
def test_adapters_reach_the_engine_inside_the_weights(short: VerlRun, tiny_assets: Path) -> None:
    """What a fresh load of the merged model would hold, after each of two updates; it is the model that trains."""
    weights = short.folder / "weights"
    assert compare_updates(weights) == 3
    sent = [torch.load(weights / f"sent-{number}.pt") for number in range(3)]
    for before, after in pairwise(sent):
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed and all(name.endswith("_proj.weight") for name in changed), "of the model, adapters alone train"
    names = dict(AutoModelForCausalLM.from_pretrained(tiny_assets / "model").named_parameters())
    assert set(sent[2]) == set(names)


@pytest.mark.works_with(
    "dynamic sampling",
    "CISPO",
    "prompt average",
    "advantages",
    "curriculum",
    "FP32 head",
    "interruption",
    "PipelineRL-k",
    "fast front end",
)
@pytest.mark.fault("dynamic sampling: groups without a signal train, or what replaces them breaks the bound")
@pytest.mark.fault("dynamic sampling: the curriculum never learns of prompts that always pass")
def test_dynamic_sampling_fills_every_batch_and_the_curriculum_learns_of_the_rest(short: VerlRun) -> None:
    run = short
    responses = read_responses(run.folder / "weights")
    steps = {step: {response.group for response in responses if response.step == step} for step in (1, 2)}
    assert len(steps[1]) == len(steps[2]) == NUM_PROMPTS and not steps[1] & steps[2]
    assert all(0 <= response.step - 1 - version <= 1 for response in responses for version, _ in response.runs)

    def total(name: str) -> float:
        return sum(metrics[f"scalerl/{name}"] for metrics in run.metrics.values())

    num_rejected = NUM_PROMPTS + sum(kind in ("pass", "equal") for kind in FIRST_KINDS)
    assert total("data/prompts_mixed_sum") == 2 * NUM_PROMPTS, "zero_variance=drop finds nothing to drop"
    assert total("data/rows_kept_sum") == 2 * NUM_PROMPTS * GROUP_SIZE
    assert total("pipeline/groups_rejected_sum") == num_rejected
    assert num_rejected * GROUP_SIZE <= total("pipeline/tokens_rejected_sum") <= num_rejected * GROUP_SIZE * 16
    assert total("data/curriculum_visits_sum") == 2 * NUM_PROMPTS + num_rejected
    assert total("data/curriculum_mastered_visits_sum") == FIRST_KINDS.count("pass")


@pytest.mark.works_with(
    "KL loss",
    "CISPO",
    "prompt average",
    "advantages",
    "curriculum",
    "FP32 head",
    "interruption",
    "PipelineRL-k",
    "fast front end",
)
@pytest.mark.works_with(
    "entropy bonus",
    "CISPO",
    "prompt average",
    "advantages",
    "curriculum",
    "FP32 head",
    "interruption",
    "PipelineRL-k",
    "fast front end",
)
def test_kl_loss_and_entropy_go_with_interruption_under_way(short: VerlRun, tiny_assets: Path) -> None:
    """The reference is the model without its adapters, which start at no change; a random model is nearly uniform."""
    first, second = (short.metrics[step] for step in (1, 2))
    assert 0 <= first["actor/kl_loss"] < 1e-9 and first["actor/kl_loss"] < second["actor/kl_loss"] < 1
    uniform = math.log(len(AutoTokenizer.from_pretrained(tiny_assets / "model")))
    assert 0.8 * uniform < first["actor/entropy_loss"] < uniform
    for metrics in (first, second):
        interrupted = metrics["scalerl/length/interrupted_fraction"]
        assert interrupted > 0.5, "about one in ten says by chance that its thinking has ended"
        assert metrics["scalerl/length/injected_tokens_sum"] == interrupted * NUM_PROMPTS * GROUP_SIZE


@pytest.mark.works_with(
    "overlong shaping",
    "CISPO",
    "prompt average",
    "advantages",
    "curriculum",
    "FP32 head",
    "interruption",
    "PipelineRL-k",
    "fast front end",
)
def test_overlong_shaping_lowers_rewards_and_not_what_counts_as_passed(short: VerlRun) -> None:
    """Every response has 12 tokens or more of 16, of which those beyond 8 cost an eighth each."""
    for metrics in short.metrics.values():
        assert -2 <= metrics["critic/score/min"] <= -1 - 4 / 8
        assert 0 <= metrics["critic/score/max"] <= 1 - 4 / 8
        assert metrics["scalerl/data/prompts_mixed_sum"] == NUM_PROMPTS


@pytest.fixture(scope="module")
def with_kl_in_reward(run_verl: RunVerl, tiny_assets: Path) -> VerlRun:
    """What goes with it of ours: everything but our advantages; REINFORCE++ has one for each token."""
    run = run_verl(
        "kl-in-reward",
        f"data.train_files={tiny_assets}/mixed.parquet",
        *INTERRUPTED,
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=True",
        f"algorithm.kl_ctrl.kl_coef={KL_COEF}",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "trainer.v1.pipeline_rl.max_staleness=1",
        "trainer.total_training_steps=3",
        presets=(
            "+scalerl=[cispo,prompt_mean,fp32_head,curriculum,fast_frontend,interruption,pipeline,cpu]",
            *PRESETS[1:],
        ),
    )
    assert run.code == 0, run.tail()
    return run


@pytest.mark.works_with(
    "KL in the reward",
    "CISPO",
    "prompt average",
    "curriculum",
    "FP32 head",
    "interruption",
    "PipelineRL-k",
    "fast front end",
)
def test_kl_in_the_reward_lowers_what_trains_and_not_what_is_judged(with_kl_in_reward: VerlRun) -> None:
    """A reward is lower by the sum of its response's KL, of which verl logs the mean a token. Half of a group passes.

    The KL is that of the weights that sampled: those of the start, which are the reference, may still be in the second
    batch, and cannot be in the third.
    """
    kl_of = {step: metrics["actor/reward_kl_penalty"] for step, metrics in with_kl_in_reward.metrics.items()}
    assert abs(kl_of[1]) < 1e-5 and kl_of[3] > 1e-3
    for step, metrics in with_kl_in_reward.metrics.items():
        assert metrics["critic/score/mean"] == 0
        sampled = metrics["scalerl/data/generated_tokens_sum"] / (NUM_PROMPTS * GROUP_SIZE)
        taken_off = metrics["critic/score/mean"] - metrics["critic/rewards/mean"]
        # Responses have 11 to 16 sampled tokens: the mean of their means is within a third of the mean of all.
        assert taken_off == pytest.approx(KL_COEF * kl_of[step] * sampled, rel=1 / 3, abs=1e-4)
        assert metrics["scalerl/length/interrupted_fraction"] > 0.5
        assert metrics["actor/grad_norm"] > 0 and metrics["scalerl/loss/nonfinite_tokens_sum"] == 0
        assert metrics["scalerl/data/curriculum_visits_sum"] == NUM_PROMPTS
    assert compare_updates(with_kl_in_reward.folder / "weights") == 4
