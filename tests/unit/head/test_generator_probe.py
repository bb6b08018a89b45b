# SPDX-License-Identifier: Apache-2.0
"""The engine's check of its head, and the layer for older vLLM: on vLLM's real layer in a small model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from scalerl_verl.errors import HeadError
from scalerl_verl.head.precision import MAX_RELATIVE_ERROR, probe_hidden_states
from scalerl_verl.head.vllm import asks_for_fp32, make_layer, refuse_unsupported
from scalerl_verl.head.vllm_probe import judge_head, measure_head

VOCAB_SIZE, HIDDEN = 100, 256


def make_processor(head_dtype: torch.dtype | None, **options: Any) -> LogitsProcessor:
    with set_current_vllm_config(VllmConfig()):
        processor = LogitsProcessor(VOCAB_SIZE, **options)
    processor.head_dtype = head_dtype
    return processor


def make_head(dtype: torch.dtype = torch.bfloat16, start: int = 0, padding: int = 28) -> SimpleNamespace:
    """What vLLM's layer reads of a head: weight, its method, the shard of the vocabulary."""
    torch.manual_seed(start)
    shard = SimpleNamespace(num_org_elements=VOCAB_SIZE, org_vocab_start_index=start, num_org_vocab_padding=padding)
    weight = torch.randn(VOCAB_SIZE + padding, HIDDEN).to(dtype)
    return SimpleNamespace(weight=weight, quant_method=_Plain(), shard_indices=shard, tp_size=1)


class _Plain(UnquantizedEmbeddingMethod):
    """vLLM's method without its dispatch, which wants a loaded layer."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class Model(torch.nn.Module):
    """A model of vLLM as far as logits are concerned; it scales its hidden states first, as MiniCPM does."""

    def __init__(self, processor: Any, lm_head: Any, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.logits_processor = processor
        self.lm_head, self.bias = lm_head, bias

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden / 2, self.bias)


def probe(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return probe_hidden_states(HIDDEN, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "with_bias"), [({}, False), ({"soft_cap": 5.0, "scale": 0.25}, False), ({}, True)], ids=str
)
def test_fp32_head_passes_with_whatever_the_layer_adds(options: dict[str, Any], with_bias: bool) -> None:
    lm_head = make_head()
    bias = torch.randn(len(lm_head.weight)).bfloat16() if with_bias else None
    record = measure_head(Model(make_processor(torch.float32, **options), lm_head, bias), LogitsProcessor, probe())
    assert record is not None and judge_head(record) is None
    assert (record["side"], record["dtype"], record["weight_dtype"]) == ("generator", "float32", "bfloat16")


@pytest.mark.fault("flag of the head read outside of the engine's context, or ignored: no effect, no word")
def test_bf16_head_is_refused_with_its_numbers() -> None:
    record = measure_head(Model(make_processor(None), make_head()), LogitsProcessor, probe())
    assert record is not None
    problem = judge_head(record)
    assert problem is not None and "bfloat16 logits" in problem
    assert f"{record['max_abs_error']:.2g} at most" in problem
    assert record["relative_error"] > 50 * MAX_RELATIVE_ERROR


@pytest.mark.fault("TF32 allowed in the engine: FP32 logits of 10 bits")
def test_tf32_operands_are_refused_though_the_logits_are_fp32() -> None:
    """TF32 keeps 10 bits of mantissa; here by masking, as a CPU has none."""

    class Tf32(_Plain):
        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            def cut(tensor: torch.Tensor) -> torch.Tensor:
                return (tensor.view(torch.int32) & -8192).view(torch.float32)

            return cut(x) @ cut(layer.weight).t()

    lm_head = make_head(torch.float32)
    model = Model(make_processor(None), lm_head)
    exact = measure_head(model, LogitsProcessor, probe(torch.float32))
    lm_head.quant_method = Tf32()
    cut = measure_head(model, LogitsProcessor, probe(torch.float32))
    assert exact is not None and judge_head(exact) is None
    assert cut is not None and cut["dtype"] == "float32" and judge_head(cut) is not None


def test_nan_logits_are_refused() -> None:
    lm_head = make_head()
    lm_head.weight[0, 0] = torch.nan
    record = measure_head(Model(make_processor(torch.float32), lm_head), LogitsProcessor, probe())
    assert record is not None and judge_head(record) is not None


def test_each_rank_compares_its_own_shard() -> None:
    """The second of two ranks: its first row is token 100."""
    lm_head = make_head(start=VOCAB_SIZE)
    processor = make_processor(torch.float32)
    processor.org_vocab_size = 2 * VOCAB_SIZE
    lm_head.tp_size = 2
    processor._gather_logits = lambda mine: torch.cat([torch.zeros(len(mine), VOCAB_SIZE), mine], dim=-1)
    record = measure_head(Model(processor, lm_head), LogitsProcessor, probe())
    assert record is not None and judge_head(record) is None
    processor._gather_logits = lambda mine: None
    assert measure_head(Model(processor, lm_head), LogitsProcessor, probe()) is None


@pytest.mark.fault("LoRA in the generator bypasses the FP32 head")
def test_a_lora_layer_is_measured_by_what_it_wraps() -> None:
    class WithLoRA(torch.nn.Module):
        """As vLLM's: adapters need a batch that names one, which a probe has not."""

        def __init__(self, base_layer: LogitsProcessor) -> None:
            super().__init__()
            self.base_layer = base_layer

        def forward(self, *_: Any) -> None:
            raise RuntimeError("no adapter mapping")

    wrapper = WithLoRA(make_processor(torch.float32))
    lm_head = SimpleNamespace(base_layer=make_head())
    record = measure_head(Model(wrapper, lm_head), LogitsProcessor, probe())
    assert record is not None and judge_head(record) is None
    with pytest.raises(RuntimeError, match="no adapter mapping"):
        wrapper(None)


