# SPDX-License-Identifier: Apache-2.0
"""A tiny model that thinks for too long: `<think>`, some 60 characters, `</think>`, a digit, end of turn.

A real Qwen3 network with the quickstart's tokenizer, its weights written down instead of trained: the residual stream
carries the last token, and the head holds what may follow it. Attention and MLPs are small but not zero, so every
log-prob depends on the whole context.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from recipes.quickstart import model as quickstart_model

LETTERS, DIGITS = "ab", "0123456789"
MEAN_THINKING = 60
RULED_OUT = -30.0
"""Log-probability of what never follows: 100 tokens must not come at any of 5,000 places (at -20 in 1 run of 1,000)."""
CONTEXT_SCALE = 0.01
TOKEN_SCALE = 10.0


def followers(end: str) -> dict[str, dict[str, float]]:
    """Token -> what follows it, with which probability."""
    close = 1 / MEAN_THINKING
    thinking = {letter: (1 - close) / len(LETTERS) for letter in LETTERS}
    return {
        "<|assistant|>": {"<think>": 1.0},
        "<think>": thinking | {"</think>": close},
        **{letter: thinking | {"</think>": close} for letter in LETTERS},
        "</think>": {digit: 1 / len(DIGITS) for digit in DIGITS},
        **{digit: {end: 1.0} for digit in DIGITS},
        end: {end: 1.0},
    }


def make_thinking_model(folder: Path) -> Path:
    """Save the model and its tokenizer; returns the folder."""
    torch.manual_seed(0)
    tokenizer = quickstart_model.build_tokenizer()
    base = quickstart_model.build_model(tokenizer)
    config = type(base.config)(**{**base.config.to_dict(), "tie_word_embeddings": False})
    model = type(base)(config).float()
    model.generation_config = base.generation_config
    hidden = config.hidden_size
    table = followers(tokenizer.eos_token)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(std=CONTEXT_SCALE)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        # Tokens that are never followed by anything in particular share the last dimension.
        embedding[:, hidden - 1] = TOKEN_SCALE
        head.fill_(0.0)
        for dimension, (token, following) in enumerate(table.items()):
            embedding[tokenizer.convert_tokens_to_ids(token)] = TOKEN_SCALE * torch.eye(hidden)[dimension]
            # The final norm stretches every vector to the length of the square root of its size.
            head[:, dimension] = RULED_OUT / math.sqrt(hidden)
            for follower, probability in following.items():
                index = tokenizer.convert_tokens_to_ids(follower)
                head[index, dimension] = math.log(probability) / math.sqrt(hidden)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
