# SPDX-License-Identifier: Apache-2.0
"""The FP32 head against float64: values, gradients, sizes, masks, precision switches.

Tolerances. Log-probabilities: an FP32 sum over H <= 256 products and a log-sum-exp of values around 20 have errors of a
few 1e-6. Gradients with FP32 operands: 1e-5 relative. 16-bit operands: the result is rounded to 8 bits (bf16: up to
2^-8 = 3.9e-3 a number, 1.6e-3 root mean square), and on CUDA the gradient of the logits is so before its products,
which over a few tokens may be one large term each: 5e-3.
"""

from __future__ import annotations

import pytest
import torch

from scalerl_verl.head import chunked as chunked_module
from scalerl_verl.head import fp32_logits, linear_logprobs
from scalerl_verl.head.matmul import exact_fp32
from tests.unit.head.conftest import Case, make_case, relative_error

LOGP_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def run(case: Case, impl: str, with_entropy: bool = True, **options: object) -> tuple[torch.Tensor, ...]:
    """(logp, entropy, gradient of hidden, gradient of weight); the naive ones are float64 all through."""
    dtype = torch.float64 if impl == "naive" else case.hidden.dtype
    hidden = case.hidden.detach().to(dtype).requires_grad_()
    weight = case.weight.detach().to(dtype).requires_grad_()
    logp, entropy = linear_logprobs(hidden, weight, case.labels, impl=impl, **options)  # type: ignore[arg-type]
    loss = (logp * case.grad_logp).sum()
    if with_entropy:
        loss = loss + (entropy * case.grad_entropy).sum()
    loss.backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def check(case: Case, with_entropy: bool = True, **options: object) -> None:
    got = run(case, "chunked", with_entropy, **options)
    truth = run(case, "naive", with_entropy, **{k: v for k, v in options.items() if k != "chunk_rows"})
    for value, expected in zip(got[:2], truth[:2], strict=True):
        assert value.dtype == (torch.float64 if case.hidden.dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=LOGP_TOLERANCE)
    for value, expected in zip(got[2:], truth[2:], strict=True):
        assert value.dtype == case.hidden.dtype
        assert relative_error(value, expected) <= GRADIENT_TOLERANCE[case.hidden.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63, 127, 1000])
@pytest.mark.parametrize("num_vocab", [97, 256])
def test_values_and_gradients(num_tokens: int, num_vocab: int, dtype: torch.dtype, device: str) -> None:
    check(make_case(num_tokens, 64, num_vocab, dtype, device), chunk_rows=100)


@pytest.mark.parametrize("num_vocab", [1, 2, 4095, 8192, 8193, 20001])
def test_vocabularies_around_the_blocks_of_a_kernel(num_vocab: int, device: str) -> None:
    check(make_case(7, 32, num_vocab, torch.bfloat16, device))


def test_without_an_entropy_term(device: str) -> None:
    check(make_case(50, 32, 301, torch.bfloat16, device), with_entropy=False, temperature=0.6)


def test_temperature_scales_logits_and_gradients(device: str) -> None:
    case = make_case(50, 32, 301, torch.float32, device)
    check(case, temperature=0.6)
    check(case, temperature=torch.linspace(0.5, 2, 50, device=device))


def test_large_logits_stay_finite(device: str) -> None:
    """Logits of some hundreds: exp overflows unless the maximum is taken off.

    Their FP32 spacing is 6e-5, a sum of 32 products errs by a few of them: 1e-3, absolute, as exp turns it relative.
    """
    case = make_case(20, 32, 301, torch.float32, device)
    case.weight = (case.weight.detach() * 60).requires_grad_()
    got, truth = run(case, "chunked"), run(case, "naive")
    assert truth[0].min() < -300
    for value, expected in zip(got, truth, strict=True):
        assert torch.isfinite(value).all()
        assert (value - expected).norm() <= 1e-3 * max(expected.norm(), 1)


