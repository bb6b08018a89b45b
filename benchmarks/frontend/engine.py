# SPDX-License-Identifier: Apache-2.0
"""A model of random weights, and verl's server around vLLM in this process, as a run starts it."""

from __future__ import annotations

import itertools
import json
import os
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Size:
    """A Qwen3 with tied embeddings. Few KV heads, so that many long responses fit at once."""

    hidden: int
    layers: int
    heads: int
    head_dim: int = 128
    kv_heads: int = 2
    vocab: int = 151_936

    @property
    def num_params(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.vocab * self.hidden + self.layers * (attention + 9 * self.hidden**2)


SIZES = {
    "tiny": Size(64, 2, 2, head_dim=32, kv_heads=1, vocab=1000),
    "0.28B": Size(1024, 9, 16),
    "2B": Size(2048, 36, 16),
}


def make_tokenizer(vocab: int) -> Any:
    """Bytes and made-up words, one a token: turning ids into text costs what it costs with a real one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"\u0120{''.join(w)}" for n in (2, 3, 4) for w in itertools.product(string.ascii_lowercase, repeat=n))
    tokens = ["<|end|>", *byte_tokens, *itertools.islice(words, vocab - len(byte_tokens) - 1)]
    core = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")


def make_model(folder: Path, size: Size, max_length: int, dtype: str) -> None:
    """Config and tokenizer; vLLM makes the weights."""
    from transformers import Qwen3Config

    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=max_length,
        eos_token_id=0,
        bos_token_id=0,
        dtype=dtype,
    ).save_pretrained(folder)
    make_tokenizer(size.vocab).save_pretrained(folder)


def make_config(folder: Path, prompt: int, response: int, requests: Sequence[int], more: Sequence[str] = ()) -> Any:
    """verl's config of such a rollout, checked as that of a run."""
    import verl  # noqa: F401 - on a CPU its plugin has to be installed, which puts the preset on Hydra's search path
    from hydra import compose, initialize_config_module

    from scalerl_verl.names import FAST_FRONTEND

    on_cpu = os.environ.get("VERL_PLATFORM") == "cpu"
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        *(["+scalerl=cpu"] if on_cpu else []),
        f"+{FAST_FRONTEND}=True",
        f"actor_rollout_ref.model.path={folder}",
        f"{rollout}.name=vllm",
        f"{rollout}.load_format=dummy",
        f"{rollout}.prompt_length={prompt}",
        f"{rollout}.response_length={response}",
        f"{rollout}.max_model_len={prompt + response}",
        f"{rollout}.max_num_seqs={max(requests)}",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.free_cache_engine=False",
        f"++{rollout}.enable_sleep_mode=False",
    ]
    if not on_cpu:
        sizes = sorted({1, 2, 4, 8, 16, 32, 64, 128, *requests})
        overrides += [
            f"{rollout}.gpu_memory_utilization=0.85",
            f"{rollout}.enforce_eager=False",
            f"{rollout}.cudagraph_capture_sizes={json.dumps(sizes)}",
        ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*overrides, *more])


async def start_server(config: Any) -> Any:
    """Our server with verl's own constructor and launch, in this process in the place of a Ray actor."""
    import ray
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutMode

    from scalerl_verl.generator import frontend
    from scalerl_verl.generator.server import ScaleRLHttpServer

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    frontend.complete(config)
    server = ScaleRLHttpServer(
        config=omega_conf_to_dataclass(config.actor_rollout_ref.rollout),
        model_config=config.actor_rollout_ref.model,
        rollout_mode=RolloutMode.STANDALONE,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=1,
        nnodes=1,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
    )
    await server.launch_server()
    return server
