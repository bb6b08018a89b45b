# SPDX-License-Identifier: Apache-2.0
"""The supervised phase: a pretrained model learns the format and its flaws from demonstrations.

    python recipes/reasoning/supervise.py --model NAME|DIR --data DIR --out DIR/model [--steps 512] [--check 128]

trains on DIR/demonstrations.parquet, saves the model, and measures where reinforcement learning will start: the pass
rate on held-out problems of DIR/test.parquet, of each family, in start.json beside the model. On a CUDA device if there
is one. Demonstrations that think beyond the budget are interrupted by the phrase, which is not trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose modules have plain names

from recipes.quickstart.model import format_prompt, sample_responses
from recipes.reasoning import pretrained
from recipes.reasoning.demonstrations import ANSWER_END, THINK_END
from recipes.reasoning.reward import compute_score

PHRASE = "\nOkay, time is up. Let me stop thinking and formulate a final answer now.\n</think>\n<answer>"
"""Of forced interruption: the recipe's config has the same."""
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides the phase; lengths are in tokens.

    thinking_budget: thinking is cut after a number of tokens drawn from here, both ends included.
    batch: demonstrations of a step.
    """

    steps: int = 512
    batch: int = 64
    learning_rate: float = 3e-4
    thinking_budget: tuple[int, int] = (80, 104)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small: give 1 or more")

    def learning_rate_at(self, step: int) -> float:
        """A warm-up over a tenth of the steps, 20 at most, then linearly down to a fiftieth."""
        warm_up = min(20, max(1, self.steps // 10))
        return self.learning_rate * min(step / warm_up, max(1 - (step - 1) / self.steps, 0.02))


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a Parquet file."""
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file).to_pylist()


def encode(tokenizer: Any, row: dict[str, Any], budget: int) -> tuple[list[int], list[int]]:
    """Token ids and labels of one demonstration; the phrase is there if the thinking is longer than ``budget``."""

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompt = ids_of(format_prompt(tokenizer, row["question"]))
    thinking = ids_of(row["thinking"])
    if len(thinking) > budget:
        phrase, thinking = ids_of(PHRASE), thinking[:budget]
        answer = ids_of(row["answer_if_cut"] + ANSWER_END)
    else:
        # in one piece: the tokens that sampling would make
        phrase, thinking = [], ids_of(row["thinking"] + THINK_END + row["answer"] + ANSWER_END)
        answer = []
    answer.append(tokenizer.eos_token_id)
    tokens = [*prompt, *thinking, *phrase, *answer]
    return tokens, [*[IGNORED] * len(prompt), *thinking, *[IGNORED] * len(phrase), *answer]


