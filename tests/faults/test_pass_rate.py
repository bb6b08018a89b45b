# SPDX-License-Identifier: Apache-2.0
"""What counts as passed is one definition a run: no row changes it for another one, and a bonus is no pass."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.metric_utils import process_validation_metrics

from scalerl_verl.advantage import passing
from scalerl_verl.advantage.passed import PassRule
from scalerl_verl.advantage.step import AdvantageStep
from scalerl_verl.config.checks import find_problems
from scalerl_verl.curriculum import NoPositiveResampling, ResamplingRules
from scalerl_verl.curriculum import verl as curriculum
from scalerl_verl.errors import RewardError
from scalerl_verl.ledger.verl import RunLedger, end_validation, note_samples
from tests.unit.composed import changed

ROWS: list[tuple[float, dict[str, Any], bool]] = [
    # reward, what the reward function returned, passed
    (1.0, {"acc": True}, True),
    (1.0, {"acc": np.bool_(False)}, False),  # the reward holds a bonus that acc does not
    (-1.0, {"acc": np.bool_(True)}, True),
    (1.0, {"acc": np.float32(0.0)}, False),
    (1.0, {"acc": torch.tensor(1)}, True),
    (1.0, {"acc": None}, True),  # verl's filling: the row has no acc
    (-0.2, {"acc": None, "score": 1.0}, True),  # the score before a penalty for its length
    (0.1, {"acc": 0.1}, False),  # verl's acc of a reward function that returns a number: a bonus for the format
    (0.2, {}, False),
    (0.9, {}, True),
    (-1.0, {"acc": -1.0}, False),
    (1.0, {"acc": 1}, True),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    """Ledgers write into a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


def config_of(**section: Any) -> Any:
    return OmegaConf.create({"algorithm": {"scalerl": section}, "trainer": {"default_local_dir": "unused"}})


def verl_lists(rows: list[tuple[float, dict[str, Any], bool]]) -> dict[str, list[Any]]:
    """As verl's validation collects them: a list a key, gaps filled with None."""
    keys = {key for _, info, _ in rows for key in info}
    return {"reward": [row[0] for row in rows], **{key: [info.get(key) for _, info, _ in rows] for key in keys}}


@pytest.mark.parametrize("only", range(len(ROWS)))
def test_a_row_is_judged_by_itself(only: int) -> None:
    """Whatever stands in other rows: a gap, another type."""
    wanted = [passed for _, _, passed in ROWS]
    judged = PassRule().judge([row[0] for row in ROWS], [row[1] for row in ROWS])
    assert judged.tolist() == wanted
    assert PassRule().judge([ROWS[only][0]], [ROWS[only][1]]).tolist() == [wanted[only]]


def test_validation_and_training_judge_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = RunLedger(config_of(), num_gpus=1)
    prompts = [str(row) for row in range(len(ROWS))]
    note_samples(ledger, ["task"] * len(ROWS), prompts, verl_lists(ROWS))
    assert ledger.samples is not None and ledger.samples[2] == [float(passed) for *_, passed in ROWS]
    step = AdvantageStep("token-mean", {}, config=config_of())
    step.batch = OmegaConf.create({"tags": [{} for _ in ROWS] + [{"is_padding": True}]})
    padding = {"reward_extra_info": {"acc": "whatever"}}
    step._extra_fields = [{"reward_extra_info": info} for _, info, _ in ROWS] + [padding]
    rewards = np.array([row[0] for row in ROWS] + [1.0])
    assert step.judge_rows(rewards).tolist() == [passed for *_, passed in ROWS] + [False]


