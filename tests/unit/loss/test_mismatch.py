# SPDX-License-Identifier: Apache-2.0
"""Trainer-generator mismatch for any loss: the same numbers as CISPO's, hand-computed and unusable tokens left out."""

from __future__ import annotations

import math

import pytest
import torch

from scalerl_verl.loss import cispo_metrics, mismatch_metrics

LN2 = math.log(2.0)


def test_hand_computed_values() -> None:
    """log-ratios in ln 2: 3, -1, 0, so rho = 8, 1/2, 1; weights under a cap of 4: 4, 1/2, 1."""
    logp_train_BT = torch.tensor([[-1.0, -3.0, -2.0]], dtype=torch.float64) * LN2
    logp_rollout_BT = torch.tensor([[-4.0, -2.0, -2.0]], dtype=torch.float64) * LN2
    measured = mismatch_metrics(logp_train_BT, logp_rollout_BT, torch.ones(1, 3), eps_max=4.0)
    assert {name.removeprefix("scalerl/mismatch/"): value for name, (value, _) in measured.items()} == pytest.approx(
        {
            "log_ratio_abs_mean": 4 * LN2 / 3,
            "log_ratio_abs_max": 3 * LN2,
            "sequence_log_ratio_abs_max": 2 * LN2,
            "k3_kl": 9.5 / 3 - 1 - 2 * LN2 / 3,
            "ess_frac": 5.5**2 / (3 * 17.25),
            "above_cap_frac": 1 / 3,
        }
    )


@pytest.mark.parametrize("options", [{}, {"token_mask_range": [0.5, 2.0]}, {"sequence_truncation": "product"}])
def test_equals_what_cispo_reports_whatever_its_options(options: dict) -> None:
    torch.manual_seed(0)
    logp_train_BT, logp_rollout_BT = (-3 * torch.rand(2, 5, 7)).unbind()
    logp_rollout_BT[0, 0] = math.nan
    mask_BT = torch.rand(5, 7) > 0.3
    ours = mismatch_metrics(logp_train_BT, logp_rollout_BT, mask_BT, 2.0)
    theirs = cispo_metrics(logp_train_BT, logp_rollout_BT, torch.ones(5, 7), mask_BT, 2.0, **options)
    assert ours == {name: value for name, value in theirs.items() if name.startswith("scalerl/mismatch/")}


def test_masked_and_unusable_tokens_do_not_count() -> None:
    logp_BT = torch.tensor([[-1.0, math.nan, -1.0, -1.0]])
    recorded_BT = torch.tensor([[-1.5, -1.0, math.nan, 50.0]])
    measured = mismatch_metrics(logp_BT, recorded_BT, torch.tensor([[1, 1, 1, 0]]))
    assert measured["scalerl/mismatch/log_ratio_abs_max"][0] == 0.5
    nothing = mismatch_metrics(logp_BT, recorded_BT, torch.zeros(1, 4))
    assert {value for value, _ in nothing.values()} == {0.0, 1.0}
    assert nothing["scalerl/mismatch/ess_frac"] == (1.0, "mean")