def order_rows(rows: Sequence[dict[str, Any]], num: int, rng: random.Random) -> list[dict[str, Any]]:
    """``num`` demonstrations, the perfect ones first, with the share that they have of ``rows``, repeated if need be.

    Exact results teach arithmetic several times faster than those that slip.
    """
    parts = [[row for row in rows if row["flawed"] is flawed] for flawed in (False, True)]
    num_perfect = round(num * len(parts[0]) / len(rows))
    ordered = []
    for part, wanted in zip(parts, (num_perfect, num - num_perfect), strict=True):
        passes = [rng.sample(part, len(part)) for _ in range(-(-wanted // len(part)))] if part else []
        ordered += list(itertools.chain.from_iterable(passes))[:wanted]
    return ordered


def make_batches(
    tokenizer: Any, rows: Sequence[dict[str, Any]], settings: Settings, pool: int = 16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens_BT, labels_BT) of each step; of similar length, so that hardly any padding is left.

    Padding stands at the end of a causal sequence, so attention needs no mask.
    """
    rng = random.Random(f"batches/{settings.seed}")
    pad = tokenizer.eos_token_id
    ordered = order_rows(rows, settings.steps * settings.batch, rng)
    for start in range(0, len(ordered), pool * settings.batch):
        chosen = ordered[start : start + pool * settings.batch]
        encoded = [encode(tokenizer, row, rng.randint(*settings.thinking_budget)) for row in chosen]
        encoded.sort(key=lambda pair: len(pair[0]))
        batches = [encoded[first : first + settings.batch] for first in range(0, len(encoded), settings.batch)]
        rng.shuffle(batches)
        for batch in batches:
            width = max(len(tokens) for tokens, _ in batch)
            tokens_BT = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in batch])
            labels_BT = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in batch])
            yield tokens_BT, labels_BT


def train(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], settings: Settings) -> list[float]:
    """AdamW with a warm-up and a linear decay, in bf16 autocast on a CUDA device; returns the loss of each step."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started, said, losses = time.perf_counter(), 0.0, []
    model.train()
    for step, (tokens_BT, labels_BT) in enumerate(make_batches(tokenizer, rows, settings), start=1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden_BTH = model.model(input_ids=tokens_BT.to(device), use_cache=False).last_hidden_state
            targets_BT = labels_BT[:, 1:].to(device)
            logits_NV = model.lm_head(hidden_BTH[:, :-1][targets_BT != IGNORED])
        loss = torch.nn.functional.cross_entropy(logits_NV.float(), targets_BT[targets_BT != IGNORED])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds = time.perf_counter() - started
        if seconds - said > 10 or step == settings.steps:
            said = seconds
            print(
                f"  step {step}/{settings.steps}, loss {statistics.fmean(losses[-20:]):.3f}, {seconds:.0f} s",
                flush=True,
            )
    return losses


def measure_start(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], response_tokens: int, seed: int, samples: Path | None
) -> dict[str, float]:
    """Pass rate at temperature 1, of each family and of all; nothing is interrupted, so a bit below verl's."""
    tokenizer.padding_side = "left"
    prompts = [format_prompt(tokenizer, row["prompt"][0]["content"]) for row in rows]
    responses = []
    for start in range(0, len(prompts), 64):
        responses += sample_responses(model, tokenizer, prompts[start : start + 64], response_tokens, seed + start)
    right: dict[str, list[float]] = defaultdict(list)
    lines = []
    for row, response in zip(rows, responses, strict=True):
        truth = row["reward_model"]["ground_truth"]
        score = compute_score(row["data_source"], response, truth)["acc"]
        right[row["data_source"]].append(score)
        shown = {"source": row["data_source"], "prompt": row["prompt"][0]["content"], "acc": score}
        lines.append(json.dumps({**shown, "response": response}))
    if samples is not None:
        samples.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rates = {source: statistics.fmean(scores) for source, scores in sorted(right.items())}
    return {"all": statistics.fmean(score for scores in right.values() for score in scores), **rates}


def main(argv: list[str] | None = None) -> int:
    """Train, measure, save; returns the exit code."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=pretrained.SMOLLM2, help="name, folder, GGUF file or wheel")
    parser.add_argument("--data", type=Path, required=True, help="folder that problems.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="default %(default)s")
    parser.add_argument(
        "--batch", type=int, default=defaults.batch, help="demonstrations of a step, default %(default)s"
    )
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--check", type=int, default=128, help="held-out problems to measure, 0 for none; default 128")
    parser.add_argument("--response-tokens", type=int, default=160, help="of a measured response, default %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    try:
        settings = Settings(options.steps, options.batch, options.learning_rate, seed=options.seed)
        torch.manual_seed(settings.seed)
        with tempfile.TemporaryDirectory() as folder:
            model, tokenizer = pretrained.load(options.model, Path(folder))
        model.to(options.device)
        losses = train(model, tokenizer, read_rows(options.data / "demonstrations.parquet"), settings)
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {"settings": dataclasses.asdict(settings), "model": options.model, "loss": losses[-1]}
        model.to(torch.bfloat16).to(torch.float32)  # what is measured is what is saved
        if options.check:
            rows = read_rows(options.data / "test.parquet")[: options.check]
            samples = options.out.parent / "start-samples.jsonl"
            started = time.perf_counter()
            facts["start"] = measure_start(model, tokenizer, rows, options.response_tokens, settings.seed, samples)
            print(f"start ({time.perf_counter() - started:.0f} s): {facts['start']}", flush=True)
        tokenizer.padding_side = "right"
        pretrained.save(model, tokenizer, options.out)
        (options.out.parent / "start.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
