# SPDX-License-Identifier: Apache-2.0
"""How stale a batch is: the check that the bound holds, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from scalerl_verl.errors import StalenessError
from scalerl_verl.names import MAX_STALENESS
from scalerl_verl.pipeline.versions import VersionRuns, count_by_age, oldest_version

PREFIX = "scalerl/pipeline"


def measure_batch(
    rows: Sequence[tuple[Any, int]], version: int, max_staleness: int, reissues: Sequence[int] = ()
) -> dict[str, float]:
    """Metrics of a batch, after checking every token of it.

    Args:
        rows: per response its version runs as recorded at sampling, and the number of its sampled tokens.
        version: the policy that is about to be trained.
        max_staleness: k.
        reissues: requests that had to be sent again, per response.

    Returns:
        Mean and maximum age of tokens, tokens and sequences per age (a sequence is as old as its first token), and
        versions per sequence, under ``scalerl/pipeline/``.

    Raises:
        StalenessError: a token is older than ``max_staleness`` versions or newer than the policy, or versions are
            missing.
    """
    tokens: Counter[int] = Counter()
    sequences: Counter[int] = Counter()
    spans = []
    for runs, num_sampled in rows:
        check_runs(runs, num_sampled)
        if not num_sampled:
            continue
        tokens.update(count_by_age(runs, version))
        sequences[version - oldest_version(runs)] += 1
        spans.append(len(runs))
    if tokens and not 0 <= min(tokens) <= max(tokens) <= max_staleness:
        raise StalenessError(
            f"a batch for version {version} holds tokens {min(tokens)} to {max(tokens)} versions old, but "
            f"{MAX_STALENESS}={max_staleness}: the admission rule was broken, which is a fault of "
            "scalerl_verl"
        )
    num_tokens = max(sum(tokens.values()), 1)
    metrics = {
        "staleness_mean": sum(age * count for age, count in tokens.items()) / num_tokens,
        "staleness_max": max(tokens, default=0),
        "versions_per_sequence_mean": sum(spans) / max(len(spans), 1),
        "versions_per_sequence_max": max(spans, default=0),
        "requests_reissued_sum": sum(reissues),
    }
    for age in range(max_staleness + 1):
        metrics[f"staleness_tokens/{age}_sum"] = tokens[age]
        metrics[f"staleness_sequences/{age}_sum"] = sequences[age]
    return {f"{PREFIX}/{name}": float(value) for name, value in metrics.items()}


def check_runs(runs: Any, num_sampled: int) -> VersionRuns:
    """The runs of a response if they cover exactly its sampled tokens.

    Raises:
        StalenessError: they are missing or cover another number of tokens.
    """
    covered = sum(count for _, count in runs) if runs is not None else None
    if covered != num_sampled:
        raise StalenessError(
            f"a response has {num_sampled} sampled tokens, but versions were recorded for {covered}: something has "
            "changed its response_mask, or extra_fields['versions'], after its agent loop"
        )
    return list(runs)
