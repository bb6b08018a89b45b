# SPDX-License-Identifier: Apache-2.0
"""What a composed config says about GPUs, batches, lengths and precision, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from scalerl_verl import names
from scalerl_verl.errors import ScaleRLConfigError
from scalerl_verl.names import ACTOR, FSDP, FUSED_KERNELS, GROUP_SIZE, HYBRID_ENGINE, MODEL, ROLLOUT, VLLM, select
from scalerl_verl.names.asking import is_bypassed, trainer_mode
from scalerl_verl.names.keys import value_of
from scalerl_verl.pipeline.transfer import BYTES, SEPARATE, Transfer, read_transfer
from scalerl_verl.planning.adapters import Adapters, read_adapters
from scalerl_verl.planning.generator import GeneratorSetup
from scalerl_verl.planning.trainer import TrainerSetup
from scalerl_verl.shapes import ModelShape

GIB = 2**30


@dataclass(frozen=True)
class RunLayout:
    """A run as far as planning is concerned; `read_layout` says which key each field comes from."""

    mode: str
    shares_gpus: bool
    trainer_gpus: int
    generator_gpus: int
    prompts: int
    prompts_per_update: int
    group_size: int
    max_prompt: int
    max_response: int
    max_model_len: int
    max_staleness: int
    request_timeout_s: float
    sequence_parallel: int
    fsdp_size: int
    node_gpus: int
    trainer_node_gpus: int
    dynamic_batches: bool
    micro_batch: int
    token_budget: int
    data_parallel: int
    keeps_old_log_probs: bool
    offloads_weights: bool
    offloads_optimizer: bool
    trainer: TrainerSetup
    generator: GeneratorSetup

    @property
    def separate(self) -> bool:
        """Whether generators have GPUs of their own."""
        return self.mode in SEPARATE

    @property
    def sequences_per_update(self) -> int:
        """Responses of one optimizer step."""
        return self.prompts_per_update * self.group_size

    @property
    def updates_per_batch(self) -> float:
        """Optimizer steps on one generated batch."""
        return self.prompts / self.prompts_per_update

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one generating engine."""
        return self.generator.tensor_parallel * self.data_parallel

    @property
    def engines_per_node(self) -> int:
        """Engines on one node that generates, those that begin there."""
        return max(min(self.node_gpus, self.generator_gpus) // self.gpus_per_engine, 1)


def read_layout(config: DictConfig, shape: ModelShape, gpu_gib: float, reserve_gib: float) -> RunLayout:
    """Read a composed config.

    Args:
        config: verl's, composed with a recipe.
        shape: of its model.
        gpu_gib: memory of a GPU, GiB.
        reserve_gib: of it, what neither weights nor tensors take, GiB.

    Raises:
        ScaleRLConfigError: an engine or adapters whose memory is not estimated here.
    """
    _refuse_unknown(config)
    mode = trainer_mode(config)
    separate = mode in SEPARATE
    trainer_gpus = int(select(config, "trainer.nnodes", 1)) * int(select(config, "trainer.n_gpus_per_node", 1))
    others = int(select(config, f"{ROLLOUT}.nnodes", 0)) * int(select(config, f"{ROLLOUT}.n_gpus_per_node", 0))
    prompts = int(select(config, "data.train_batch_size"))
    sequence_parallel = int(select(config, f"{FSDP}.ulysses_sequence_parallel_size", 1))
    sequence_parallel = max(sequence_parallel, int(select(config, f"{ACTOR}.ulysses_sequence_parallel_size", 1)))
    max_prompt, max_response = (int(select(config, f"{ROLLOUT}.{k}")) for k in ("prompt_length", "response_length"))
    dynamic = bool(select(config, f"{ACTOR}.use_dynamic_bsz", False))
    budget = int(select(config, f"{ACTOR}.ppo_max_token_len_per_gpu", 0))
    micro = int(select(config, f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0))
    tokens = budget if dynamic else -(-max(micro, 1) * (max_prompt + max_response) // sequence_parallel)
    max_model_len = int(_vllm(config, "max_model_len", "max_model_len", shape.max_positions))
    fsdp_size = int(select(config, f"{FSDP}.fsdp_size", -1))
    node_gpus = int(select(config, f"{ROLLOUT if separate else 'trainer'}.n_gpus_per_node", 1))
    transfer = read_transfer(config)
    return RunLayout(
        mode=mode,
        shares_gpus=not separate or bool(select(config, HYBRID_ENGINE, True)),
        trainer_gpus=trainer_gpus,
        generator_gpus=others if separate else trainer_gpus,
        prompts=prompts,
        prompts_per_update=int(select(config, f"{ACTOR}.ppo_mini_batch_size", prompts)),
        group_size=int(select(config, GROUP_SIZE, 1)),
        max_prompt=max_prompt,
        max_response=max_response,
        max_model_len=max_model_len,
        max_staleness=int(value_of(config, names.MAX_STALENESS)) if mode == names.PIPELINE_RL else 0,
        request_timeout_s=float(value_of(config, names.REQUEST_TIMEOUT)),
        sequence_parallel=sequence_parallel,
        fsdp_size=fsdp_size,
        node_gpus=node_gpus,
        trainer_node_gpus=int(select(config, "trainer.n_gpus_per_node", 1)),
        dynamic_batches=dynamic,
        micro_batch=micro,
        token_budget=budget,
        data_parallel=int(select(config, f"{ROLLOUT}.data_parallel_size", 1)),
        keeps_old_log_probs=is_bypassed(config),
        offloads_weights=bool(select(config, f"{FSDP}.param_offload", False)),
        offloads_optimizer=bool(select(config, f"{FSDP}.optimizer_offload", False)),
        trainer=_trainer_setup(
            config,
            tokens,
            max_prompt + max_response,
            num_shards(trainer_gpus, fsdp_size),
            transfer,
            read_adapters(config, shape, mode),
        ),
        generator=_generator_setup(config, transfer, gpu_gib * GIB, reserve_gib * GIB, max_model_len),
    )


def num_shards(trainer_gpus: int, fsdp_size: int) -> int:
    """GPUs over which verl shards weights."""
    return trainer_gpus if fsdp_size < 0 or fsdp_size >= trainer_gpus else fsdp_size


def _refuse_unknown(config: DictConfig) -> None:
    strategy = select(config, f"{ACTOR}.strategy", "fsdp")
    problems = []
    if strategy not in ("fsdp", "fsdp2"):
        problems.append(f"{ACTOR}.strategy={strategy}: plan knows the memory of fsdp and fsdp2 only")
    if select(config, "critic.enable", False):
        problems.append("critic.enable=True: plan does not count a value network; set critic.enable=False")
    if select(config, f"{ROLLOUT}.name", "vllm") != "vllm":
        problems.append(f"{ROLLOUT}.name={select(config, f'{ROLLOUT}.name')}: plan knows vLLM's memory only")
    if problems:
        raise ScaleRLConfigError(problems)


def _vllm(config: DictConfig, own: str, ours: str, default: Any) -> Any:
    """A setting as vLLM gets it: verl lets ``engine_kwargs.vllm`` override its own keys."""
    return select(config, f"{VLLM}.{own}", select(config, f"{ROLLOUT}.{ours}", default))


def _bytes(path: str, name: Any) -> int:
    text = str(name).removeprefix("torch.")
    if text not in BYTES:
        raise ScaleRLConfigError([f"{path}={name}: plan knows {', '.join(BYTES)}"])
    return BYTES[text]


def _trainer_setup(
    config: DictConfig, tokens: int, longest: int, shards: int, transfer: Transfer, adapters: Adapters | None
) -> TrainerSetup:
    mixed = f"{FSDP}.mixed_precision"
    return TrainerSetup(
        num_shards=shards,
        tokens=tokens,
        master_bytes=_bytes(f"{FSDP}.model_dtype", select(config, f"{FSDP}.model_dtype", "fp32")),
        compute_bytes=_bytes(f"{mixed}.param_dtype", select(config, f"{mixed}.param_dtype", "bf16")),
        reduce_bytes=_bytes(f"{mixed}.reduce_dtype", select(config, f"{mixed}.reduce_dtype", "fp32")),
        checkpointing=bool(select(config, f"{MODEL}.enable_gradient_checkpointing", True)),
        fused_head=bool(select(config, FUSED_KERNELS, False)),
        reshard=bool(select(config, f"{FSDP}.reshard_after_forward", True)),
        defer_sync=bool(select(config, f"{FSDP}.use_no_sync_for_gradient_accumulation", False)),
        cpu_offload=bool(select(config, f"{FSDP}.offload_policy", False)),
        transfer=transfer,
        padded_length=0 if select(config, f"{MODEL}.use_remove_padding", True) else longest,
        adapters=adapters,
    )


def _generator_setup(
    config: DictConfig, transfer: Transfer, gpu_bytes: float, reserve_bytes: float, max_model_len: int
) -> GeneratorSetup:
    weight_bytes = _bytes(f"{ROLLOUT}.dtype", _vllm(config, "dtype", "dtype", "bfloat16"))
    cache = str(select(config, f"{VLLM}.kv_cache_dtype", "auto"))
    return GeneratorSetup(
        gpu_bytes=gpu_bytes,
        utilization=float(_vllm(config, "gpu_memory_utilization", "gpu_memory_utilization", 0.5)),
        tensor_parallel=int(_vllm(config, "tensor_parallel_size", "tensor_model_parallel_size", 1)),
        expert_parallel=int(select(config, f"{ROLLOUT}.expert_parallel_size", 1)),
        max_model_len=max_model_len,
        max_num_seqs=int(_vllm(config, "max_num_seqs", "max_num_seqs", 256)),
        max_num_batched_tokens=int(_vllm(config, "max_num_batched_tokens", "max_num_batched_tokens", 8192)),
        weight_bytes=weight_bytes,
        kv_bytes=1 if cache.startswith("fp8") else weight_bytes,
        block_tokens=int(select(config, f"{VLLM}.block_size", 16)),
        transfer=transfer,
        reserve_bytes=reserve_bytes,
    )
