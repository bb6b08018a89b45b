# SPDX-License-Identifier: Apache-2.0
"""Prepare the quickstart: a warm-started model, training and held-out problems, and a manifest.

`python recipes/quickstart/prepare.py --out DIR` writes DIR/model, DIR/train.parquet, DIR/test.parquet and
DIR/manifest.json. The model is trained from scratch on demonstrations, perfect ones first (exact totals teach
arithmetic several times faster), then flawed ones, until it answers about a third of the held-out problems: good
enough to have something to reinforce, bad enough to have something to learn.

The manifest holds a hash of settings and sources and is written last: a second call returns at once, and an interrupted
preparation never looks finished.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not this folder, whose modules have plain names

from recipes.quickstart.model import (
    END,
    SIZES,
    build_model,
    build_optimizers,
    build_tokenizer,
    format_prompt,
    sample_responses,
)
from recipes.quickstart.task import (
    FlawRates,
    Problem,
    grade,
    sample_problems,
    stream_problems,
    write_flawed_solution,
    write_solution,
)
from scalerl_verl.terminal import accept_any_text

DATA_SOURCE = "scalerl/chain_sum"
SOURCES = ("task.py", "model.py", "prepare.py")
ENTRIES = ("model", "train.parquet", "test.parquet")  # manifest.json comes last, when these are in place
ALLOWED_START = (0.20, 0.45)


class PreparationError(ValueError):
    """The preparation cannot go on, or its result is not fit for the quickstart."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides the result; lengths are in tokens.

    sft_perfect_fraction: share of the supervised steps, the first ones, that see perfect demonstrations.
    sft_batch_tokens: tokens (prompt, response and padding) a supervised step trains on.
    demo_limit_tokens: demonstrations are cut here, beyond the response limit, so that endless doubt has no end to copy.
    """

    seed: int = 0
    num_train_problems: int = 4096
    num_eval_problems: int = 256
    num_eval_samples: int = 4
    response_limit_tokens: int = 48
    sft_steps: int = 650
    sft_perfect_fraction: float = 0.7
    sft_warmup_steps: int = 50
    sft_batch_tokens: int = 1024
    sft_learning_rate: float = 1e-2
    demo_limit_tokens: int = 64
    flaws: FlawRates = dataclasses.field(default_factory=FlawRates)
    size: str = "0.3M"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise PreparationError(f"size={self.size!r} does not exist; give one of {', '.join(SIZES)}.")
        for name in ("num_train_problems", "num_eval_problems", "sft_steps"):
            if getattr(self, name) < 1:
                raise PreparationError(f"{name}={getattr(self, name)} is too small; give 1 or more.")
        if not 0 <= self.sft_perfect_fraction < 1:
            raise PreparationError(f"sft_perfect_fraction={self.sft_perfect_fraction} must be from 0 to below 1.")
        if self.num_eval_problems < 2:
            raise PreparationError("num_eval_problems=1 leaves no standard error; give 2 or more.")


@dataclasses.dataclass(frozen=True)
class PassRate:
    """Mean over problems of the share of right samples, with its standard error over problems."""

    pass_rate: float
    stderr: float
    num_problems: int
    num_samples: int


def hash_settings(settings: Settings) -> str:
    """Return a hash of the settings and of the source files that turn them into a result."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(settings), sort_keys=True).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def make_batches(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, flawed: bool, pool_batches: int = 64
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens_BT, labels_BT) of demonstrations without end; labels of prompt and padding are -100.

    Demonstrations are sorted by length within a pool before they are cut into batches: hardly any padding is left, and
    since it stands at the end of a causal sequence, attention needs no mask (which is what makes it fast).
    """
    rng = random.Random(f"demonstrations/{'flawed' if flawed else 'perfect'}/{settings.seed}")
    problems = stream_problems(rng.getrandbits(64), held_out=False)
    pad = tokenizer.pad_token_id
    while True:
        pool: list[tuple[list[int], int]] = []
        num_tokens = 0
        while num_tokens < pool_batches * settings.sft_batch_tokens:
            problem = next(problems)
            solution = write_flawed_solution(problem, rng, settings.flaws) if flawed else write_solution(problem)
            prompt = tokenizer.encode(format_prompt(tokenizer, problem.text), add_special_tokens=False)
            limit = settings.demo_limit_tokens
            response = tokenizer.encode(solution + END, add_special_tokens=False, truncation=True, max_length=limit)
            pool.append((prompt + response, len(prompt)))
            num_tokens += len(prompt) + len(response)
        pool.sort(key=lambda item: len(item[0]))
        batches = []
        while pool:
            width = len(pool[-1][0])
            rows = [pool.pop() for _ in range(min(len(pool), max(1, settings.sft_batch_tokens // width)))]
            tokens_BT = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
            is_response_BT = torch.tensor([[start <= i < len(row) for i in range(width)] for row, start in rows])
            batches.append((tokens_BT, tokens_BT.masked_fill(~is_response_BT, -100)))
        rng.shuffle(batches)
        yield from batches


def warm_start(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a model trained from scratch on demonstrations; deterministic for a seed and a thread count."""
    torch.manual_seed(settings.seed)
    model = build_model(tokenizer, settings.size).to(settings.device).train()
    optimizers = build_optimizers(model, settings.sft_learning_rate)
    num_perfect = round(settings.sft_perfect_fraction * settings.sft_steps)
    batches = itertools.chain(
        itertools.islice(make_batches(settings, tokenizer, flawed=False), num_perfect),
        make_batches(settings, tokenizer, flawed=True),
    )
    started = time.perf_counter()
    for step, (tokens_BT, labels_BT) in enumerate(itertools.islice(batches, settings.sft_steps), start=1):
        remaining = 1 - (step - 1) / settings.sft_steps
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = settings.sft_learning_rate * min(step / settings.sft_warmup_steps, max(remaining, 0.02))
        tokens_BT, labels_BT = tokens_BT.to(settings.device), labels_BT.to(settings.device)
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100
        )
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 0 or step == settings.sft_steps:
            kind = "correct solutions" if step <= num_perfect else "solutions with mistakes"
            seconds = time.perf_counter() - started
            print(f"  step {step}/{settings.sft_steps} ({kind}), loss {loss.item():.3f}, {seconds:.0f} s", flush=True)
    return model.eval()


