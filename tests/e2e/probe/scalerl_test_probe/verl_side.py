# SPDX-License-Identifier: Apache-2.0
"""Trainer side (and the worker extension that verl puts into vLLM's workers)."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from scalerl_test_probe import trainer_side  # noqa: F401 - installs itself as far as the environment asks for it
from scalerl_verl.upstream.import_hooks import after_import


def _record_sent(module: ModuleType) -> None:
    original = module.FSDPEngine.get_per_tensor_param
    count = itertools.count()

    @functools.wraps(original)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        weights, peft_config = original(self, *args, **kwargs)
        rank = int(os.environ.get("RANK", 0))
        folder, number = os.environ["PROBE_DIR"], next(count)

        def tee() -> Any:
            seen = {}
            for name, tensor in weights:
                seen[name] = tensor.detach().clone()
                yield name, tensor
            if rank == 0:
                torch.save(seen, f"{folder}/sent-{number}.pt")

        return tee(), peft_config

    module.FSDPEngine.get_per_tensor_param = get_per_tensor_param


def _record_held(module: ModuleType) -> None:
    extension = module.vLLMColocateWorkerExtension
    original = extension.update_weights_from_ipc
    count = itertools.count()

    @functools.wraps(original)
    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        number = next(count)
        if os.environ.get("PROBE_FAIL_LOAD") == str(number):
            model = self.model_runner.model

            def load_weights(*_: Any, **__: Any) -> None:
                Path(os.environ["PROBE_DIR"], "planted").touch()
                raise RuntimeError("planted fault: this engine cannot load weights")

            model.load_weights = load_weights
        result = original(self, *args, **kwargs)
        held = {name: p.detach().clone() for name, p in self.model_runner.model.named_parameters()}
        torch.save(held, f"{os.environ['PROBE_DIR']}/held-{number}.pt")
        return result

    extension.update_weights_from_ipc = update_weights_from_ipc


def _record_batches(module: ModuleType) -> None:
    """What a pipeline trainer is about to train, row by row: ``batch-<step>.pt``."""
    trainer = module.PPOTrainerPipelineRL
    original = trainer._compute_old_log_prob

    @functools.wraps(original)
    def _compute_old_log_prob(self: Any, batch: Any, metrics: Any) -> Any:
        import torch
        import transfer_queue as tq

        from scalerl_verl.columns import objects_of

        fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "extra_fields", "raw_prompt"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = {name: list(data[name].unbind()) for name in fields[:4]}
        rows.update({name: objects_of(data[name]) for name in fields[4:]})
        rows.update(keys=list(batch.keys), tags=list(batch.tags))
        torch.save(rows, f"{os.environ['PROBE_DIR']}/batch-{self.global_steps}.pt")
        return original(self, batch, metrics)

    trainer._compute_old_log_prob = _compute_old_log_prob


def _record_gradient(module: ModuleType) -> None:
    original = module.FSDPEngine.optimizer_step

    @functools.wraps(original)
    def optimizer_step(self: Any) -> Any:
        import torch

        # Before it is clipped. Gathering takes part of every rank.
        gradient = {name: p.grad.full_tensor().clone() for name, p in self.module.named_parameters()}
        if int(os.environ.get("RANK", 0)) == 0:
            torch.save(gradient, f"{os.environ['PROBE_DIR']}/gradient.pt")
        return original(self)

    module.FSDPEngine.optimizer_step = optimizer_step


def _slow_down_checkpoints(module: ModuleType) -> None:
    """A stand-in for a slow disk, while there is a file ``slow_checkpoint``."""
    save = module.FSDPEngine.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(os.environ["PROBE_DIR"], "slow_checkpoint").exists():
            time.sleep(float(os.environ["PROBE_SLOW_CHECKPOINT"]))
        return save(self, *args, **kwargs)

    module.FSDPEngine.save_checkpoint = save_checkpoint


def _seed_responses(module: ModuleType) -> None:
    """A response samples by its group and its number in it, whichever request reaches the engine first."""
    run = module.AgentLoopWorker._run_agent_loop

    @functools.wraps(run)
    async def _run_agent_loop(self: Any, sampling_params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        seed = zlib.crc32(f"{kwargs['uid']}_{kwargs['session_id']}".encode())
        return await run(self, {**sampling_params, "seed": seed}, *args, **kwargs)

    module.AgentLoopWorker._run_agent_loop = _run_agent_loop


def _die_in_transfer(module: ModuleType) -> None:
    """The worker that receives weights for a generator gets SIGKILL after the first of its n-th transfer."""
    buffer = module.StagingBuffer
    begin, put = buffer.begin, buffer.put
    begun: list[Any] = []

    def count(self: Any) -> None:
        begun.append(self)
        begin(self)

    def die(self: Any, name: str, weight: Any) -> None:
        put(self, name, weight)
        if len(begun) == int(os.environ["PROBE_DIE_IN_TRANSFER"]):
            Path(os.environ["PROBE_DIR"], "planted").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    buffer.begin, buffer.put = count, die


if os.environ.get("PROBE_DIR"):
    after_import("scalerl_verl.pipeline.trainer", _record_batches)
    after_import("verl.workers.engine.fsdp.transformer_impl", _record_sent)
    if os.environ.get("PROBE_TOGGLES"):
        after_import("verl.workers.engine.fsdp.transformer_impl", _record_gradient)
    if os.environ.get("PROBE_SLOW_CHECKPOINT"):
        after_import("verl.workers.engine.fsdp.transformer_impl", _slow_down_checkpoints)
    after_import("verl.workers.rollout.vllm_rollout.utils", _record_held)
    if os.environ.get("PROBE_DIE_IN_TRANSFER"):
        after_import("scalerl_verl.pipeline.staging", _die_in_transfer)
if os.environ.get("PROBE_SEED"):
    after_import("verl.experimental.agent_loop.agent_loop", _seed_responses)
