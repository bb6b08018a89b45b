# SPDX-License-Identifier: Apache-2.0
"""What is the same in every picture: colours, markers, words, places of labels, numbers on axes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalerl_verl.scaling.fit.verdicts import CODES
from scalerl_verl.scaling.pictures.style import COLORS, WORDS, look_of, short_number, spread


def test_49_runs_look_different_and_neighbours_differ_in_colour_and_marker():
    looks = [look_of(place) for place in range(49)]
    assert len(set(looks)) == 49
    for one, next_one in itertools.pairwise(looks):
        assert one.color != next_one.color and one.marker != next_one.marker


def test_colours_differ_in_brightness_or_in_what_any_eye_tells_apart():
    """Under the three dichromacies (Vienot, Brettel and Mollon 1999) no two colours come close."""
    linear = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in COLORS]) ** 2.2
    to_lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    protan = np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]])
    deutan = np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]])
    for lacking in (np.eye(3), protan, deutan):
        seen = (linear @ to_lms.T @ lacking.T @ np.linalg.inv(to_lms).T).clip(0, 1) ** (1 / 2.2)
        gaps = np.linalg.norm(seen[:, None] - seen[None], axis=2)[np.triu_indices(len(seen), 1)]
        assert gaps.min() > 0.12


def test_every_verdict_has_words_and_none_is_a_code():
    assert set(WORDS) == set(CODES)
    assert not any("_" in words for words in WORDS.values())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05"), (2, "2"), (5000, "5,000"), (1e4, "10k"), (5e5, "500k"), (1e6, "1M"), (2e9, "2B"), (5e18, "5e+18")],
)
def test_numbers_on_axes_are_short(value, text):
    assert short_number(value) == text


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_labels_keep_order_and_distance_and_stay_inside(wanted):
    places = spread(wanted, 0.1, 0.05, 0.95)
    assert min(places) >= 0.05 - 1e-9 and max(places) <= 0.95 + 1e-9
    ordered = sorted(places)
    assert all(upper - lower >= 0.1 - 1e-9 for lower, upper in itertools.pairwise(ordered))
    for i, one in enumerate(wanted):
        for j, other in enumerate(wanted):
            assert one >= other or places[i] < places[j]


def test_labels_that_have_room_stay_where_they_are_and_too_many_share_what_there_is():
    assert spread([0.8, 0.2, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.8, 0.2, 0.5])
    assert sorted(spread([0.5] * 21, 0.1, 0.0, 1.0)) == pytest.approx(np.linspace(0, 1, 21))
