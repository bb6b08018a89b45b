# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer on the model, problems and reward of recipes/smollm2-reasoning, beside verl on the same GPU.

    python -m benchmarks.reasoning.trl_run --model DIR/model --data DIR --out RUN [--steps 40] [--learning-rate 1e-5]

Needs TRL and accelerate, too. TRL generates with vLLM in its own process (`colocate`) and trains
with flash-attn; batch, learning rate, warm-up and lengths are the recipe's, everything else is TRL's default. TRL has
no forced interruption: a response that is not over after 160 tokens is cut, as in the recipe's baselines.

RUN gets the files of a run that `benchmarks.reasoning.record` reads. ``--hf`` generates with transformers: for a trial
on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from recipes.reasoning.reward import compute_score
from recipes.reasoning.supervise import read_rows

START = time.time()
PROMPTS, RESPONSES = 64, 16
RESPONSE_TOKENS, PROMPT_TOKENS = 160, 128
HELD_OUT_RESPONSES = 2


class Grades:
    """The reward of TRL's trainer, +1 or -1; remembers whether held-out responses were right."""

    def __init__(self) -> None:
        self.right: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.__name__ = "verifier"  # TRL logs a reward by it

    def __call__(
        self,
        completions: Sequence[Any],
        data_source: Sequence[str],
        truth: Sequence[str],
        split: Sequence[str],
        question: Sequence[str],
        **_: Any,
    ) -> list[float]:
        rewards = []
        for completion, source, answer, part, problem in zip(
            completions, data_source, truth, split, question, strict=True
        ):
            grade = compute_score(source, completion[0]["content"], answer)
            rewards.append(grade["score"])
            if part == "test":
                self.right[source][problem].append(grade["acc"])
        return rewards

    def take(self) -> dict[str, float]:
        """Held-out pass rates since the last call, under the names of the plugin's metrics."""
        metrics, every = {}, []
        for source, problems in sorted(self.right.items()):
            means = [statistics.fmean(found) for found in problems.values()]
            every += means
            metrics |= _pass_rate(f"scalerl/validation/{source}/", means)
        self.right.clear()
        metrics |= _pass_rate("scalerl/validation/", every)
        return metrics | {"scalerl/validation/num_prompts": len(every), "scalerl/validation/num_failed": 0}


def _pass_rate(prefix: str, means: Sequence[float]) -> dict[str, float]:
    error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0
    return {f"{prefix}pass_rate": statistics.fmean(means), f"{prefix}stderr": error}


def make_dataset(file: Path, limit: int | None = None) -> Any:
    """The recipe's rows with the columns that TRL and `Grades` take."""
    import datasets

    rows = [
        {
            "prompt": row["prompt"], "data_source": row["data_source"], "split": row["extra_info"]["split"],
            "truth": row["reward_model"]["ground_truth"], "question": row["prompt"][0]["content"],
        }
        for row in read_rows(file)[:limit]
    ]  # fmt: skip
    return datasets.Dataset.from_list(rows)


def make_callback(out: Path, grades: Grades) -> Any:
    """Writes metrics.jsonl: a line a step, and one a validation."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def __init__(self) -> None:
            self.began, self.sampled = time.time(), 0.0
            self.stream = (out / "metrics.jsonl").open("w", encoding="utf-8")

        def write(self, step: int, data: dict[str, float]) -> None:
            gpu_hours = (time.time() - START) / 3600
            data |= {"scalerl/compute/gpu_hours": gpu_hours, "scalerl/compute/generated_tokens": self.sampled}
            print(json.dumps({"step": step, "data": data}), file=self.stream, flush=True)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.time()

        def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
            if "eval_reward" in logs:
                self.write(state.global_step, grades.take())
            elif "reward" in logs:
                tokens = logs["completions/mean_length"] * PROMPTS * RESPONSES
                self.sampled += tokens
                peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
                timing = {"timing_s/step": time.time() - self.began, "actor/perf/max_memory_allocated_gb": peak}
                more = {name: logs[name] for name in ("reward", "grad_norm", "completions/clipped_ratio")}
                self.write(state.global_step, {**timing, **more, "response_length/mean": tokens / PROMPTS / RESPONSES})

    return Recorder()


def settings(arguments: argparse.Namespace) -> Any:
    """TRL's arguments: the recipe's batch, optimizer and lengths."""
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    batch = PROMPTS * RESPONSES
    return GRPOConfig(
        output_dir=str(arguments.out / "trl"),
        max_steps=arguments.steps,
        seed=arguments.seed,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-15,
        weight_decay=0.01,
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=batch // arguments.micro,
        num_generations=RESPONSES,
        max_completion_length=RESPONSE_TOKENS,
        eval_strategy="steps",
        eval_steps=arguments.test_freq,
        eval_on_start=True,
        per_device_eval_batch_size=arguments.micro,
        num_generations_eval=HELD_OUT_RESPONSES,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        model_init_kwargs={"attn_implementation": "flash_attention_2"} if on_gpu else {},
        use_vllm=not arguments.hf,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=arguments.gpu_memory_utilization,
        vllm_max_model_length=PROMPT_TOKENS + RESPONSE_TOKENS,
    )


def main() -> int:
    global PROMPTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the supervised phase")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--micro", type=int, default=128, help="responses of a micro-batch, default %(default)s")
    parser.add_argument("--test-freq", type=int, default=10, help="steps between validations, default %(default)s")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step, default %(default)s")
    parser.add_argument("--problems", type=int, help="held-out problems, default: all")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4, help="of vLLM, default %(default)s")
    parser.add_argument("--hf", action="store_true", help="generate with transformers")
    arguments = parser.parse_args()
    PROMPTS = arguments.prompts
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    arguments.out.mkdir(parents=True, exist_ok=True)
    overrides = [f"actor_rollout_ref.actor.optim.lr={arguments.learning_rate:g}"]
    case = {"impl": "trl", "config": "trl", "preset": [], "overrides": overrides, "seed": arguments.seed}
    (arguments.out / "settings.json").write_text(json.dumps(case), encoding="utf-8")
    grades = Grades()
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=grades,
        args=settings(arguments),
        train_dataset=make_dataset(arguments.data / "train.parquet"),
        eval_dataset=make_dataset(arguments.data / "test.parquet", arguments.problems),
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        callbacks=[make_callback(arguments.out, grades)],
    )
    trainer.train()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
