# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in this process with an FP32 head: what it reports as log-probs against float64 of its own head.

python -m tests.head_engine FOLDER CASE...     writes FOLDER/<case>.json

A case is ``tied`` or ``untied`` (a random Qwen3 model, bf16), with ``-v2`` for vLLM's second model runner and
``-sleep`` to sleep and wake in between. The test that starts this reads the files: an engine in pytest's own process
would leave its state behind. Run with VLLM_ENABLE_V1_MULTIPROCESSING=0 and SCALERL_VERL_ACTIVE=1 in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from scalerl_verl.head.precision import float64_logits

VOCAB_SIZE, HIDDEN, BATCH, NUM_PROMPTS, NUM_TOKENS = 1000, 256, 3, 4, 8
"""vLLM pads a vocabulary to a multiple of 64: 24 columns of its head belong to no token."""
HEAD_STD = 0.5
"""Logits of a few units: rounded to bf16 they are off by 1e-2."""


def save_model(folder: Path, tied: bool, vocab_size: int = VOCAB_SIZE, hidden: int = HIDDEN, layers: int = 2) -> Path:
    """A random bf16 Qwen3 model without tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 2),
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        # Wide enough for the layers to outweigh the embedding: a tied head would repeat its input with certainty.
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=HEAD_STD)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def start_engine(model: Path, **options: Any) -> Any:
    """vLLM's offline engine with an FP32 head."""
    from vllm import LLM

    given: dict[str, Any] = {
        "hf_overrides": {"head_dtype": "float32"},
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "logprobs_mode": "processed_logprobs",
        "seed": 1,
        **options,
    }
    if torch.cuda.is_available():
        given.setdefault("gpu_memory_utilization", 0.2)
    return LLM(model=str(model), **given)


class HeadProbe:
    """Looks at what a live engine's head gets, and holds it against the log-probs that the engine reports."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.model = llm.apply_model(lambda model: model)[0]
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        (self.processor,) = [module for module in self.model.modules() if isinstance(module, LogitsProcessor)]
        self.hidden: list[torch.Tensor] = []
        self.processor.register_forward_hook(self._remember, with_kwargs=True)

    def _remember(self, _: Any, args: tuple, kwargs: dict, logits: torch.Tensor) -> None:
        self.head = args[0]
        self.hidden.append(args[1].clone())
        self.logits_dtype = str(logits.dtype).removeprefix("torch.")

    def largest_error(self, **sampling: Any) -> float:
        """Largest error of the sampled tokens' log-probs over some requests; inf if one is not finite.

        Args:
            sampling: for vLLM's SamplingParams, such as ``top_p``, whose renormalisation the reference follows.
        """
        from vllm import SamplingParams

        worst, self.mean_logp = 0.0, 0.0
        for seed in range(NUM_PROMPTS):
            # Equal requests: however the engine orders its batch, each row of a step is the same token.
            prompts = [{"prompt_token_ids": [3 + seed, 5, 7 * seed + 2]}] * BATCH
            params = SamplingParams(
                max_tokens=NUM_TOKENS, logprobs=0, seed=seed, ignore_eos=True, detokenize=False, **sampling
            )
            self.hidden.clear()
            outputs = [output.outputs[0] for output in self.llm.generate(prompts, params, use_tqdm=False)]
            assert len({tuple(output.token_ids) for output in outputs}) == 1, "equal requests, unequal tokens"
            steps = self.hidden[:NUM_TOKENS]
            assert len(steps) == NUM_TOKENS and {len(step) for step in steps} == {BATCH}, "one batch a step"
            for at, hidden in enumerate(steps):
                logits = float64_logits(hidden, self.head.weight[:VOCAB_SIZE])
                reference = reference_logp(logits, **sampling)
                for row, output in enumerate(outputs):
                    token = output.token_ids[at]
                    error = abs(output.logprobs[at][token].logprob - reference[row, token].item())
                    worst = max(worst, error if error == error else float("inf"))
                    self.mean_logp += reference[row, token].item() / (NUM_TOKENS * NUM_PROMPTS * BATCH)
        return worst

    def change_head(self) -> None:
        """Load another head weight into the live model, as a weight update does; of a tied one, its embedding only."""
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator).mul(HEAD_STD).bfloat16()
        tied = self.model.lm_head.weight is self.model.model.embed_tokens.weight
        before = self.head.weight.clone()
        self.model.load_weights([("model.embed_tokens.weight" if tied else "lm_head.weight", weight)])
        assert not torch.equal(before, self.head.weight), "the update did not reach the head"


def reference_logp(logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0) -> torch.Tensor:
    """Float64 log-probs of the distribution that is sampled: the smallest set of tokens with probability top_p."""
    logp = torch.log_softmax(logits / temperature, dim=-1)
    if top_p == 1.0:
        return logp
    ordered, order = logp.exp().sort(dim=-1)
    cut = ordered.cumsum(dim=-1) <= 1 - top_p
    cut[:, -1] = False
    dropped = torch.zeros_like(cut).scatter(1, order, cut)
    return torch.log_softmax(logp.masked_fill(dropped, -torch.inf), dim=-1)


def run_case(folder: Path, case: str) -> dict[str, Any]:
    """Everything that is measured on one engine."""
    import vllm.envs
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from scalerl_verl.head.vllm import is_native, make_layer

    kind, *flags = case.split("-")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int("v2" in flags))
    vllm.envs.disable_envs_cache()  # an engine that started before has frozen what it read
    model = save_model(folder / kind, tied=kind == "tied")
    llm = start_engine(model, **({"enable_sleep_mode": True} if "sleep" in flags else {}))
    probe = HeadProbe(llm)
    found = {
        "error": probe.largest_error(temperature=1.0),
        "mean_logp": probe.mean_logp,
        "dtype": probe.logits_dtype,
        "weight_dtype": str(probe.head.weight.dtype).removeprefix("torch."),
        "padded_columns": len(probe.head.weight) - VOCAB_SIZE,
        "layer": type(probe.processor).__name__,
        "runner": type(llm.llm_engine.model_executor.driver_worker.worker.model_runner).__module__,
        "error_at_temperature": probe.largest_error(temperature=0.7),
        "error_top_p": probe.largest_error(temperature=1.0, top_p=0.9),
    }
    if "sleep" in flags:
        weights = {name: value.clone() for name, value in probe.model.state_dict().items()}
        llm.sleep(level=2)
        llm.wake_up()
        for name, value in probe.model.state_dict().items():
            value.copy_(weights[name])
        found["error_after_sleep"] = probe.largest_error(temperature=1.0)
    probe.change_head()
    found["error_after_update"] = probe.largest_error(temperature=1.0)
    if not is_native(LogitsProcessor):
        probe.processor.fp32_head = False
    else:
        # What runs on an older vLLM, in this engine: its layer in the place of the native one, which does nothing.
        probe.processor.head_dtype = None
        probe.processor.__class__ = make_layer(LogitsProcessor)
        probe.processor.fp32_head = True
        found["error_of_replacement"] = probe.largest_error(temperature=1.0)
        found["replacement_dtype"] = probe.logits_dtype
        probe.processor.fp32_head = False
    found["error_without"] = probe.largest_error(temperature=1.0)
    found["dtype_without"] = probe.logits_dtype
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    for case in sys.argv[2:]:
        found = run_case(folder, case)
        from scalerl_verl.upstream import status

        found["record"] = status.read_facts("fp32_head")[-1]
        (folder / f"{case}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
