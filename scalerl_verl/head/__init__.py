# SPDX-License-Identifier: Apache-2.0
"""FP32 LM head: log-probabilities and entropy from hidden states, logits in FP32 and never all at once."""

from scalerl_verl.head.functional import IMPLEMENTATIONS, LogProbs, linear_logprobs
from scalerl_verl.head.logits import fp32_logits
from scalerl_verl.head.shared_pass import shared_pass_logprobs

__all__ = ["IMPLEMENTATIONS", "LogProbs", "fp32_logits", "linear_logprobs", "shared_pass_logprobs"]
