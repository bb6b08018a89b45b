# SPDX-License-Identifier: Apache-2.0
"""Tables over several groups of the miniature's runs: more problems, another k, larger models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.evidence import family, recipes, tokens
from benchmarks.evidence.compare import difference_text
from benchmarks.miniature import runs
from tests.unit.benchmarks.recorded_rows import BASE, CPU, GRPO_RISE, SPREAD, cells, recorder, row

EARLY = np.log(3e5)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch):
    """Take rows for the recorded ones."""
    return recorder(monkeypatch, runs)


def test_many_problems_beside_few(record) -> None:
    ours = [row("scalerl", s, rise=0.022 + 0.001 * s, problems=16384, hardware=CPU, noise=0.01) for s in (0, 1)]
    theirs = [row("grpo", s, rise=GRPO_RISE[s], problems=16384, hardware=CPU, last=128, noise=0.01) for s in (0, 1)]
    record(BASE + ours)
    assert "GRPO" not in recipes.many_table()  # not beside itself, nor among the comparisons
    record(BASE + SPREAD + ours + theirs)
    text = recipes.many_table()
    assert "DAPO" not in text
    assert "pass rate at 1.2M tokens" in text  # 128 steps have 1.28M
    line = cells(text, "16,384 | ScaleRL, 2 seeds")
    assert line[2:5] == [f"{0.105 + 0.0225 * EARLY:.3f}", difference_text([0.002 * EARLY, 0.003 * EARLY]), ""]
    same = cells(text, "16,384 | GRPO, 2 seeds")
    assert same[3:5] == ["the same run so far", difference_text([-0.001 * EARLY, -0.0019 * EARLY])]
    assert cells(text, "2,048 | GRPO, 3 seeds")[3] == ""


def test_losses_on_many_problems_stand_beside_themselves_and_scalerl(record) -> None:
    """DAPO's gains over itself are .001 and .002 times the logarithm: t of 12.71 halves of what lies between them."""
    ours = [row("scalerl", s, problems=16384, noise=0.01) for s in (0, 1)]
    dapo = [row("dapo", s, rise=0.022 + 0.002 * s, problems=16384, noise=0.01) for s in (0, 1)]
    record(BASE + SPREAD + ours + dapo)
    line = cells(recipes.many_table(), "16,384 | DAPO, 2 seeds")
    assert line[3] == f"{0.0015 * EARLY:+.3f} ± {12.706 * 0.0005 * EARLY:.3f}"
    assert line[4] == f"{0.003 * EARLY:+.3f} ± {12.706 * 0.001 * EARLY:.3f}"


def test_one_optimizer_step_a_batch_beside_eight(record) -> None:
    new = [row("scalerl", s, k=1, rise=0.025 + 0.001 * s, noise=0.01, last=96) for s in (0, 1, 2)]
    record(BASE + new)
    text = recipes.k_table()
    assert "| pass rate at 0.9M tokens |" in text
    line = cells(text, "1 | ScaleRL, 3 seeds")
    assert line[2] == f"{0.11 + 0.026 * EARLY:.3f}"
    # .005, .006 and .007 times the logarithm: Student's t of two degrees of freedom
    assert line[3] == f"**{0.006 * EARLY:+.3f} ± {4.303 * 0.001 * EARLY / 3**0.5:.3f}**"
    assert cells(text, "8 | ScaleRL, 3 seeds")[2] == f"{0.11 + 0.02 * EARLY:.3f}"


def sized(size: str, seeds: int, lr: float, **more: Any) -> list[dict[str, Any]]:
    """ScaleRL and DAPO on many problems; DAPO rises by .001 and so on more, times the logarithm."""
    made = [row("scalerl", s, size=size, problems=16384, lr=lr, noise=0.01, **more) for s in range(seeds)]
    rises = [0.021 + 0.001 * s for s in range(seeds)]
    return made + [
        row("dapo", s, size=size, problems=16384, lr=lr, noise=0.01, rise=rise, **more) for s, rise in enumerate(rises)
    ]


def test_sizes_are_compared_with_their_own_scalerl(record) -> None:
    small, large = sized("0.3M", 3, 5e-4), sized("11M", 2, 1e-4, last=128, every=32)
    record(BASE + small + large + [row("grpo", s, size="3M", lr=2e-4) for s in (0, 1)])
    text = recipes.sizes_table()
    assert [line.split(" | ")[0] for line in text.splitlines()[2:6]] == ["| 0.3M", "| 0.3M", "| 11M", "| 11M"]
    line = cells(text, "0.3M | 3 | 0.0005 | DAPO")
    end = np.log(2.5e6)  # 256 steps have 2.56M
    half = 4.303 * 0.001 / 3**0.5
    shown = (4.303 + 1.061) * 0.001 / 3**0.5
    early = [f"{0.11 + 0.022 * EARLY:.3f}", f"{0.002 * EARLY:+.3f} ± {half * EARLY:.3f}", f"{shown * EARLY:.3f}"]
    late = [f"{0.11 + 0.022 * end:.3f} at 2.5M", f"{0.002 * end:+.3f} ± {half * end:.3f}", f"{shown * end:.3f}"]
    assert line[4:] == ["0.200", *early, *late]
    assert cells(text, "11M | 2 | 0.0001 | DAPO")[8] == f"{0.105 + 0.0215 * np.log(1.2e6):.3f} at 1.2M"
    assert cells(text, "11M | 2 | 0.0001 | ScaleRL")[6:8] == ["", ""]
    assert "GRPO" not in text


