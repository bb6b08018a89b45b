# SPDX-License-Identifier: Apache-2.0
"""The chain-sum task: exact answers, a split that cannot leak, and strict grading."""

import random
import sys

import pytest

# Places of the held-out sums in 1+1, 1+2, ..., 9+9.
EXPECTED_HELD_OUT = [0, 1, 10, 12, 14, 28, 35, 45, 47, 55, 72]


@pytest.fixture(scope="module")
def task(quickstart):
    return quickstart("task")


def test_answers_and_perfect_solutions_are_exact(task):
    for problem in task.sample_problems(seed=3, num=500, held_out=False, distinct=False):
        # eval knows nothing of our code: the text itself must be the sum.
        assert problem.answer == eval(problem.text)
        assert task.grade(task.write_solution(problem), problem.answer)
    example = task.Problem((7, 5, -3))
    assert example.text == "7+5-3"
    assert task.write_solution(example) == "<think>7+5=12-3=9</think>9"


def test_problems_have_the_promised_shape(task):
    problems = task.sample_problems(seed=4, num=3000, held_out=False, distinct=False)
    assert {len(problem.terms) for problem in problems} == {2, 3, 4, 5}
    for problem in problems:
        totals = [sum(problem.terms[: end + 1]) for end in range(len(problem.terms))]
        assert min(totals) >= 0 and problem.terms[0] > 0 and 0 not in problem.terms
    numbers = [abs(term) for problem in problems for term in problem.terms]
    assert max(numbers) <= 99
    two_digit = sum(number >= 10 for number in numbers) / len(numbers)
    assert 0.035 < two_digit < 0.065
    assert any(term < 0 for problem in problems for term in problem.terms)


def test_splits_are_disjoint_and_about_one_in_eight_is_held_out(task):
    training = {p.text for seed in range(5) for p in task.sample_problems(seed, 2000, held_out=False, distinct=False)}
    held_out = {p.text for seed in range(5) for p in task.sample_problems(seed, 400, held_out=True, distinct=False)}
    assert not training & held_out
    assert not any(task.is_held_out(text) for text in training)
    assert all(task.is_held_out(text) for text in held_out)
    rng = random.Random(0)
    drawn = {task.draw_problem(rng).text for _ in range(8000)}
    assert 0.11 < sum(map(task.is_held_out, drawn)) / len(drawn) < 0.14


def test_split_is_fixed_for_ever(task):
    # A change of the split would silently put old evaluation problems into new training data.
    verdicts = [task.is_held_out(f"{a}+{b}") for a in range(1, 10) for b in range(1, 10)]
    assert [place for place, held in enumerate(verdicts) if held] == EXPECTED_HELD_OUT


def test_sampling_is_deterministic_and_distinct(task):
    first = task.sample_problems(1, 300, held_out=True, distinct=True)
    assert first == task.sample_problems(1, 300, held_out=True, distinct=True)
    assert first != task.sample_problems(2, 300, held_out=True, distinct=True)
    assert len(set(first)) == 300
    assert len(set(task.sample_problems(1, 3000, held_out=True, distinct=False))) < 3000


def test_impossible_samples_are_refused(task, monkeypatch):
    with pytest.raises(ValueError, match="0 or more"):
        task.sample_problems(0, -1, held_out=True, distinct=True)
    monkeypatch.setattr(task, "_draw_number", lambda rng: 1)  # leaves a few dozen problems in all
    with pytest.raises(ValueError, match="distinct"):
        task.sample_problems(0, 100, held_out=False, distinct=True)


def test_flawed_solutions_show_each_flaw_and_only_it(task):
    rng = random.Random(0)
    problems = task.sample_problems(0, 300, held_out=False, distinct=False)
    none = {"wrong_step": 0.0, "skip_work": 0.0, "doubt": 0.0}

    def write(**rates):
        flaws = task.FlawRates(**(none | rates))
        return [task.write_flawed_solution(problem, rng, flaws) for problem in problems]

    assert write() == [task.write_solution(problem) for problem in problems]
    assert not any(task.grade(text, p.answer) for text, p in zip(write(skip_work=1.0), problems))
    assert all(text.startswith("<think></think>") for text in write(skip_work=1.0))
    doubting = write(doubt=1.0)
    assert all("?" in text and task.grade(text, p.answer) for text, p in zip(doubting, problems))
    slipping = write(wrong_step=0.3)
    right = sum(task.grade(text, p.answer) for text, p in zip(slipping, problems)) / len(problems)
    assert 0.3 < right < 0.7
    assert not any("-" in text.split("</think>")[1] for text in slipping)


@pytest.mark.parametrize("rates", [{"wrong_step": 1.5}, {"doubt": -0.1}, {"keep_doubting": 1.0}])
def test_flaw_rates_must_be_probabilities(task, rates):
    with pytest.raises(ValueError, match=next(iter(rates))):
        task.FlawRates(**rates)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>7+5=12-3=9</think>9", True),
        ("<think>7+5=12-3=9</think> 9\n", True),
        ("anything</think>9", True),
        ("<think></think>9", True),
        ("<think>7+5=12-3=9</think>10", False),
        ("<think>7+5=12-3=9</think>90", False),
        ("<think>7+5=12-3=9</think>9.", False),
        ("<think>7+5=12-3=9</think>9 9", False),
        ("<think>7+5=12-3=9</think>09", False),
        ("<think>7+5=12-3=9</think>+9", False),
        ("<think>7+5=12-3=9</think>", False),
        ("<think>7+5=12-3=9", False),
        ("9", False),
        ("", False),
        ("<think>9</think>9</think>9", False),
        ("<think>9</think></think>9", False),
        ("<think>7+5=12</think>9<|user|>", False),
    ],
)
def test_grading(task, response, right):
    assert task.grade(response, 9) is right
    assert task.grade(response, "9") is right


def test_reward_loads_by_path_and_leaves_the_import_path_alone(quickstart):
    before = list(sys.path)
    reward = quickstart("reward")
    assert sys.path == before
    assert "task" not in sys.modules
    right = reward.compute_score("scalerl/chain_sum", "<think>1+1=2</think>2", "2", {"index": 0}, num_turns=2)
    wrong = reward.compute_score("scalerl/chain_sum", "<think>1+1=2</think>3", "2")
    assert right == {"score": 1.0, "acc": 1.0}
    assert wrong == {"score": -1.0, "acc": 0.0}
    with pytest.raises(ValueError, match="openai/gsm8k"):
        reward.compute_score("openai/gsm8k", "2", "2")