def measure_pass_rate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], settings: Settings
) -> PassRate:
    """Sample at temperature 1 under the response limit of the RL run and grade."""
    num_samples = settings.num_eval_samples
    prompts = [format_prompt(tokenizer, problem.text) for problem in problems for _ in range(num_samples)]
    responses = sample_responses(model, tokenizer, prompts, settings.response_limit_tokens, settings.seed)
    per_problem = [
        statistics.fmean(
            grade(response, problem.answer) for response in responses[row * num_samples : (row + 1) * num_samples]
        )
        for row, problem in enumerate(problems)
    ]
    stderr = statistics.stdev(per_problem) / math.sqrt(len(per_problem))
    return PassRate(statistics.fmean(per_problem), stderr, len(problems), len(responses))


def write_problems(problems: list[Problem], split: str, path: Path) -> None:
    """Write problems in the columns that verl reads."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def is_prepared(out: Path, settings_hash: str) -> bool:
    """Whether `out` holds the complete result of exactly these settings and sources."""
    try:
        manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    complete = all((out / entry).exists() for entry in (*ENTRIES, "model/model.safetensors", "model/tokenizer.json"))
    return complete and manifest.get("hash") == settings_hash


def build(settings: Settings, folder: Path) -> PassRate:
    """Write model and problems to an empty folder; return the pass rate from which RL will start."""
    print(f"Warm start: {settings.sft_steps} supervised steps on {torch.get_num_threads()} threads.", flush=True)
    tokenizer = build_tokenizer()
    model = warm_start(settings, tokenizer)
    train = sample_problems(settings.seed, settings.num_train_problems, held_out=False, distinct=True)
    test = sample_problems(settings.seed, settings.num_eval_problems, held_out=True, distinct=True)
    start = measure_pass_rate(model, tokenizer, test, settings)
    print(f"Start: {start.pass_rate:.3f} ± {start.stderr:.3f} of {start.num_samples} held-out samples are right.")
    low, high = ALLOWED_START
    if not low <= start.pass_rate <= high:
        advice = "more" if start.pass_rate < low else "fewer"
        raise PreparationError(
            f"the start pass rate is {start.pass_rate:.3f}, allowed is {low} to {high}: outside it there is too little "
            f"to reinforce or to learn. Give {advice} --sft-steps than {settings.sft_steps}, or another --seed."
        )
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    write_problems(train, "train", folder / "train.parquet")
    write_problems(test, "test", folder / "test.parquet")
    return start


def prepare(settings: Settings, out: Path, force: bool = False) -> bool:
    """Make `out` hold the result of the settings; return False when it already did.

    Everything is built in a temporary folder and moved into place, the manifest last. Other files in `out` stay.
    """
    settings_hash = hash_settings(settings)
    if is_prepared(out, settings_hash) and not force:
        return False
    foreign = [entry for entry in ENTRIES if (out / entry).exists() and not (out / "manifest.json").exists()]
    if foreign and not force:
        raise PreparationError(
            f"{out} holds {', '.join(foreign)} but no manifest.json, so this may be someone else's; "
            "choose another --out, or pass --force to replace it."
        )
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob(".preparing-*"):  # of a preparation that was killed
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=out) as temporary:
        folder = Path(temporary)
        start = build(settings, folder)
        manifest = {
            "hash": settings_hash,
            "seed": settings.seed,
            "settings": dataclasses.asdict(settings),
            "sources_sha256": {
                name: hashlib.sha256(Path(__file__).with_name(name).read_bytes()).hexdigest() for name in SOURCES
            },
            "start": dataclasses.asdict(start),
            "seconds": round(time.perf_counter() - started, 1),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        (out / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(out / "model", ignore_errors=True)
        for entry in (*ENTRIES, "manifest.json"):
            os.replace(folder / entry, out / entry)
    return True


def main(arguments: list[str] | None = None) -> int:
    defaults = Settings()
    parser = argparse.ArgumentParser(description="Prepare the quickstart's model and problems.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--train-problems", type=int, default=defaults.num_train_problems)
    parser.add_argument("--eval-problems", type=int, default=defaults.num_eval_problems)
    parser.add_argument("--sft-steps", type=int, default=defaults.sft_steps, help="supervised steps of the warm start")
    parser.add_argument("--sft-learning-rate", type=float, default=defaults.sft_learning_rate)
    parser.add_argument("--size", default=defaults.size, help=f"of the model: {', '.join(SIZES)}")
    parser.add_argument("--device", default=defaults.device, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="prepare again even if the result is there")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    options = parser.parse_args(arguments)
    accept_any_text()
    transformers_logging.disable_progress_bar()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        settings = Settings(
            options.seed,
            options.train_problems,
            options.eval_problems,
            sft_steps=options.sft_steps,
            sft_learning_rate=options.sft_learning_rate,
            size=options.size,
            device=options.device,
        )
        started = time.perf_counter()
        fresh = prepare(settings, options.out, options.force)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written; run it again", file=sys.stderr)
        return 130
    if fresh:
        print(f"Prepared {options.out} in {time.perf_counter() - started:.0f} s.")
    else:
        print(f"{options.out} is already prepared for these settings; nothing to do (--force prepares again).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
