# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine on a CPU: what stands in for a GPU, Transformer Engine and a bridge, and nothing else.

Real: megatron-core's GPTModel, its vocabulary-parallel embedding and output layer, DistributedDataParallel, pipeline
schedules, `finalize_model_grads`; verl's `MegatronEngineWithLMHead` from its constructor through
`forward_backward_batch`. Stubs, each with that in its name: tensors on "cuda", the generator of random numbers for
dropout (there is none), attention over packed rows (megatron-core leaves it to Transformer Engine), a norm that knows
sequence parallelism (likewise), and the bridge that would build the model from a checkpoint of transformers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch.overrides import TorchFunctionMode
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from scalerl_verl.verl.engine import _make_engine

VOCAB_SIZE, HIDDEN, LAYERS = 62, 32, 2
STD = 0.3
"""Of the weights: logits of +-10, where bf16 is coarse."""
Gradients = dict[str, torch.Tensor]


class CudaTensorsOnCpuStub(TorchFunctionMode):
    """megatron-core makes a few tensors on "cuda" by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_stubs() -> Iterator[None]:
    """Inside, megatron-core finds what it asks of a GPU. Nothing here computes."""

    class RandomNumbersStub:
        @contextlib.contextmanager
        def fork(self, *_: Any) -> Iterator[None]:
            yield

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *_: None
    for module in (tensor_parallel, tensor_parallel.random, tensor_parallel.layers):
        module.get_cuda_rng_tracker = RandomNumbersStub
    with CudaTensorsOnCpuStub():
        yield


class CausalAttentionStub(torch.nn.Module):
    """Causal attention over padded or packed rows, for Transformer Engine's; padding stands at the ends of rows."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        def attend(*parts: torch.Tensor) -> torch.Tensor:
            """[S, B, heads, D] each -> [S, B, heads * D]."""
            rows = (part.permute(1, 2, 0, 3) for part in parts)
            out = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)

        if packed_seq_params is None:
            return attend(query, key, value)
        bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
        # Packed tensors come without the dimension of the batch.
        packed = [
            attend(*(part[at:to, None] for part in (query, key, value)))[:, 0] for at, to in itertools.pairwise(bounds)
        ]
        return torch.cat(packed)


class NormStub(torch.nn.LayerNorm):
    """A norm of megatron-core's arguments whose gradients are added up over ranks under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class WithoutBridgeStub:
    """verl's engine without Megatron-Bridge: the model is made here, of weights given to it."""

    _options: dict[str, Any]
    _weights: dict[str, torch.Tensor]

    def _build_tf_config(self) -> None:
        config, dtype = self.engine_config, self._options["dtype"]
        self.is_value_model, self.param_dtype, self.bridge, self.provider, self.peft_cls = (
            False,
            dtype,
            None,
            None,
            None,
        )
        self.tf_config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            ffn_hidden_size=48,
            use_cpu_initialization=True,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            pipeline_dtype=dtype,
            autocast_dtype=dtype,
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            sequence_parallel=config.sequence_parallel,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            batch_p2p_comm=False,
        )

    def _build_megatron_module(self) -> Any:
        config = self.tf_config
        layer = get_gpt_layer_local_spec()
        layer.submodules.self_attention.submodules.core_attention = CausalAttentionStub
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = NormStub
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        num_layers = LAYERS // config.pipeline_model_parallel_size
        model = GPTModel(
            config,
            TransformerBlockSubmodules(
                layer_specs=[ModuleSpec(layer.module, submodules=layer.submodules)] * num_layers, layer_norm=NormStub
            ),
            vocab_size=self._options["num_rows"],
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=self._options["tied"],
            position_embedding_type="rope",
        )
        load(model, self._weights)
        wrapped = Float16Module(config, model) if config.bf16 else model
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        config.finalize_model_grads_func = finalize_model_grads
        return [DistributedDataParallel(config, ddp, wrapped)]


