# SPDX-License-Identifier: Apache-2.0
"""Random model, tokenizer and prompts of the pipeline benchmark, made on the spot."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from recipes.quickstart import model as quickstart

AGENT_LOOP = "drawn_lengths"


@dataclass(frozen=True)
class Regime:
    """Prompts of one kind.

    Args:
        name: what limits throughput.
        prompt_tokens: tokens of each prompt.
        mean: of the exponential distribution of response lengths.
        longest: where it is cut.
    """

    name: str
    prompt_tokens: int
    mean: float
    longest: int


@dataclass(frozen=True)
class Size:
    """Model and load.

    Args:
        vocab, hidden, layers: of a Qwen3-shaped network with untied embeddings, bf16.
        prompts, group: of a batch.
        slots: sequences that a generator decodes at once.
        regimes: in the order they come in the data.
    """

    vocab: int
    hidden: int
    layers: int
    prompts: int
    group: int
    slots: int
    regimes: tuple[Regime, Regime]

    @property
    def kv_bytes(self) -> int:
        """Of a KV cache in which every slot has 2,048 tokens, in bf16: twice the mean response."""
        return self.slots * 2048 * self.layers * 2 * 2 * max(2, self.hidden // 128) * 64


_ON_GPUS = (Regime("generation-bound", 48, 1000, 3072), Regime("trainer-bound", 960, 64, 256))
SIZES = {
    # 0.28B and 2.03B parameters. A batch is an eighth of the sequences that decode at once, as in the paper, and
    # training it takes less time than generating it. The second regime's prompts are 15 times its responses: they cost
    # the trainer, while the generator computes each once for its group.
    "0.28B": Size(32768, 1024, 16, 4, 4, 128, _ON_GPUS),
    "2B": Size(151_936, 2048, 28, 4, 4, 128, _ON_GPUS),
    "cpu": Size(
        512, 64, 2, 8, 4, 16,
        (Regime("generation-bound", 8, 60, 160), Regime("trainer-bound", 48, 6, 16)),
    ),
}  # fmt: skip


def make_model(folder: Path, size: Size) -> None:
    """Save model and tokenizer; the vocabulary is the tokenizer's, word by word."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    # verl's chat format wants a token for the line feed
    names = [quickstart.PAD, quickstart.END, quickstart.UNKNOWN, *quickstart.MARKERS, "\n"]
    names += [f"w{i}" for i in range(size.vocab - len(names))]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=quickstart.UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(prefix="##")  # words with a space between them
    whole = (*quickstart.MARKERS, "\n")
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=quickstart.PAD, eos_token=quickstart.END, padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = quickstart.CHAT_TEMPLATE
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=size.hidden, intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers, num_attention_heads=max(2, size.hidden // 64),
        num_key_value_heads=max(2, size.hidden // 128), head_dim=64 if size.hidden >= 128 else 32,
        max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(folder: Path, size: Size, counts: tuple[int, int]) -> None:
    """``train.parquet`` with ``counts`` prompts of the two regimes one after the other, ``val.parquet``, the loop."""
    import pandas

    drawing = random.Random(0)
    rows = []
    for regime, count in zip(size.regimes, counts, strict=True):
        for _ in range(count):
            # two tokens of the chat template come on top
            words = " ".join(f"w{drawing.randrange(size.vocab // 2)}" for _ in range(regime.prompt_tokens - 2))
            rows.append(
                {
                    "data_source": "bench", "prompt": [{"role": "user", "content": words}], "ability": "none",
                    "reward_model": {"style": "rule", "ground_truth": ""}, "agent_name": AGENT_LOOP,
                    "extra_info": {"index": len(rows), "mean": float(regime.mean), "longest": regime.longest},
                }
            )  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")
    loop = [{"name": AGENT_LOOP, "_target_": "scalerl_bench.lengths.DrawnLengths"}]
    (folder / "loop.yaml").write_text(json.dumps(loop), encoding="utf-8")  # JSON is YAML
