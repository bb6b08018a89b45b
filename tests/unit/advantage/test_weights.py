# SPDX-License-Identifier: Apache-2.0
"""Weights per row: folded into the advantages they make the trainer's denominators count what trains.

The hand-computed batch: 8 rows, of which the trainer divides by 10 (2 padding rows of another source).

    group   a  a  b  b  b  c  c  d
    tokens  2  4  1  3  0  5  5  7
    kept    x  x  x  x  x  -  -  -     T_a = 6, T_b = 4, P_kept = 2, N_kept = 4 (a row has no tokens)

    prompt-mean  a: 10 / (2 * 6)    b: 10 / (2 * 4)
    seq modes    10 / 4
    token-mean   27 / 10
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_verl.advantage import row_weights
from scalerl_verl.loss import AGG_MODES

IDS = list("aabbbccd")
TOKENS = [2, 4, 1, 3, 0, 5, 5, 7]
KEPT = np.array([True] * 5 + [False] * 3)
TRAINS = np.array([True] * 8)
HAND = {
    "prompt-mean": [10 / 12] * 2 + [10 / 8] * 2,
    "token-mean": [2.7] * 4,
    "token-sum": [1.0] * 4,
    "seq-mean-token-sum": [2.5] * 4,
    "seq-mean-token-mean": [2.5] * 4,
    "seq-mean-token-sum-norm": [2.5] * 4,
}


@pytest.mark.parametrize("mode", AGG_MODES)
def test_hand_computed_batch(mode):
    weights_B = row_weights(mode, TOKENS, IDS, KEPT, num_rows=10, trains_B=TRAINS)
    assert weights_B.dtype == np.float64
    np.testing.assert_allclose(weights_B, HAND[mode] + [0.0] * 4, rtol=1e-14)


@pytest.mark.fault("denominators that count masked, truncated or filtered sequences")
@pytest.mark.parametrize("mode", AGG_MODES)
def test_denominators_do_not_count_masked_truncated_or_filtered_sequences(mode):
    """Adding rows that do not train must not shrink what the trainer computes from the rows that do."""

    def contributions(num_extra: int) -> np.ndarray:
        tokens = np.array(TOKENS[:4] + [0] * num_extra)
        kept = np.array([True] * 4 + [i % 2 == 0 for i in range(num_extra)])
        weights_B = row_weights(
            mode,
            tokens,
            IDS[:4] + [f"extra{i}" for i in range(num_extra)],
            kept,
            num_rows=tokens.size,
            trains_B=np.ones(tokens.size, dtype=bool),
        )
        divisor = {"token-mean": tokens.sum(), "token-sum": 1}.get(mode, tokens.size)
        return weights_B[:4] / divisor

    np.testing.assert_allclose(contributions(0), contributions(5), rtol=1e-14)
    divisor = {"prompt-mean": np.array([2 * 6, 2 * 6, 2 * 4, 2 * 4]), "token-mean": 10, "token-sum": 1}.get(mode, 4)
    np.testing.assert_allclose(contributions(5), np.ones(4) / divisor, rtol=1e-14)


@pytest.mark.fault("every group filtered: the run aborts or divides by 0")
@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("tokens", [TOKENS, [0] * 8])
def test_every_group_filtered_gives_zeros_not_infinities(mode, tokens):
    with np.errstate(all="raise"):
        weights_B = row_weights(mode, tokens, IDS, np.zeros(8, dtype=bool), num_rows=8, trains_B=TRAINS)
        assert weights_B.tolist() == [0.0] * 8
        assert row_weights(mode, [0] * 8, IDS, KEPT, num_rows=8, trains_B=TRAINS).tolist() == [0.0] * 8
        nothing = np.zeros(0, dtype=bool)
        assert row_weights(mode, [], [], nothing, num_rows=0, trains_B=nothing).shape == (0,)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), min_size=1, max_size=40),
    num_padding=st.integers(0, 7),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_prompt_has_the_same_weight_whatever_its_lengths_order_and_padding(rows, num_padding, shuffle):
    ids, tokens, kept = (np.array(column) for column in zip(*rows, strict=True))
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    ids, tokens, kept = ids[order], tokens[order], kept[order]
    num_rows = len(rows) + num_padding
    pad = np.zeros(num_padding, dtype=int)
    ids = np.concatenate([ids, np.full(num_padding, ids[0])])
    kept = np.concatenate([kept, pad.astype(bool)])
    tokens = np.concatenate([tokens, pad])
    trains = np.arange(num_rows) < len(rows)
    weights_B = row_weights("prompt-mean", tokens, ids, kept, num_rows=num_rows, trains_B=trains)
    counted = kept & (tokens > 0)
    assert not weights_B[~counted].any()
    prompts = set(ids[counted].tolist())
    for prompt in prompts:
        share = (weights_B * tokens)[ids == prompt].sum() / num_rows
        assert share == pytest.approx(1 / len(prompts), rel=1e-12)
        assert len(set(weights_B[counted & (ids == prompt)].tolist())) == 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mode": "prompt_mean"}, "allowed are"),
        ({"num_tokens_B": TOKENS[:-1]}, "same"),
        ({"num_tokens_B": [-1, *TOKENS[1:]]}, "negative"),
        ({"num_tokens_B": [np.nan, *TOKENS[1:]]}, "non-finite"),
        ({"group_ids_B": IDS[:-1]}, "group ids"),
        ({"kept_B": KEPT.astype(int)}, "bool"),
        ({"trains_B": ~TRAINS}, "kept but do not train"),
        ({"num_rows": 7}, "num_rows is 7"),
    ],
)
def test_refuses_arrays_that_do_not_describe_one_batch(change, match):
    arguments = {
        "mode": "prompt-mean",
        "num_tokens_B": TOKENS,
        "group_ids_B": IDS,
        "kept_B": KEPT,
        "num_rows": 8,
        "trains_B": TRAINS,
    }
    with pytest.raises(ValueError, match=match):
        row_weights(**(arguments | change))