def test_curriculum_judges_like_the_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wrong responses with a bonus, two right ones with a penalty: by their rewards it would be the other way."""
    step = AdvantageStep("token-mean", {}, config=config_of())
    step.batch = KVBatchMeta(
        keys=[f"u_{row}_0" for row in range(4)], tags=[{"global_steps": 1}] * 4, partition_id="train"
    )
    step._extra_fields = [{"reward_extra_info": {"acc": acc}} for acc in (0, 0, 1, 1)]
    step.rewards_B, step.trains_B = np.array([0.9, 0.8, -0.1, -0.1]), np.ones(4, dtype=bool)
    monkeypatch.setattr(curriculum, "read_column", lambda *_: ["wrong", "wrong", "right", "right"])
    sampler = NoPositiveResampling(range(2), ["wrong", "right"], ResamplingRules())
    curriculum.record_visits(sampler, step.batch, step)
    visits = {name: sampler.history.get(name) for name in ("wrong", "right")}
    assert {name: visit.passed for name, visit in visits.items() if visit is not None} == {"wrong": 0, "right": 2}


def test_one_gap_leaves_the_pass_rate_as_it_was() -> None:
    """Rewards with a bonus, acc without it: 2 of 4 passed, also where one more row has no acc."""
    rows = [
        (1.5, {"acc": 1.0}, True),
        (0.5, {"acc": 0.0}, False),
        (0.5, {"acc": 0.0}, False),
        (1.5, {"acc": 1.0}, True),
    ]
    for more, expected in (([], 2 / 4), ([(-1.0, {}, False)], 2 / 5)):
        ledger = RunLedger(config_of(), num_gpus=1)
        given = [*rows, *more]
        note_samples(ledger, ["task"] * len(given), [str(i) for i in range(len(given))], verl_lists(given))
        assert end_validation(ledger, 10)["scalerl/validation/pass_rate"] == expected


def test_generations_that_failed_did_not_pass() -> None:
    """As verl counts them: 2 of 2, 1 of 2 and 0 of 2 passed, where one generation of b and both of c failed."""
    extra = {"reward": [1.0] * 3, "acc": [1.0] * 3}
    sources, uids = ["easy", "easy", "hard"], ["a", "a", "b"]
    expected = {("easy", "a"): 2, ("hard", "b"): 2, ("hard", "c"): 2}
    verl_says = process_validation_metrics(sources, uids, extra, expected_acc_counts=expected)
    ledger = RunLedger(config_of(), num_gpus=1)
    note_samples(ledger, sources, uids, extra, expected)
    metrics = end_validation(ledger, 10)
    assert metrics["scalerl/validation/hard/pass_rate"] == verl_says["hard"]["acc"]["mean@2"] == 0.25
    assert metrics["scalerl/validation/easy/pass_rate"] == verl_says["easy"]["acc"]["mean@2"] == 1.0
    assert metrics["scalerl/validation/pass_rate"] == 0.5
    assert [metrics[f"scalerl/validation/num_{name}"] for name in ("prompts", "generations", "failed")] == [3, 6, 3]
    note_samples(ledger, [], [], {"reward": []}, expected)
    assert end_validation(ledger, 10)["scalerl/validation/pass_rate"] == 0.0


def test_key_that_verl_takes_for_its_own_is_refused_by_name() -> None:
    """verl appends a result's "reward" to its list of rewards, batch by batch: nobody can tell them apart."""
    extra = {"reward": [1.0, -1.0, 0.5, 0.5], "score": [1.0, -1.0]}
    with pytest.raises(RewardError, match=r"returns a key 'reward'.*return it under another name"):
        note_samples(RunLedger(config_of(), num_gpus=1), ["task"] * 2, ["a", "b"], extra)


@pytest.mark.parametrize("value", ["yes", "1", float("nan"), float("inf"), [1.0, 0.0], 1j, 10**400], ids=repr)
def test_what_neither_passes_nor_fails_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RewardError, match=r"the acc of a response is .*neither passes nor fails.*pass_key"):
        passing.judge(config_of(), [1.0], [{"acc": value}])
    if not isinstance(value, (str, list)):
        return
    assert passing.judge(config_of(pass_key="reward"), [1.0], [{"acc": value}]).tolist() == [True]


def test_reward_that_is_no_number_is_refused_where_it_decides() -> None:
    with pytest.raises(RewardError, match="the reward of a response is nan"):
        passing.judge(config_of(), [float("nan")], [{}])
    assert passing.judge(config_of(), [float("nan")], [{"acc": 1}]).tolist() == [True]


def test_own_key_and_threshold_decide() -> None:
    infos = [{"acc": 1, "tests": 0.6}, {"acc": 0, "tests": 1.0}]
    assert passing.judge(config_of(pass_key="tests", pass_threshold=0.99), [1, 1], infos).tolist() == [False, True]
    with pytest.raises(RewardError, match=r"no 'test', by which .*returned acc, tests"):
        passing.judge(config_of(pass_key="test"), [1, 1], infos)


def test_partial_grades_are_pointed_out_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "_said", set())
    with caplog.at_level(logging.WARNING):
        for grade in (0.3, 0.7):
            passing.judge(config_of(), [grade], [{}])
        assert len(caplog.records) == 1 and "pass_threshold" in caplog.text
        caplog.clear()
        monkeypatch.setattr(passing, "_said", set())
        passing.judge(config_of(pass_threshold=0.5), [0.3], [{}])
        passing.judge(config_of(), [1.0, -1.0, 0.0], [{}] * 3)
        assert not caplog.records


def test_definition_is_checked_at_start() -> None:
    assert not find_problems(changed("recipe", {"algorithm.scalerl.pass_key": "correct"}))
    given = {"algorithm.scalerl.pass_key": 3, "algorithm.scalerl.pass_threshold": "high"}
    problems = "\n".join(find_problems(changed("recipe", given)))
    assert "algorithm.scalerl.pass_key=3" in problems and "algorithm.scalerl.pass_threshold='high'" in problems


def test_outcomes_of_prompts_are_those_of_the_task(tmp_path: Path) -> None:
    """All responses of a got the bonus for the format and are wrong; those of b are right and equally penalised."""
    from scalerl_verl.advantage import Sessions, session_advantages

    rewards, groups = np.array([0.1, 0.1, -0.3, -0.3, 1.0, -1.0]), list("aabbcc")
    step = AdvantageStep("token-mean", {}, config=config_of(), sessions=Sessions.one_per_row(6), rewards_B=rewards)
    step.batch = OmegaConf.create({"tags": [{}] * 6})
    acc = [0, 0, 1, 1, 1, 0]
    step._extra_fields = [{"reward_extra_info": {"acc": value}} for value in acc]
    step.note_result(session_advantages(rewards, groups, np.ones(6, dtype=bool), step.sessions), keeps=False)
    step.count_outcomes()
    names = ("mixed", "all_right", "all_wrong")
    assert [step.metrics[f"scalerl/data/prompts_{name}_sum"] for name in names] == [1, 1, 1]
