# SPDX-License-Identifier: Apache-2.0
"""Whole prompts for each optimizer step: several updates on one batch, whatever the number of ranks.

A trainer hands each rank a run of rows and lets it train on them part by part, so the s-th update sees the s-th part of
every rank. Rows balanced over ranks by length alone put a prompt's rows into parts of any number: no update would be an
average over prompts.

Shape legend: B rows, K optimizer steps, R rows of a step, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Partition = Callable[[Sequence[int], int], Sequence[Sequence[int]]]
"""Rows, number of parts -> as many parts of equal size, of about the same work."""


def divide_prompts(prompt_ids_B: Sequence[Hashable], num_steps: int) -> list[list[int]]:
    """Rows of each step: whole prompts in order of first appearance, their number the same up to one.

    Args:
        prompt_ids_B: prompt of each row, without padding rows. Prompts may have any number of rows in any order.
        num_steps: K; with fewer prompts than that, there are as many steps as prompts.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompt_ids_B):
        rows_of.setdefault(prompt, []).append(row)
    prompts = list(rows_of.values())
    parts = np.array_split(np.arange(len(prompts)), max(1, min(num_steps, len(prompts))))
    return [[row for number in part.tolist() for row in prompts[number]] for part in parts]


def rows_per_step(largest: int, least: int, multiple: int, num_steps: int, batch_multiple: int = 1) -> int:
    """R: the smallest number of rows that every step can be padded to.

    Args:
        largest: rows of the largest step.
        least: R at least: what a step of whole groups has.
        multiple: R has to be divisible by this (ranks, micro-batches).
        num_steps: K.
        batch_multiple: K * R has to be divisible by this.
    """
    # K * R is divisible by b where R is by b / gcd(b, K).
    multiple = math.lcm(multiple, batch_multiple // math.gcd(batch_multiple, num_steps))
    return -(-max(largest, least) // multiple) * multiple


def order_for_ranks(steps: Sequence[Sequence[int]], num_ranks: int, partition: Partition) -> list[list[int]]:
    """Rows of each rank: those of the first step, then those of the second, and so on.

    Args:
        steps: R rows each, padding rows included; R is divisible by the number of ranks.
        num_ranks: W.
        partition: balances the rows of one step.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for number, rows in enumerate(steps):
        for index, part in enumerate(partition(rows, num_ranks)):
            # In turns: the part with most work does not go to the same rank in every step.
            ranks[(index + number) % num_ranks].extend(part)
    return ranks


def rows_of_steps(num_rows: int, num_steps: int, num_ranks: int) -> list[NDArray[np.int64]]:
    """Rows of each step in the order that `order_for_ranks` made, its ranks one after the other: K arrays of [R]."""
    numbers = np.arange(num_rows, dtype=np.int64).reshape(num_ranks, num_steps, -1)
    return [numbers[:, step].ravel() for step in range(num_steps)]