def test_chunks_do_not_show(device: str) -> None:
    """Rows are independent; only the weight's gradient is summed in another order."""
    case = make_case(64, 32, 301, torch.float32, device)
    whole = run(case, "chunked", chunk_rows=64)
    for chunk_rows in (1, 7, 63, 1000):
        parts = run(case, "chunked", chunk_rows=chunk_rows)
        for value, expected in zip(parts, whole, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_default_chunks_fit_their_budget() -> None:
    for num_columns, expected in ((151936, 3072), (32000, 14336), (600_000, 768), (10**7, 46), (10**9, 1)):
        rows = chunked_module.default_chunk_rows(num_columns)
        assert rows == expected
        assert rows == 1 or rows * num_columns * 4 <= chunked_module.CHUNK_BYTES


def test_chunks_cover_every_token_once_and_the_last_is_full() -> None:
    assert chunked_module.chunks(0, 7) == []
    for num_rows, chunk_rows in ((8192, 3072), (7, 7), (7, 100), (15, 7), (14, 7), (5, 1)):
        slices = chunked_module.chunks(num_rows, chunk_rows)
        assert [row for at in slices for row in range(at.start, at.stop)] == list(range(num_rows))
        assert slices[-1].stop - slices[-1].start == min(chunk_rows, num_rows)


def test_any_leading_shape_and_non_contiguous_operands(device: str) -> None:
    case = make_case(60, 32, 301, torch.float32, device)
    flat = linear_logprobs(case.hidden, case.weight, case.labels)
    hidden = case.hidden.detach().t().contiguous().t().view(3, 20, 32)
    weight = torch.cat([case.weight.detach(), torch.full_like(case.weight, torch.nan)], dim=1)[:, :32]
    labels = torch.stack([case.labels, case.labels], dim=1)[:, 0].view(3, 20)
    assert not hidden.is_contiguous() and not weight.is_contiguous()
    logp, entropy = linear_logprobs(hidden.requires_grad_(), weight.requires_grad_(), labels)
    assert logp.shape == entropy.shape == (3, 20)
    torch.testing.assert_close(logp.flatten(), flat.logp)
    ((logp.flatten() * case.grad_logp).sum() + (entropy.flatten() * case.grad_entropy).sum()).backward()
    truth = run(case, "naive")
    assert relative_error(hidden.grad.reshape(60, 32), truth[2]) < 1e-5
    assert relative_error(weight.grad, truth[3]) < 1e-5


def test_expanded_upstream_gradients(device: str) -> None:
    """`logp.sum()` sends one number seen N times: a stride of 0."""
    case = make_case(60, 32, 301, torch.float32, device)
    case.grad_logp, case.grad_entropy = torch.ones_like(case.grad_logp), torch.zeros_like(case.grad_entropy)
    linear_logprobs(case.hidden, case.weight, case.labels).logp.sum().backward()
    assert relative_error(case.weight.grad, run(case, "naive")[3]) < 1e-5


def test_no_tokens(device: str) -> None:
    case = make_case(0, 32, 301, torch.bfloat16, device)
    logp, entropy = linear_logprobs(case.hidden, case.weight, case.labels)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == (0,) and not case.weight.grad.any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_masked_tokens_contribute_nothing_whatever_they_hold(poison: float, device: str) -> None:
    case = make_case(40, 32, 301, torch.bfloat16, device)
    case.grad_logp[10:30] = case.grad_entropy[10:30] = 0
    clean = run(case, "chunked", chunk_rows=16)
    with torch.no_grad():
        case.hidden[10:30] = poison
    poisoned = run(case, "chunked", chunk_rows=16)
    assert torch.equal(clean[0][:10], poisoned[0][:10])
    assert torch.equal(clean[2], poisoned[2]) and not poisoned[2][10:30].any()
    assert torch.equal(clean[3], poisoned[3])


def test_all_tokens_masked(device: str) -> None:
    case = make_case(40, 32, 301, torch.bfloat16, device)
    case.grad_logp, case.grad_entropy = torch.zeros_like(case.grad_logp), torch.zeros_like(case.grad_entropy)
    *_, grad_hidden, grad_weight = run(case, "chunked")
    assert not grad_hidden.any() and not grad_weight.any()


def test_a_nan_gradient_surfaces(device: str) -> None:
    case = make_case(40, 32, 301, torch.float32, device)
    case.grad_logp[3] = torch.nan
    *_, grad_hidden, grad_weight = run(case, "chunked")
    assert grad_hidden[3].isnan().all() and not grad_hidden[4].isnan().any() and grad_weight.isnan().any()


def test_tied_weight_gets_both_shares_of_its_gradient(device: str) -> None:
    case = make_case(40, 32, 301, torch.float32, device)

    def gradient(impl: str, dtype: torch.dtype) -> torch.Tensor:
        weight = case.weight.detach().to(dtype).requires_grad_()
        hidden = torch.nn.functional.embedding(case.labels, weight).tanh()
        (linear_logprobs(hidden, weight, case.labels.roll(-1), impl=impl).logp * case.grad_logp).sum().backward()
        return weight.grad

    assert relative_error(gradient("chunked", torch.float32), gradient("naive", torch.float64)) < 1e-5


def test_frozen_operands_cost_nothing(device: str) -> None:
    case = make_case(40, 32, 301, torch.float32, device)
    linear_logprobs(case.hidden, case.weight.detach(), case.labels).logp.sum().backward()
    assert case.hidden.grad is not None and case.weight.grad is None
    case.hidden.grad = None
    linear_logprobs(case.hidden.detach(), case.weight, case.labels).logp.sum().backward()
    assert case.weight.grad is not None and case.hidden.grad is None


def test_operands_of_unlike_dtypes_are_promoted(device: str) -> None:
    case = make_case(40, 32, 301, torch.bfloat16, device)
    logp, _ = linear_logprobs(case.hidden.float(), case.weight, case.labels)
    truth = linear_logprobs(case.hidden, case.weight, case.labels, impl="naive").logp
    torch.testing.assert_close(logp.double(), truth, rtol=0, atol=LOGP_TOLERANCE)


def test_autograd_saves_no_logits(device: str) -> None:
    """What it saves (and hooks may move to the host) is the operands and numbers per token."""
    case = make_case(64, 32, 301, torch.float32, device)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        linear_logprobs(case.hidden, case.weight, case.labels)
    assert max(saved) == max(case.hidden.numel(), case.weight.numel())


@pytest.mark.parametrize("masked", [False, True])
def test_only_the_last_chunk_s_logits_wait_for_backward(
    masked: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made again for the others; for all of them in a second backward; and nothing waits without gradients."""
    made: list[int] = []
    logits = chunked_module.HeadProducts.logits

    def counted(head: chunked_module.HeadProducts, hidden: torch.Tensor) -> torch.Tensor:
        made.append(len(hidden))
        return logits(head, hidden)

    monkeypatch.setattr(chunked_module.HeadProducts, "logits", counted)
    case = make_case(50, 32, 301, torch.float32, device)
    if masked:
        case.grad_logp[::2] = 0
    logp = linear_logprobs(case.hidden, case.weight, case.labels, chunk_rows=20).logp
    node = logp.grad_fn.next_functions[0][0]  # behind the view that gives the shape of the labels
    assert made == [10, 20, 20] and len(node.last_logits_CV) == 20
    logp.backward(case.grad_logp, retain_graph=True)
    again = [15] if masked else [10, 20]
    assert made[3:] == again and node.last_logits_CV is None
    first = case.hidden.grad, case.weight.grad
    case.hidden.grad = case.weight.grad = None
    logp.backward(case.grad_logp)
    assert made[3 + len(again) :] == ([5, 20] if masked else [10, 20, 20])
    for value, expected in zip((case.hidden.grad, case.weight.grad), first, strict=True):
        assert relative_error(value, expected) < 1e-5
    logp = linear_logprobs(case.hidden.detach(), case.weight.detach(), case.labels).logp
    assert not logp.requires_grad


def test_kept_logits_of_masked_tokens_cost_no_pass(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens of a padded batch have no gradient: their logits waited, and are dropped as they are."""
    passed: list[int] = []
    row_gradient = chunked_module._row_gradient

    def counted(logits: torch.Tensor, *arguments: object) -> torch.Tensor:
        passed.append(len(logits))
        return row_gradient(logits, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(chunked_module, "_row_gradient", counted)
    case = make_case(50, 32, 301, torch.float32, device)
    case.grad_logp[30:] = 0
    got = run(case, "chunked", with_entropy=False, chunk_rows=20)
    assert passed == [10, 20]
    passed.clear()
    case.grad_logp[-1] = 1
    run(case, "chunked", with_entropy=False, chunk_rows=20)
    assert passed == [20, 10, 20], "the kept chunk first"
    case.grad_logp[-1] = 0
    for value, expected in zip(got[2:], run(case, "naive", with_entropy=False)[2:], strict=True):
        assert relative_error(value, expected) <= GRADIENT_TOLERANCE[torch.float32]
    assert not got[2][30:].any()


def test_autocast_has_no_effect(device: str) -> None:
    case = make_case(40, 64, 301, torch.float32, device)
    plain = run(case, "chunked")
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = run(case, "chunked")
    for value, expected in zip(inside, plain, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_tf32_and_bf16_switches_do_not_reach_the_head(precision: str, device: str) -> None:
    """Field fault: TF32 allowed globally makes an "FP32" head one of 10 bits. The switch itself stays as it was."""
    case = make_case(200, 256, 1000, torch.float32, device)
    truth = run(case, "naive")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        got = run(case, "chunked")
        logits = fp32_logits(case.hidden, case.weight)
        assert torch.get_float32_matmul_precision() == precision
        with_switch = case.hidden.detach() @ case.weight.detach().t()
    finally:
        torch.set_float32_matmul_precision(before)
    for value, expected in zip(got, truth, strict=True):
        assert relative_error(value, expected) < 1e-5
    exact = case.hidden.detach().double() @ case.weight.detach().double().t()
    assert relative_error(logits, exact) < 1e-6
    if device == "cuda":  # the CPU at hand may have no reduced-precision products
        assert relative_error(with_switch, exact) > 1e-5


def test_every_fp32_product_is_made_with_the_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU without reduced-precision products cannot show by numbers: both switches, at every product."""
    seen = []

    def watch(name: str) -> None:
        product = getattr(torch, name)

        def watched(*operands: object, **options: object) -> torch.Tensor:
            backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
            seen.append([name, *(backend.fp32_precision for backend in backends)])
            return product(*operands, **options)

        monkeypatch.setattr(torch, name, watched)

    case = make_case(20, 32, 301, torch.float32, "cpu")
    torch.set_float32_matmul_precision("medium")
    try:
        for name in ("mm", "addmm"):
            watch(name)
        run(case, "chunked", chunk_rows=10)
    finally:
        torch.set_float32_matmul_precision("highest")
    # Logits of two chunks, again those of the first, both gradients of each; one chunk's weight gradient is added.
    assert [name for name, *_ in seen].count("mm") == 6 and [name for name, *_ in seen].count("addmm") == 1
    assert all(precision == ["ieee", "ieee"] for _, *precision in seen)


def test_precision_is_restored_after_an_error() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(ZeroDivisionError), exact_fp32():
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert before in ("none", "ieee")


def test_finite_differences() -> None:
    """Independent of the reference: gradcheck moves each operand."""
    case = make_case(5, 4, 7, torch.float64, "cpu")

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear_logprobs(hidden, weight, case.labels, temperature=0.7, chunk_rows=2))

    assert torch.autograd.gradcheck(head, (case.hidden, case.weight))


def test_hand_computed_case(device: str) -> None:
    """Logits (0, ln 3): p = (1/4, 3/4); logp of token 1 = ln 3/4; entropy = ln 4 - 3/4 ln 3."""
    ln3 = torch.tensor(3.0).log().item()
    weight = torch.tensor([[0.0], [ln3]], device=device)
    logp, entropy = linear_logprobs(torch.ones(1, 1, device=device), weight, torch.tensor([1], device=device))
    assert logp.item() == pytest.approx(ln3 - 2 * torch.tensor(2.0).log().item(), abs=1e-6)
    assert entropy.item() == pytest.approx(2 * torch.tensor(2.0).log().item() - 0.75 * ln3, abs=1e-6)


def test_label_out_of_range() -> None:
    case = make_case(4, 8, 11, torch.float32, "cpu")
    for bad in (-1, 11):
        case.labels[2] = bad
        with pytest.raises(ValueError, match=r"token ids in \[0, 11\) are allowed"):
            linear_logprobs(case.hidden, case.weight, case.labels)


@pytest.mark.gpu
def test_label_out_of_range_is_nan_on_cuda() -> None:
    case = make_case(4, 8, 11, torch.float32, "cuda")
    case.labels[2] = 11
    assert linear_logprobs(case.hidden, case.weight, case.labels).logp.isnan().tolist() == [False, False, True, False]


BAD = {
    "labels": (dict(labels=torch.zeros(3, dtype=torch.long)), r"labels is \[3\]; it must be \[4\]"),
    "label dtype": (dict(labels=torch.zeros(4)), "an integer dtype is allowed"),
    "hidden dtype": (dict(hidden=torch.zeros(4, 8, dtype=torch.long)), "hidden is torch.int64"),
    "width": (dict(hidden=torch.zeros(4, 9)), "with the same H are allowed"),
    "empty": (dict(weight=torch.zeros(0, 8)), "weight has no rows"),
    "temperature": (dict(temperature=0.0), "temperature is 0.0; a finite number > 0"),
    "temperatures": (dict(temperature=torch.tensor([1.0, 0.0, 1.0, 1.0])), "entries down to 0.0; numbers > 0"),
    "chunk": (dict(chunk_rows=0), "chunk_rows is 0"),
    "impl": (dict(impl="fused"), "impl is 'fused'; auto, chunked, naive are allowed"),
    "device": (dict(weight=torch.zeros(11, 8, device="meta")), "move them to one device"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    changes, message = BAD[name]
    arguments = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(11, 8), "labels": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**{**arguments, **changes})


def test_naive_refuses_the_sizes_of_training() -> None:
    hidden, weight = torch.zeros(1, 1).expand(2**14, 1), torch.zeros(1, 1).expand(2**14, 1)
    with pytest.raises(ValueError, match="it is the reference for small inputs"):
        linear_logprobs(hidden, weight, torch.zeros(2**14, dtype=torch.long), impl="naive")
