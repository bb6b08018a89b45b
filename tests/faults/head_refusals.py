# SPDX-License-Identifier: Apache-2.0
"""Child program of test_fp32_head: engines that must not start, and one that trains a tied model for a step.

python head_refusals.py FOLDER; writes FOLDER/found.json: fault -> what happened.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

from scalerl_verl.errors import HeadError
from scalerl_verl.head import verl_check as head_check
from scalerl_verl.loss.verl_config import ScaleRLPolicyLossConfig
from tests.unit.head.head_engines import Case, make_data, make_engine


def refusal(start: Callable[[], Any]) -> str:
    try:
        start()
    except HeadError as error:
        return str(error)
    return "started"


def lora_on(folder: Path, model: str, *modules: str) -> Callable[[], Any]:
    return lambda: make_engine(folder, Case(model=model, lora=True), target_modules=["q_proj", *modules])


def saved_modules(folder: Path) -> Any:
    """An adapter that somebody trained with a full copy of the output layer beside it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "qwen3")
    settings = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(folder / "adapter")
    return make_engine(folder, Case(lora=True), lora_adapter_path=str(folder / "adapter"))


def taken_off(folder: Path) -> Any:
    """Something between the head and the sharding, which verl's engine has between both, put the layer back."""
    original = transformer_impl.FSDPEngine._build_lora_module

    def build(self: Any, module: Any) -> Any:
        del module.lm_head.forward
        return original(self, module)

    with mock.patch.object(transformer_impl.FSDPEngine, "_build_lora_module", build):
        return make_engine(folder, Case(fused=False, lora=True), target_modules=["q_proj"])


def undone_after_the_head(folder: Path) -> Any:
    """Something that rounds logits on the way, put on by whoever builds the model's FSDP units."""
    original = transformer_impl.FSDPEngine._build_fsdp_module

    def build(self: Any, module: Any) -> Any:
        module.lm_head.forward = functools.partial(torch.nn.Linear.forward, module.lm_head)
        return original(self, module)

    with mock.patch.object(transformer_impl.FSDPEngine, "_build_fsdp_module", build):
        return make_engine(folder, Case(fused=False, param_dtype="bf16"))


def in_less_than_fp32(folder: Path, fused: bool) -> Any:
    """The same head, its logits rounded to bf16 as verl's torch backend does."""
    logits, logp = head_check.fp32_logits, head_check.linear_logprobs

    def rounded(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Any:
        return logp(logits(hidden, weight).bfloat16().float(), torch.eye(len(weight)), labels)

    with (
        mock.patch.object(head_check, "fp32_logits", lambda *args: logits(*args).bfloat16().float()),
        mock.patch.object(head_check, "linear_logprobs", rounded),
    ):
        return make_engine(folder, Case(fused=fused, param_dtype="bf16"))


def train_tied(folder: Path, fused: bool) -> dict[str, Any]:
    """One optimizer step of a bf16 model with tied weights: what the head says before and after, and dtypes."""
    case = Case(model="qwen3-tied", param_dtype="bf16", fused=fused)
    engine = make_engine(folder, case)
    embedded: list[torch.dtype] = []
    engine.module.get_input_embeddings().register_forward_hook(lambda *args: embedded.append(args[2].dtype))
    data = make_data(case, 97, 0)
    config = FSDPActorConfig(
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=ScaleRLPolicyLossConfig(loss_mode="scalerl_cispo"),
    )
    storage = {name: id(parameter) for name, parameter in engine.module.named_parameters()}

    def score() -> torch.Tensor:
        with engine.eval_mode(), torch.no_grad():
            output = engine.forward_backward_batch(data.clone(), None, forward_only=True)
        return output["model_output"]["log_probs"].values()

    before = score()
    # An update of the embedding alone, as a sparse weight sync makes one: the head has to say the same weights' words.
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.grad = None
        engine.module.get_input_embeddings().weight.mul_(0.0)
    uniform = score()
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(data, functools.partial(ppo_loss, config=config), forward_only=False)
    return {
        "moved": float((before - uniform).abs().max()),
        "from_uniform": float((uniform + torch.log(torch.tensor(97.0))).abs().max()),
        "embedded": sorted({str(dtype) for dtype in embedded}),
        "stored": sorted({str(parameter.dtype) for parameter in engine.module.parameters()}),
        "same_parameters": storage == {name: id(parameter) for name, parameter in engine.module.named_parameters()},
        "state": sorted(engine.module.state_dict()),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    torch.set_num_threads(1)
    faults: dict[str, Callable[[], Any]] = {
        "lora on the head": lora_on(folder, "qwen3", "lm_head"),
        "lora on the embedding": lora_on(folder, "qwen3-tied", "embed_tokens"),
        "saved modules": lambda: saved_modules(folder),
        "taken off": lambda: taken_off(folder),
        "undone": lambda: undone_after_the_head(folder),
        "bf16 logits": lambda: in_less_than_fp32(folder, fused=False),
        "bf16 logits, fused": lambda: in_less_than_fp32(folder, fused=True),
        "nothing wrong": lambda: make_engine(folder, Case(param_dtype="bf16")),
    }
    found: dict[str, Any] = {name: refusal(start) for name, start in faults.items()}
    found |= {f"tied, {kind}": train_tied(folder, kind == "fused") for kind in ("fused", "logits")}
    (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
