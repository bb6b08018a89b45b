# SPDX-License-Identifier: Apache-2.0
"""Chain sums: the reasoning task of the quickstart (standard library only).

A problem is a sum such as `7+5-3`. A solution thinks aloud, one running total a term, and then answers:
`<think>7+5=12-3=9</think>9`. Problems are split into training and held-out ones by a hash of their text, so no sampling
seed can ever move an evaluation problem into training.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

THINK_START = "<think>"
THINK_END = "</think>"

MIN_TERMS, MAX_TERMS = 2, 5
TWO_DIGIT_RATE = 0.05
SUBTRACTION_RATE = 0.4
HELD_OUT_BUCKETS = 8  # one bucket out of this many is held out


@dataclass(frozen=True)
class Problem:
    """A chain of signed terms, the first of which is positive; every running total is at least 0."""

    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        """The problem as the model reads it, for example `7+5-3`."""
        return str(self.terms[0]) + "".join(f"{term:+d}" for term in self.terms[1:])

    @property
    def answer(self) -> int:
        """The exact total."""
        return sum(self.terms)


@dataclass(frozen=True)
class FlawRates:
    """How often a flawed demonstration goes wrong; every rate is a probability in [0, 1].

    wrong_step: a running total is off by one or by a carry (and the following steps build on it).
    skip_work: nothing is written out and the answer is a wrong guess.
    doubt: one step is doubted and written again; keep_doubting is the chance of one more repetition each time.
    """

    wrong_step: float = 0.15
    skip_work: float = 0.12
    doubt: float = 0.3
    keep_doubting: float = 0.88

    def __post_init__(self) -> None:
        for name in ("wrong_step", "skip_work", "doubt", "keep_doubting"):
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise ValueError(f"FlawRates.{name}={rate} is not a probability; give a number from 0 to 1.")
        if self.keep_doubting == 1:
            raise ValueError("FlawRates.keep_doubting=1 would never stop; give a number below 1.")


def is_held_out(problem_text: str) -> bool:
    """Whether a problem belongs to the held-out split (about one in eight), decided by the SHA-256 of its text."""
    digest = hashlib.sha256(problem_text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_BUCKETS == 0


def draw_problem(rng: random.Random) -> Problem:
    """Draw one problem of either split."""
    total = _draw_number(rng)
    terms = [total]
    for _ in range(rng.randint(MIN_TERMS, MAX_TERMS) - 1):
        number = _draw_number(rng)
        # A negative total would need a sign in the answer; keep every total at 0 or above instead.
        term = -number if number <= total and rng.random() < SUBTRACTION_RATE else number
        total += term
        terms.append(term)
    return Problem(tuple(terms))


def stream_problems(seed: int, held_out: bool) -> Iterator[Problem]:
    """Yield problems of one split without end; the same seed yields the same problems."""
    rng = random.Random(f"chain-sum/{'held-out' if held_out else 'training'}/{seed}")
    while True:
        problem = draw_problem(rng)
        if is_held_out(problem.text) == held_out:
            yield problem


def sample_problems(seed: int, num: int, held_out: bool, distinct: bool) -> list[Problem]:
    """Return `num` problems of one split.

    Args:
        seed: the same seed returns the same problems; each split has its own stream.
        num: how many.
        held_out: True for the evaluation split, False for the training split.
        distinct: leave out repetitions. Short problems are few, so a distinct sample holds fewer of them.

    Raises:
        ValueError: `num` is negative, or the split does not hold that many distinct problems within reach.
    """
    if num < 0:
        raise ValueError(f"num={num} problems were asked for; give 0 or more.")
    problems: list[Problem] = []
    seen: set[Problem] = set()
    max_draws = 100 * num + 1000
    for draw, problem in enumerate(stream_problems(seed, held_out)):
        if len(problems) == num:
            break
        if draw == max_draws:
            raise ValueError(
                f"only {len(problems)} distinct problems turned up in {max_draws} draws, {num} were asked for; "
                "ask for fewer or pass distinct=False."
            )
        if distinct and problem in seen:
            continue
        seen.add(problem)
        problems.append(problem)
    return problems


def write_solution(problem: Problem) -> str:
    """Return the perfect solution, for example `<think>7+5=12-3=9</think>9`."""
    total = problem.terms[0]
    work = str(total)
    for term in problem.terms[1:]:
        total += term
        work += f"{term:+d}={total}"
    return f"{THINK_START}{work}{THINK_END}{total}"


def write_flawed_solution(problem: Problem, rng: random.Random, flaws: FlawRates) -> str:
    """Return a solution with the habits that reinforcement learning is to cure: slips, guesses and endless doubt."""
    if rng.random() < flaws.skip_work:
        return f"{THINK_START}{THINK_END}{_slip(problem.answer, rng)}"
    total = problem.terms[0]
    steps = []
    for term in problem.terms[1:]:
        total += term
        # After a slip downwards an exact total may turn negative, which no demonstration writes.
        if total < 0 or rng.random() < flaws.wrong_step:
            total = _slip(max(total, 0), rng)
        steps.append(f"{term:+d}={total}")
    if rng.random() < flaws.doubt:
        doubted = rng.randrange(len(steps))
        repetition = f"?{steps[doubted]}"
        steps[doubted] += repetition
        while rng.random() < flaws.keep_doubting:
            steps[doubted] += repetition
    return f"{THINK_START}{problem.terms[0]}{''.join(steps)}{THINK_END}{total}"


def grade(response_text: str, answer: int | str) -> bool:
    """Whether a response is right: exactly one `</think>`, followed by the answer and nothing else but white space."""
    parts = response_text.split(THINK_END)
    return len(parts) == 2 and parts[1].strip() == str(answer)


def _draw_number(rng: random.Random) -> int:
    return rng.randint(10, 99) if rng.random() < TWO_DIGIT_RATE else rng.randint(1, 9)


def _slip(total: int, rng: random.Random) -> int:
    """Return a total that is off by one or by a lost or spurious carry, and always wrong."""
    return rng.choice([wrong for wrong in (total - 10, total - 1, total + 1, total + 10) if wrong >= 0])
