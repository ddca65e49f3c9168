"""Every candidate of every operation against FP64 autograd of the plain definition."""

import copy
import dataclasses
import pickle
from typing import get_args

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.cases import attention_cases
from tests.ops.compare import LargestTensor, assert_snr, largest_allocation
from tilewright.core.config.recipe import OpsSection
from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.hardware import detect_machine
from tilewright.formats.tiled import FP8_ROW
from tilewright.ops.attention import ATTENTION
from tilewright.ops.backends.attention_parts import QUERY_BLOCK
from tilewright.ops.backends.native import wide
from tilewright.ops.backends.native.attention import rows_by_matmuls
from tilewright.ops.base.dispatch import Candidate, Case, Op, always, choose
from tilewright.ops.kernels import OPS, Kernels
from tilewright.ops.linear import LINEAR
from tilewright.ops.loss import LINEAR_CROSS_ENTROPY
from tilewright.ops.norm import RMS_NORM

# Rounding to p significant bits gives about 6.02 p + 5 dB; a chain of a few roundings may lose some 12 dB.
SNR_DB = {torch.float32: 120.0, torch.bfloat16: 38.0, torch.float16: 55.0, torch.float64: 270.0}
NATIVE_ATTENTION, WIDE_ATTENTION = (
    next(candidate.run for candidate in ATTENTION.candidates if candidate.name == name) for name in ("native", "wide")
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def grads_of(run, inputs, out_grad_seed=1):
    """Output and input gradients of `run(*inputs)` for a fixed random output gradient."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = run(*leaves)
    seed = torch.Generator().manual_seed(out_grad_seed)
    out.backward(torch.randn(out.shape, generator=seed, dtype=torch.float64).to(out.dtype))
    return out.detach(), [leaf.grad for leaf in leaves if leaf.requires_grad]


def check(run, reference, inputs, dtype):
    out, grads = grads_of(run, inputs)
    want, want_grads = grads_of(reference, [x.double() if x.is_floating_point() else x for x in inputs])
    assert_snr(out, want, SNR_DB[dtype], "output")
    for i, (grad, want_grad) in enumerate(zip(grads, want_grads, strict=True)):
        assert_snr(grad, want_grad, SNR_DB[dtype], f"gradient {i}")


def skip_without_tiles(candidate, dtype):
    """Other candidates run wherever they are reported to, but for kernels of GPUs (`test_varlen_attention`)."""
    elsewhere = candidate.name in ("amx", "avx512", "varlen", "efficient")
    reason = candidate.why_not(detect_machine("cpu"), Case("cpu", dtype)) if elsewhere else None
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("candidate", LINEAR.candidates, ids=lambda c: c.name)
def test_linear(candidate, dtype):
    skip_without_tiles(candidate, dtype)
    x, weight, bias = torch.randn(3, 7, 40).to(dtype), torch.randn(24, 40), torch.randn(24)
    low = [x, weight.to(dtype).float(), bias.to(dtype).float()]
    check(candidate.run, lambda x, w, b: x @ w.T + b, low, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("candidate", RMS_NORM.candidates, ids=lambda c: c.name)
def test_rms_norm(candidate, dtype):
    x, weight = (torch.randn(4, 50) * 3).to(dtype), torch.randn(50)

    def plain(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    check(lambda x, w: candidate.run(x, w, 1e-5), plain, [x, weight], dtype)


def plain_attention(q, k, v, segments):
    """The definition, row by row of the mask, in the inputs' own precision."""
    out = []
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        rows = torch.arange(q.shape[2])
        allowed = rows[:, None] >= rows[None]
        if segments is not None:
            allowed = allowed & (segments[b][:, None] == segments[b][None])
        heads = []
        for h in range(q.shape[1]):
            scores = q[b, h] @ k[b, h // group].T / q.shape[-1] ** 0.5
            heads.append(torch.where(allowed, scores, -torch.inf).softmax(-1) @ v[b, h // group])
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(attention_cases()), ids=str)
@pytest.mark.parametrize("candidate", ATTENTION.candidates, ids=lambda c: c.name)
def test_attention(candidate, case, dtype):
    skip_without_tiles(candidate, dtype)
    q, k, v, segments = case.tensors(dtype)
    check(
        lambda q, k, v: candidate.run(q, k, v, segments), lambda q, k, v: plain_attention(q, k, v, segments),
        [q, k, v], dtype,
    )  # fmt: skip


@pytest.mark.slow
def test_attention_by_query_blocks_under_compile():
    q, k, v, segments = list(attention_cases())[1].tensors(torch.float32)
    compiled = torch.compile(NATIVE_ATTENTION, backend="aot_eager", fullgraph=True)
    check(
        lambda q, k, v: compiled(q, k, v, segments, None, 19), lambda q, k, v: plain_attention(q, k, v, segments),
        [q, k, v], torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", list(attention_cases())[1:], ids=str)
def test_attention_under_compile_takes_the_blocked_backward(case, dtype):
    q, k, v, segments = case.tensors(dtype)
    # The eager backend traces the same graph (is_compiling is true in it) without paying for code generation.
    compiled = torch.compile(NATIVE_ATTENTION, backend="aot_eager", fullgraph=True)
    check(
        lambda q, k, v: compiled(q, k, v, segments), lambda q, k, v: plain_attention(q, k, v, segments),
        [q, k, v], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("run", [NATIVE_ATTENTION, WIDE_ATTENTION], ids=["native", "wide"])
@pytest.mark.parametrize("dtype", SNR_DB)
@pytest.mark.parametrize("case", list(attention_cases()), ids=str)
def test_attention_by_query_blocks(case, dtype, run):
    """Ragged last block, documents across blocks, padding, grouped heads, values narrower than keys."""
    q, k, v, segments = case.tensors(dtype)
    check(
        lambda q, k, v: run(q, k, v, segments, None, 19), lambda q, k, v: plain_attention(q, k, v, segments),
        [q, k, v], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_widened_attention_has_the_same_bits_compiled_and_not(dtype):
    """One operator per pass, which the compiler does not look into; kept are the operands as they came."""
    q, k, v, segments = list(attention_cases())[2].tensors(dtype)
    compiled = torch.compile(WIDE_ATTENTION, backend="aot_eager", fullgraph=True)
    for block in (0, 19):
        want = grads_of(lambda q, k, v, block=block: WIDE_ATTENTION(q, k, v, segments, None, block), [q, k, v])
        got = grads_of(lambda q, k, v, block=block: compiled(q, k, v, segments, None, block), [q, k, v])
        assert torch.equal(got[0], want[0])
        assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.parametrize("shape", [(2, 2, 0, 8), (0, 2, 5, 8)])
@pytest.mark.parametrize("packed", [False, True])
def test_widened_attention_of_nothing(shape, packed):
    q = torch.randn(shape).bfloat16().requires_grad_()
    segments = torch.zeros(shape[0], shape[2], dtype=torch.int32) if packed else None
    WIDE_ATTENTION(q, q, q, segments).sum().backward()
    assert q.grad.shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("new", [1, 3])
def test_widened_attention_to_the_past(dtype, new, narrow):
    bare = dataclasses.replace(detect_machine("cpu"), cpu_features=frozenset())
    kernels, calls = Kernels(bare, compile=False), []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "attention" in str(func) or "mm" in str(func):
                calls.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    q, k, v = (
        torch.randn(2, 4, 9, 8).to(dtype),
        torch.randn(2, 2, 9, 8).to(dtype),
        torch.randn(2, 2, 9, 6 if narrow else 8).to(dtype),
    )
    with Products():
        got = kernels.attention_to_past(q[:, :, -new:], k, v)
    assert set(calls) == {torch.float32}
    assert got.dtype == dtype
    assert_snr(got, plain_attention(q.double(), k.double(), v.double(), None)[:, :, -new:], SNR_DB[dtype])


def test_a_block_by_products_is_what_the_flash_kernel_gives():
    q, k, v = (torch.randn(2, 3, rows, 8, dtype=torch.float64) for rows in (5, 9, 9))
    allowed = torch.ones(5, 9, dtype=torch.bool).tril(4)[None, None]
    out, lse = rows_by_matmuls(q, k, v, allowed, 0.5)
    mask = torch.zeros(5, 9, dtype=torch.float64).masked_fill(~allowed[0, 0], -torch.inf)[None, None]
    want = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=0.5)
    for got, expected in zip((out, lse), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_by_query_blocks_holds_nothing_of_positions_squared(dtype):
    positions, block, heads = 1024, 32, 2
    q, k, v = (torch.randn(1, heads, positions, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    segments = (torch.arange(positions) // 100)[None]
    whole = largest_allocation(lambda: ATTENTION.candidates[-1].run(q, k, v, segments).sum().backward())
    assert whole >= positions * positions, "a mask of one byte a pair at least: the measurement sees it"
    # The FP32 mask of a block, and FP32 queries, are the largest things there are.
    for run in (NATIVE_ATTENTION, WIDE_ATTENTION):
        size = largest_allocation(lambda run=run: run(q, k, v, segments, None, block).sum().backward())
        assert size <= max(4 * block * positions, 4 * heads * positions * 16) * torch.get_num_threads()
    packed = largest_allocation(lambda: WIDE_ATTENTION(q, k, v, segments).sum().backward())
    assert packed <= 4 * QUERY_BLOCK * positions, "by blocks in any case"


def test_logits_are_never_whole_forward_and_backward():
    num_tokens, vocab, tile_bytes = 256, 4096, 64 * 2**10
    x, weight = torch.randn(num_tokens, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    labels = torch.randint(0, vocab, (num_tokens,))
    sizes = {}
    for candidate in LINEAR_CROSS_ENTROPY.candidates:
        if candidate.name != "compiled":  # the same loop around compiled element-wise code
            with LargestTensor() as largest:
                candidate.run(x, weight, labels, tile_bytes)[0].backward()
            sizes[candidate.name] = largest.num_bytes
    assert sizes["ref"] >= 4 * num_tokens * vocab, "the measurement sees whole logits"
    assert sizes["native"] == max(tile_bytes, weight.nbytes), "a tile of logits, or the weight's gradient"


def plain_loss(labels):
    return lambda x, w: F.cross_entropy(x @ w.T, labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("candidate", LINEAR_CROSS_ENTROPY.candidates, ids=lambda c: c.name)
def test_linear_cross_entropy(candidate, dtype, widened, monkeypatch):
    """`widened`: as on a CPU that does not multiply 16-bit operands, the weight in several ragged pieces."""
    if widened:
        monkeypatch.setattr(wide, "widens", lambda device_type, dtype: dtype.itemsize == 2)
        monkeypatch.setattr(wide, "WIDE_PIECE", 16 * 13)
    tile_bytes = 8 * 97 * 2  # several ragged chunks
    x, weight = torch.randn(21, 16).to(dtype), torch.randn(97, 16).to(dtype).float() / 4
    labels = torch.randint(0, 97, (21,))
    labels[[0, 5, 20]] = -100
    loss, count, _ = candidate.run(x, weight, labels, tile_bytes)
    assert count == 18
    assert loss.dtype == torch.float32
    check(lambda x, w: candidate.run(x, w, labels, tile_bytes)[0], plain_loss(labels), [x, weight], dtype)
    with torch.no_grad():
        assert_snr(candidate.run(x, weight, labels, tile_bytes)[0], loss, SNR_DB[dtype], "loss without gradient")


def test_linear_cross_entropy_with_no_target_is_zero():
    for candidate in LINEAR_CROSS_ENTROPY.candidates:
        x = torch.randn(4, 8, requires_grad=True)
        loss, count, _ = candidate.run(x, torch.randn(11, 8), torch.full((4,), -100))
        loss.backward()
        assert loss == 0
        assert count == 0
        assert not x.grad.any()


def test_swiglu_and_rope_against_float64():
    kernels = Kernels.default()
    gate, up = torch.randn(5, 9), torch.randn(5, 9)
    check(kernels.swiglu, lambda g, u: F.silu(g) * u, [gate.bfloat16(), up.bfloat16()], torch.bfloat16)
    angles = torch.rand(1, 6, 4) * 6
    x = torch.randn(2, 6, 3, 8)
    turned = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, :, None]
    want = torch.view_as_real(torch.complex(*x.double().chunk(2, -1)) * turned)
    assert_snr(kernels.rope(x, angles.cos(), angles.sin()), torch.cat(want.unbind(-1), -1), 120)


# --- dispatch -----------------------------------------------------------------------------------------------


def never(machine, case):
    return "it is raining"


def test_choose_takes_the_first_that_can_and_keeps_the_reasons():
    op = Op("demo", (Candidate("fast", print, never), Candidate("ref", print, always)))
    choice = choose(op, detect_machine("cpu"), Case("cpu", torch.float32))
    assert choice.candidate.name == "ref"
    assert choice.rejected == (("fast", "it is raining"),)


def test_a_forced_but_impossible_choice_says_why():
    op = Op("demo", (Candidate("fast", print, never), Candidate("ref", print, always)))
    with pytest.raises(HardwareError, match="it is raining"):
        choose(op, detect_machine("cpu"), Case("cpu", torch.float32), forced="fast")
    with pytest.raises(ConfigError, match="no candidate 'fasst'"):
        choose(op, detect_machine("cpu"), Case("cpu", torch.float32), forced="fasst")


def test_without_a_compiler_the_compiled_candidates_are_passed_over_with_the_reason():
    bare = dataclasses.replace(detect_machine("cpu"), cxx_compiler=None)
    rows = [row for row in Kernels(bare).explain() if row["op"] == "cross_entropy"]
    assert all(row["chosen"] == "native" for row in rows)
    assert "C++ compiler" in rows[0]["rejected"][0][1]
    off = [row for row in Kernels(detect_machine("cpu"), compile=False).explain() if row["op"] == "cross_entropy"]
    assert off[0]["rejected"] == [["compiled", "compilation is off"]]


def test_the_schema_takes_the_names_of_the_candidates_and_no_others():
    for field in OpsSection.model_fields:
        names = {candidate.name for op in OPS if op.field == field for candidate in op.candidates}
        assert set(get_args(OpsSection.model_fields[field].annotation)) == {"auto", *names}, field


def test_overrides_choose_the_reference():
    kernels = Kernels(detect_machine("cpu"), {"rms_norm": "ref"})
    chosen = {row["chosen"] for row in kernels.explain() if row["op"] == "rms_norm"}
    assert chosen == {"ref"}


def test_an_override_that_cannot_run_one_dtype_is_told_when_that_dtype_is_used():
    kernels = Kernels(detect_machine("cpu"), {"adam": "native"})
    assert callable(kernels.adam("cpu", torch.float32))
    with pytest.raises(HardwareError, match="loses small updates"):
        kernels.adam("cpu", torch.bfloat16)
    (row,) = (row for row in kernels.explain() if (row["op"], row["case"]) == ("adam", "cpu bfloat16"))
    assert row["chosen"] is None


def test_a_model_with_kernels_is_copied_and_pickled_also_when_libraries_are_loaded():
    kernels = Kernels(detect_machine("cpu"), compile=False, loss_chunk_bytes=123)
    kernels.quantize(torch.ones(2, 128), FP8_ROW)  # loads the library in C++ where there is a compiler
    assert copy.deepcopy([kernels])[0] is kernels
    again = pickle.loads(pickle.dumps(kernels))
    assert (again.spec, again.loss_chunk_bytes) == (kernels.spec, 123)
