# SPDX-License-Identifier: Apache-2.0
"""Sampling from stacked models, with forced interruption, and grading.

Shape legend: M models, N sequences a model, T positions of prompt and response together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.miniature.model import StackedModels

CHECK_EVERY = 8
"""Tokens between looks at whether all sequences have ended: each look waits for the device."""


@dataclass(frozen=True)
class Vocabulary:
    """Ids that sampling has to know, and the text of every token ("" for the special ones)."""

    end: int
    think_start: int
    think_end: int
    texts: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer) -> Vocabulary:
        special = set(tokenizer.all_special_ids)
        texts = ["" if i in special else tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
        ids = tokenizer.convert_tokens_to_ids
        return cls(tokenizer.eos_token_id, ids("<think>"), ids("</think>"), tuple(texts))


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens. `thinking`: lowest and highest budget, None: no interruption."""

    response: int
    thinking: tuple[int, int] | None = None
    answer: int = 0


@dataclass
class Responses:
    """Sequences from position 0.

    tokens_MNT: ids. logp_MNT: log-prob of the token at a position when it was sampled, 0 elsewhere. mask_MNT: tokens of
    the response that the policy sampled. first_MN: position of the first response token.
    """

    tokens_MNT: Tensor
    logp_MNT: Tensor
    mask_MNT: Tensor
    first_MN: Tensor
    interrupted_MN: Tensor

    def texts(self, vocabulary: Vocabulary) -> list[list[str]]:
        """Response texts as verl's decoding gives them, [M][N]."""
        M, N, T = self.tokens_MNT.shape
        position = torch.arange(T, device=self.tokens_MNT.device)
        of_response = (position >= self.first_MN[..., None]) & (self.tokens_MNT >= 0)
        rows = self.tokens_MNT.masked_fill(~of_response, vocabulary.end).flatten(0, 1).tolist()
        table = vocabulary.texts
        flat = ["".join([table[token] for token in row]) for row in rows]
        return [flat[m * N : (m + 1) * N] for m in range(M)]


@torch.no_grad()
def generate(
    models: StackedModels,
    prompts: Sequence[Sequence[Sequence[int]]],
    repeat: int,
    limits: Limits,
    vocabulary: Vocabulary,
    generator: torch.Generator,
    head_offset: float | None = None,
) -> Responses:
    """Sample ``repeat`` responses a prompt at temperature 1; those of a prompt stand beside each other.

    Args:
        models: M models.
        prompts: token ids, [M][N / repeat].
        repeat: responses a prompt.
        limits: of lengths.
        vocabulary: special ids.
        generator: on the models' device.
        head_offset: round logits to bf16, as a generator's head without FP32 does, with this number on top of all of
            them: it leaves the policy alone, and the larger it is the coarser is the rounding. None: FP32.
    """
    device = models.inverse_frequency.device
    lengths = torch.tensor([[len(prompt) for prompt in row] for row in prompts])
    longest = int(lengths.max())
    padded = torch.tensor([[[*prompt, *[-1] * (longest - len(prompt))] for prompt in row] for row in prompts])
    first = lengths.repeat_interleave(repeat, 1).to(device)
    (M, N), T = first.shape, longest + limits.response
    tokens = torch.full((M, N, T), -1, device=device)
    tokens[:, :, :longest] = padded.repeat_interleave(repeat, 1).to(device)
    logp = torch.zeros(M, N, T, device=device)
    mask = torch.zeros(M, N, T, dtype=torch.bool, device=device)
    budget = torch.full((M, N), T, device=device)
    if limits.thinking is not None:
        low, high = limits.thinking
        budget = torch.randint(low, high + 1, (M, N), generator=generator, device=device)
    last = first + limits.response  # the position behind the last one allowed
    done, opened, closed, interrupted = (torch.zeros(M, N, dtype=torch.bool, device=device) for _ in range(4))
    cache = models.make_cache(N, T)
    for position in range(T - 1):
        current = tokens[:, :, position].clamp(min=0)
        hidden = models.hidden(current[..., None], position, cache)
        logits = models.logits(hidden[:, :, 0])
        if head_offset is not None:
            logits = (logits + head_offset).bfloat16().float()
        log_probs = logits.log_softmax(-1)
        noise = torch.empty_like(log_probs).exponential_(generator=generator)
        chosen = (log_probs.exp() / noise).argmax(-1)
        index = position + 1 - first
        sampling = (index >= 0) & ~done & (position + 1 < last)
        force = sampling & opened & ~closed & (index == budget)
        interrupted |= force
        last = torch.where(force, position + 2 + limits.answer, last)
        chosen = chosen.masked_fill(force, vocabulary.think_end)
        tokens[:, :, position + 1] = torch.where(sampling, chosen, tokens[:, :, position + 1])
        mask[:, :, position + 1] = sampling & ~force
        picked = log_probs.gather(-1, chosen[..., None])[..., 0]
        logp[:, :, position + 1] = picked.masked_fill(~mask[:, :, position + 1], 0.0)
        opened |= sampling & (chosen == vocabulary.think_start)
        closed |= sampling & (chosen == vocabulary.think_end)
        done |= (sampling & (chosen == vocabulary.end)) | (position + 2 >= last)
        if position >= longest and position % CHECK_EVERY == 0 and bool(done.all()):
            break
    return Responses(tokens, logp, mask, first, interrupted)