def test_a_size_that_ended_early_or_has_no_scalerl_is_shown_as_far_as_it_goes(record) -> None:
    short, exact = sized("3M", 2, 2e-4, last=24, every=8), sized("11M", 2, 1e-4, last=32)
    exact = [
        {**made, "points": {**made["points"], "tokens": [9_375 * u for u in made["points"]["updates"]]}}
        for made in exact
    ]
    record([*short, *exact, *(row("gspo", s, size="27M", problems=16384, lr=1e-4) for s in (0, 1))])
    text = recipes.sizes_table()
    line = cells(text, "3M | 2 | 0.0002 | DAPO")
    assert line[5:8] == ["", "", ""] and line[8] == f"{0.105 + 0.0215 * np.log(2e5):.3f} at 0.2M"
    assert cells(text, "11M | 2 | 0.0001 | DAPO")[8:] == ["", "", ""]
    assert cells(text, "27M | 2 | 0.0001 | GSPO")[6:] == [
        "",
        "",
        f"{0.1 + 0.02 * np.log(2.5e6):.3f} at 2.5M",
        "",
        "",
    ]


def test_tokens_to_where_the_others_are() -> None:
    """At 2e5, half way between 1e5 and 4e5 in logarithms, the others have .4, .5 and .4."""

    def of(*rates: float) -> dict[str, Any]:
        return {"updates": [0, 16, 64], "tokens": [0, 1e5, 4e5], "pass_rate": [0.1, *rates]}

    theirs = {0: of(0.3, 0.5), 1: of(0.4, 0.6), 2: of(0.3, 0.5)}
    assert tokens.tokens_to(theirs[0], 0.4) == pytest.approx(2e5)
    assert (tokens.tokens_to(theirs[0], 0.3), tokens.tokens_to(theirs[0], 0.51)) == (0.0, None)
    assert tokens.tokens_text({0: of(0.2, 0.4), 1: of(0.3, 0.5)}, theirs, 2e5) == "2.00 (2.00 to 2.00)"
    # 4e5 and 2e5: a mean of half a doubling, and 12.71 standard errors, which are half of what lies between them
    half = 12.7062 * np.log(2) / 2
    low, high = np.exp(np.log(2) / 2 - half), np.exp(np.log(2) / 2 + half)
    assert tokens.tokens_text({0: of(0.2, 0.4), 2: of(0.3, 0.5)}, theirs, 2e5) == f"1.41 ({low:.2f} to {high:.2f})"
    assert tokens.tokens_text({0: of(0.2, 0.3), 2: of(0.3, 0.5)}, theirs, 2e5) == "not reached by 1 of 2"
    assert (
        tokens.tokens_text({0: of(0.4, 0.5), 2: of(0.3, 0.5)}, theirs, 2e5) == "there at the first validation by 1 of 2"
    )
    assert tokens.tokens_text({0: of(0.2, 0.4)}, theirs, 2e5) == ""
    assert tokens.tokens_text({0: of(0.2, 0.4), 1: of(0.3, 0.5)}, theirs, 5e5) == ""  # nor the others
    assert tokens.tokens_to({"updates": [0], "tokens": [0], "pass_rate": [0.1]}, 0.3) is None


def test_tokens_by_size(record) -> None:
    """DAPO rises faster by .001 and so on an e-fold: it needs fewer tokens."""
    record(sized("3M", 3, 2e-4, last=112))
    text = tokens.tokens_table(("0.3M", "3M"))
    assert len(text.splitlines()) == 2 + 1
    line = cells(text, "3M | DAPO")
    assert line[2] == "there at the first validation by 2 of 3" and line[-1] == ""
    ratios = [1e6 ** (0.02 / rise - 1) for rise in (0.021, 0.022, 0.023)]
    assert line[4].startswith(f"{np.exp(np.mean(np.log(ratios))):.2f} (")


def test_runs_validated_both_ways_are_told_apart_from_all_others(record) -> None:
    both = [row(name, 3, size="3M", last=16, problems=16384) for name in ("scalerl", "grpo")]
    for made in both:
        made["case"]["both_ways"] = True
    record(BASE + both)
    assert runs.read_group(runs.Group("3M", problems=16384)) == {}


def test_all_comparisons_are_corrected_together(record) -> None:
    """ScaleRL's to itself: t of 19, p of .0027, four times that. GRPO's: t of about 1.5."""
    many = [row("scalerl", s, rise=0.021 + 0.0001 * s, problems=16384, noise=0.01) for s in (0, 1, 2)]
    many += [row("grpo", s, rise=(0.021, 0.03, 0.045)[s], problems=16384, noise=0.01) for s in (0, 1, 2)]
    record([made for made in BASE if made["impl"] == "scalerl"] + many)
    grpo, itself = ("GRPO", "0.3M, 16,384", "ScaleRL"), ("ScaleRL", "0.3M, 16,384", "itself, 0.3M, 2,048")
    assert [key for key, differences in family.comparisons() if differences] == [
        (*grpo, 3e5),
        (*grpo, 2.5e6),
        (*itself, 3e5),
        (*itself, 1.8e6),
    ]
    heads, _, *lines = family.family_table().splitlines()
    assert "corrected for 4" in heads
    assert sorted(line.split(" | ")[:4] for line in lines) == [
        ["| ScaleRL", *itself[1:], at] for at in ("0.3M", "1.8M")
    ]
