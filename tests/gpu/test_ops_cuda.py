"""Every candidate on a CUDA device against FP64 on the CPU. Run with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.gpu.device import CUDA, DEVICE, MANY, ON_A_GPU_OR_TRIED, find, names, poison, run_poisoned
from tests.ops import test_newton_schulz as newton_schulz
from tests.ops.cases import AttentionCase, attention_cases
from tests.ops.compare import assert_snr
from tests.ops.follow import DTYPES as FOLLOWED
from tests.ops.follow import SHAPES, pair, same_bits
from tests.ops.low_bit import KINDS, LowBitCase, assert_same, hyper
from tests.ops.test_cached_layer import drawn, with_past
from tests.ops.test_int8_linear import assert_exact
from tests.ops.test_linear_attention import by_definition as recurrence
from tests.ops.test_linear_attention import operands
from tests.ops.test_native_adam import master_row
from tests.ops.test_ops import DTYPES, SNR_DB, grads_of, plain_attention
from tests.ops.test_window import by_definition
from tilewright.core.hardware import detect_machine
from tilewright.formats.integer import INT8, quantize_integer
from tilewright.ops.adam import ADAM, FOLLOW_WRITES, LOW_BIT_ADAM, MASTER_ADAM
from tilewright.ops.attention import ATTENTION, LINEAR_ATTENTION, attention_kind
from tilewright.ops.backends.ref.adam import adam as ref_adam
from tilewright.ops.backends.ref.cached_layer import cached_layer
from tilewright.ops.backends.ref.low_bit_adam import low_bit_adam
from tilewright.ops.int8_linear import CHANNEL, INT8_LINEAR, Int8Weight, int8_linear
from tilewright.ops.kernels import Kernels
from tilewright.ops.linear import CACHED_LAYER, LINEAR, MOST_ROWS, ROW_LINEAR
from tilewright.ops.loss import LINEAR_CROSS_ENTROPY
from tilewright.ops.newton_schulz import NEWTON_SCHULZ
from tilewright.ops.norm import RMS_NORM

pytestmark = ON_A_GPU_OR_TRIED


def check(run, reference, inputs, dtype):
    """`run` on the GPU against `reference` in FP64 on the CPU, outputs and gradients."""
    out, grads = grads_of(run, [x.to(DEVICE) for x in inputs])
    want, want_grads = grads_of(reference, [x.double() if x.is_floating_point() else x for x in inputs])
    assert_snr(out.cpu(), want, SNR_DB[dtype], "output")
    for i, (grad, want_grad) in enumerate(zip(grads, want_grads, strict=True)):
        assert_snr(grad.cpu(), want_grad, SNR_DB[dtype], f"gradient {i}")


@pytest.mark.parametrize("dtype", DTYPES)
@names(LINEAR)
def test_linear(name, dtype):
    run = run_poisoned(LINEAR, name, dtype)
    weight, bias = torch.randn(24, 40).to(dtype).float(), torch.randn(24).to(dtype).float()
    check(run, lambda x, w, b: x @ w.T + b, [torch.randn(3, 7, 40).to(dtype), weight, bias], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@names(ROW_LINEAR)
def test_a_few_rows(name, dtype):
    run = run_poisoned(ROW_LINEAR, name, dtype)
    for rows in range(1, MOST_ROWS + 1):
        x, weight, bias = torch.randn(rows, 40).to(dtype), torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype)
        with torch.no_grad():
            out = run(*(tensor.to(DEVICE) for tensor in (x, weight, bias)))
        assert_snr(out.cpu(), x.double() @ weight.double().T + bias.double(), SNR_DB[dtype], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@names(CACHED_LAYER)
def test_the_next_token_of_a_layer(name, dtype):
    run = run_poisoned(CACHED_LAYER, name, dtype)
    for rows in range(1, MOST_ROWS + 1):
        operands = drawn(rows, 2, 2, 16, 40, 56, 9, dtype)
        want = cached_layer(*with_past(operands, torch.Tensor.double))
        x, weights, eps, cos, sin, pasts = with_past(operands, lambda tensor: tensor.to(DEVICE, copy=True))
        with torch.no_grad():
            out = run(x, weights, eps, cos.to(DEVICE), sin.to(DEVICE), pasts)
        assert_snr(out.cpu(), want, SNR_DB[dtype], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@names(LINEAR)
def test_linear_of_any_shape(name, dtype):
    run = run_poisoned(LINEAR, name, dtype)
    sizes = st.sampled_from((1, 7, 8, 127, 129, 300))

    @MANY
    @given(sizes, sizes, sizes, st.integers(0, 2**31 - 1))
    def any_shape(tokens, inputs, outputs, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype).float()
        out, want = run(x.to(DEVICE), weight.to(DEVICE), None).cpu().double(), x.double() @ weight.double().T
        sizes = x.double().abs() @ weight.double().abs().T
        allowed = sizes * (inputs + 4) * 2.0**-23 + want.abs() * torch.finfo(dtype).eps + 1e-30
        worst = int(((out - want).abs() - allowed).nan_to_num(nan=torch.inf).argmax())
        message = f"{(tokens, inputs, outputs)}: {out.flatten()[worst].item()}, want {want.flatten()[worst].item()}"
        assert bool(((out - want).abs() <= allowed).all()), message

    any_shape()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 127, 129, 5000])
@names(RMS_NORM)
def test_rms_norm_of_ragged_rows(name, width, dtype):
    run = run_poisoned(RMS_NORM, name, dtype)
    x, weight = (torch.randn(3, width) * 3).to(dtype), torch.randn(width)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_snr(run(x.to(DEVICE), weight.to(DEVICE), 1e-5).cpu(), want, SNR_DB[dtype], "output")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@names(ADAM)
def test_adam(name, dtype):
    """Each step from what is stored, in FP64: off by a few roundings of FP32, and by one of BF16 if that is stored."""
    run = run_poisoned(ADAM, name, dtype)
    generator, sizes = torch.Generator().manual_seed(0), (1, 127, 4099)
    params = [torch.randn(size, generator=generator).to(dtype).to(DEVICE) for size in sizes]
    firsts, seconds = ([torch.zeros(size, dtype=dtype, device=DEVICE) for size in sizes] for _ in range(2))
    for step in range(1, 4):
        settings = hyper(step)
        grads = [torch.randn(size, generator=generator).to(DEVICE) for size in sizes]
        before = [[tensor.double().cpu() for tensor in group] for group in (params, grads, firsts, seconds)]
        run(params, grads, firsts, seconds, range(len(sizes)), settings)
        for at, (p, g, m, v) in enumerate(zip(*before, strict=True)):
            m, v = m + (1 - settings.beta1) * (g - m), settings.beta2 * v + (1 - settings.beta2) * g**2
            scale = v.sqrt() / (1 - settings.beta2**step) ** 0.5 + settings.eps
            moved = settings.lr / (1 - settings.beta1**step) * m / scale
            want = (p * (1 - settings.lr * settings.weight_decay) - moved, m, v)
            terms = (p.abs() + settings.lr * (m.abs() + g.abs()) / scale, m.abs() + g.abs(), v)  # sums of magnitudes
            found = (params[at], firsts[at], seconds[at])
            for what, got, exact, size in zip(("p", "m", "v"), found, want, terms, strict=True):
                error = (got.cpu().double() - exact).abs()
                stored = torch.finfo(dtype).eps * exact.abs() if dtype == torch.bfloat16 else 0
                allowed = stored + 16 * 2.0**-23 * size + 1e-30
                assert bool((error <= allowed).all()), f"step {step}, {what} {at}: {error.max().item():.3g} off"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 64), (2, 5, 72), (300, 64), (17, 200)], ids=str)
@names(INT8_LINEAR)
def test_int8_linear(name, shape, dtype):
    find(INT8_LINEAR, name, dtype)
    poison()
    x, bias = torch.randn(shape).to(dtype).to(DEVICE), torch.randn(48, device=DEVICE)
    weight = quantize_integer(torch.randn(48, shape[-1], device=DEVICE), INT8, CHANNEL)
    assert_exact(int8_linear(x, Int8Weight.of(weight, detect_machine(DEVICE), name), bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@names(RMS_NORM)
def test_rms_norm(name, dtype):
    run = run_poisoned(RMS_NORM, name, dtype)

    def plain(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    check(lambda x, w: run(x, w, 1e-5), plain, [torch.randn(4, 50).to(dtype) * 3, torch.randn(50)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(attention_cases()), ids=str)
@names(ATTENTION)
def test_attention(name, case, dtype):
    q, k, v, segments = case.tensors(dtype)
    run = run_poisoned(ATTENTION, name, dtype, attention_kind(DEVICE, case.key_dim, segments is not None))
    on_gpu = None if segments is None else segments.to(DEVICE)
    check(
        lambda q, k, v: run(q, k, v, on_gpu), lambda q, k, v: plain_attention(q, k, v, segments), [q, k, v], dtype
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("docs", [0, 4])
@names(ATTENTION)
def test_attention_within_a_window(name, docs, dtype):
    q, k, v, segments = AttentionCase(2, 4, 2, 90, 16, 16, docs=docs).tensors(dtype)
    run = run_poisoned(ATTENTION, name, dtype, attention_kind(DEVICE, 16, docs > 0, windowed=True))
    on_gpu = None if segments is None else segments.to(DEVICE)
    check(
        lambda q, k, v: run(q, k, v, on_gpu, None, 0, 7),
        lambda q, k, v: by_definition(q, k, v, segments, 7), [q, k, v], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
@names(LINEAR_ATTENTION)
def test_linear_attention(name, packed, dtype):
    run = run_poisoned(LINEAR_ATTENTION, name, dtype)
    segments = (torch.arange(70) // 40).expand(2, -1) if packed else None
    on_gpu = None if segments is None else segments.to(DEVICE)
    check(lambda *x: run(*x, on_gpu), lambda *x: recurrence(*x, segments), operands(2, 2, 70, 8, dtype), dtype)


@pytest.mark.skipif(not CUDA, reason="measures the memory of a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("docs", [0, 8])
def test_what_is_chosen_holds_nothing_of_positions_squared(docs, dtype):
    """Grouped heads, with documents and without: scores of all pairs would take 8 times the bound at least."""
    positions, heads, width = 8192, 8, 64
    q, k, v, segments = AttentionCase(1, heads, 2, positions, width, width, docs).tensors(dtype)
    q, k, v = (x.detach().to(DEVICE).requires_grad_() for x in (q, k, v))
    segments = None if segments is None else segments.to(DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    Kernels.default().attention(q, k, v, segments=segments).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * positions**2 * dtype.itemsize / 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(attention_cases()), ids=str)
def test_attention_by_blocks(case, dtype):
    run = run_poisoned(ATTENTION, "native", dtype)
    q, k, v, segments = case.tensors(dtype)
    on_gpu = None if segments is None else segments.to(DEVICE)
    check(
        lambda q, k, v: run(q, k, v, on_gpu, None, 32),
        lambda q, k, v: plain_attention(q, k, v, segments), [q, k, v], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@names(LINEAR_CROSS_ENTROPY)
def test_linear_cross_entropy(name, dtype):
    run = run_poisoned(LINEAR_CROSS_ENTROPY, name, dtype)
    x, weight = torch.randn(21, 16).to(dtype), torch.randn(97, 16).to(dtype).float() / 4
    labels = torch.randint(0, 97, (21,))
    labels[[0, 5, 20]] = -100
    check(
        lambda x, w: run(x, w, labels.to(DEVICE), 8 * 97 * 2)[0],
        lambda x, w: F.cross_entropy(x @ w.T, labels, ignore_index=-100, reduction="sum"),
        [x, weight], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@names(MASTER_ADAM)
def test_masters_follow_writes_in_the_update(name, moments):
    """A weight that was written in part, its master, and an update: the reference's, by roundings of FP32."""
    run = run_poisoned(MASTER_ADAM, name, moments)
    for step, shape in enumerate([(5,), (9, 37), (3, 129)], 1):
        rows = list(master_row(torch.bfloat16, moments, shape))
        ours = [x.to(DEVICE) for x in rows]
        for update, (master, grad, first, second, weight) in ((run, ours), (ref_adam, rows)):
            update([master], [grad], [first], [second], [0], hyper(step), [0], [weight])
        for what, got, want in zip(("master", "grad", "exp_avg", "exp_avg_sq", "weight"), ours, rows, strict=True):
            stored = torch.finfo(want.dtype).eps if want.dtype != torch.float32 else 0.0
            size = max(1.0, want.double().abs().max().item())
            error = (got.cpu().double() - want.double()).abs().max().item()
            assert error <= (2 * stored + 16 * 2.0**-23) * size, f"{what} of {shape}: {error:.3g} off"


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 24)], ids=str)
@names(NEWTON_SCHULZ)
def test_newton_schulz_follows_the_polynomial(name, shape):
    """The bound of `tests/ops/test_newton_schulz.py`, of BF16 products."""
    x = newton_schulz.normal(shape)
    want = newton_schulz.by_svd(x, 5)
    got = run_poisoned(NEWTON_SCHULZ, name, torch.bfloat16)(x.to(DEVICE, torch.bfloat16), 5)
    bound = 2**-8 * want.abs().max().item() + 3 * min(shape[-2:]) ** 0.5 * 2**-9 * newton_schulz.GAIN**5
    assert (got.cpu().double() - want).abs().max().item() <= bound


@pytest.mark.parametrize("kind", KINDS)
@names(LOW_BIT_ADAM)
def test_low_bit_adam_has_the_bits_of_the_law(name, kind):
    run = run_poisoned(LOW_BIT_ADAM, name, torch.float32)
    case = LowBitCase(kind, 9 * (128 * 10 + 5), rows=9)
    law = case.tensors()
    fields = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in vars(law).items()}
    ours = replace(law, **fields)
    for step, grad in enumerate(case.awkward_grads(5), 1):
        run(replace(ours, grad=grad.to(DEVICE)), hyper(step))
        low_bit_adam(replace(law, grad=grad), hyper(step))
        found = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in vars(ours).items()}
        assert_same(replace(law, **found), law, f"{case}, step {step}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FOLLOWED)
@names(FOLLOW_WRITES)
def test_masters_follow_writes(name, dtype, shape):
    run = run_poisoned(FOLLOW_WRITES, name, dtype)
    for share in (0.0, 0.01, 1.0):
        master, weight, want = pair(dtype, shape, share)
        master = master.to(DEVICE)
        run(master, weight.to(DEVICE))
        assert same_bits(master.cpu(), want), f"{share} written"