def make_engine(
    model_config: Any,
    weights: dict[str, torch.Tensor] | None,
    *,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
    **options: Any,
) -> Any:
    """Our engine over verl's, its model built; the groups of the engine before are gone.

    Args:
        model_config: what verl's engine reads of its HFModelConfig.
        weights: all weights of the model, whole; None: random ones.
        tp, pp, sp: parallelism.
        options: dtype, tied, num_rows (of the output layer, over all ranks), packed.
    """
    mpu.destroy_model_parallel()
    kind = _make_engine(MegatronEngineWithLMHead, "megatron")
    kind = type("EngineWithoutBridgeStub", (WithoutBridgeStub, kind), {})
    given = {"dtype": torch.float32, "tied": False, "num_rows": VOCAB_SIZE, **options}
    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=sp,
        use_remove_padding=given.get("packed", False),
        use_fused_kernels=model_config.use_fused_kernels,
        use_distributed_optimizer=False,
    )
    engine = kind(model_config, engine_config, None, None)
    engine._options, engine._weights = given, weights
    engine._build_tf_config()
    engine.module = engine._build_megatron_module()
    engine._maybe_enable_fused_kernels()
    return engine


def _whole_name(name: str) -> str:
    """Name of a parameter in the model without pipeline stages: layers are counted through."""
    if not name.startswith("decoder.layers."):
        return name
    head, number, rest = name[: len("decoder.layers")], *name[len("decoder.layers.") :].split(".", 1)
    offset = mpu.get_pipeline_model_parallel_rank() * LAYERS // mpu.get_pipeline_model_parallel_world_size()
    return f"{head}.{int(number) + offset}.{rest}"


def _name_in(weights: Any, name: str) -> str:
    """A tied output layer of a last stage of its own is the embedding, once more."""
    return name if name in weights else "embedding.word_embeddings.weight"


def load(model: Any, weights: dict[str, torch.Tensor] | None) -> None:
    """Fill a rank's part of the model from whole weights."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if weights is None:
            if parameter.dim() > 1:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * STD)
            continue
        whole = weights[_name_in(weights, _whole_name(name))]
        if "weight" in name and len(whole) == VOCAB_SIZE:
            # Rows of no token hold what would move every log-prob.
            whole = torch.nn.functional.pad(whole, (0, 0, 0, model.vocab_size - VOCAB_SIZE), value=0.5)
        if getattr(parameter, "tensor_model_parallel", False):
            whole = whole.chunk(mpu.get_tensor_model_parallel_world_size(), parameter.partition_dim)[
                mpu.get_tensor_model_parallel_rank()
            ]
        parameter.data.copy_(whole)


def gather_gradients(engine: Any) -> Gradients:
    """Whole gradients of all parameters by the names of a model on one rank, on every rank."""
    (chunk,) = engine.module
    mine = {}
    for name, parameter in chunk.named_parameters():
        gradient = parameter.main_grad
        name = _whole_name(name.removeprefix("module.").removeprefix("module."))
        if getattr(parameter, "tensor_model_parallel", False):
            parts = [torch.empty_like(gradient) for _ in range(mpu.get_tensor_model_parallel_world_size())]
            dist.all_gather(parts, gradient.contiguous(), group=mpu.get_tensor_model_parallel_group())
            gradient = torch.cat(parts, dim=parameter.partition_dim)
        mine[name] = gradient.clone()
    found: list[Gradients] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    whole = {name: gradient for one in found for name, gradient in one.items()}
    if engine._options["tied"]:
        whole.pop("output_layer.weight", None)
    return whole


def zero_gradients(engine: Any) -> None:
    for chunk in engine.module:
        chunk.zero_grad_buffer()


def model_of(engine: Any) -> Any:
    """The GPT model without its wrappers."""
    model = engine.module[0]
    while hasattr(model, "module"):
        model = model.module
    assert get_model_config(model) is engine.tf_config
    return model