def test_a_model_with_logits_of_its_own_is_refused() -> None:
    class Own(Model):
        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden.float() @ self.lm_head.weight.float().t()

    with pytest.raises(HeadError, match="Own, which does not compute its logits"):
        measure_head(Own(make_processor(torch.float32), make_head()), LogitsProcessor, probe())


@pytest.mark.parametrize(
    ("given", "runner", "expected"),
    [
        (None, "generate", False),
        ("model", "generate", False),
        ("bfloat16", "generate", False),
        (torch.bfloat16, "generate", False),
        ("float32", "generate", True),
        ("Float", "generate", True),
        (torch.float32, "generate", True),
        ("float32", "pooling", False),
    ],
)
def test_request_is_read_from_the_hf_config(given: Any, runner: str, expected: bool) -> None:
    hf_config = SimpleNamespace() if given is None else SimpleNamespace(head_dtype=given)
    config = SimpleNamespace(runner_type=runner, hf_config=hf_config, dtype=torch.bfloat16)
    assert asks_for_fp32(config) is expected


def test_a_narrower_head_is_refused() -> None:
    config = SimpleNamespace(
        runner_type="generate", hf_config=SimpleNamespace(head_dtype="float16"), dtype=torch.bfloat16
    )
    with pytest.raises(HeadError, match="head_dtype=float16"):
        asks_for_fp32(config)


@pytest.mark.fault("LoRA in the generator bypasses the FP32 head")
def test_what_the_older_layer_does_not_cover_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**given: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"lora_config": None, "speculative_config": None, **given})

    refuse_unsupported(config(), native=False)
    refuse_unsupported(config(lora_config=object(), speculative_config=object()), native=True)
    with pytest.raises(HeadError, match="LoRA"):
        refuse_unsupported(config(lora_config=object()), native=False)
    with pytest.raises(HeadError, match="speculative"):
        refuse_unsupported(config(speculative_config=object()), native=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(HeadError, match="VLLM_BATCH_INVARIANT"):
        refuse_unsupported(config(), native=True)


def make_replacement(**options: Any) -> Any:
    """The layer for vLLM before 0.26, with vLLM's own FP32 head switched off."""
    with set_current_vllm_config(VllmConfig()):
        processor = make_layer(LogitsProcessor)(VOCAB_SIZE, **options)
    processor.head_dtype = None
    return processor


def test_replacement_does_nothing_unless_the_model_asks() -> None:
    """Bitwise what vLLM's own layer gives."""
    lm_head, hidden = make_head(), probe()
    theirs = make_processor(None)(lm_head, hidden)
    assert torch.equal(make_replacement()(lm_head, hidden), theirs) and theirs.dtype == torch.bfloat16


@pytest.mark.fault("weights synced into the generator, a cached FP32 copy serves the old head")
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_replacement_is_fp32_and_keeps_no_copy_of_the_weight(weight_dtype: torch.dtype) -> None:
    """Field: weights synced into the generator, a cached FP32 copy keeps serving the old head."""
    processor, lm_head, hidden = make_replacement(soft_cap=20.0), make_head(weight_dtype), probe()
    processor.fp32_head = True
    for _ in range(2):
        logits = processor(lm_head, hidden)
        assert logits.dtype == torch.float32 and logits.shape == (len(hidden), VOCAB_SIZE)
        truth = torch.tanh(hidden.double() @ lm_head.weight[:VOCAB_SIZE].double().t() / 20) * 20
        torch.testing.assert_close(logits.double(), truth, rtol=0, atol=1e-4)
        lm_head.weight.neg_()
    assert lm_head.weight.dtype == weight_dtype


def test_replacement_finds_the_top_token_of_fp32_logits() -> None:
    """Two tokens that bf16 logits cannot tell apart; the later one is larger."""
    processor, lm_head = make_replacement(), make_head()
    processor.fp32_head = True
    hidden = torch.ones(1, HIDDEN).bfloat16()
    lm_head.weight.zero_()
    lm_head.weight[3], lm_head.weight[5] = 1.0, 1.0
    lm_head.weight[5, 0] = 1.0078125
    assert processor.get_top_tokens(lm_head, hidden).tolist() == [5]
    processor.fp32_head = False
    assert processor.get_top_tokens(lm_head, hidden).tolist() == [3]


def test_replacement_refuses_a_quantised_head() -> None:
    processor, lm_head = make_replacement(), make_head()
    processor.fp32_head = True
    lm_head.quant_method = object()
    with pytest.raises(HeadError, match="unquantised LM head, this one uses object"):
        processor(lm_head, probe())
