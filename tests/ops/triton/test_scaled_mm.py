"""What torch's `scaled_mm` is called with, by its own rules, and the matmul of those very arguments on CPU."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.ops.triton.cases import GemmCase
from tests.ops.triton.test_gemm import assert_product
from tilewright.core.hardware import Machine, detect_machine
from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.native import scaled_mm
from tilewright.ops.backends.native.scaled_mm_availability import needs_scaled_mm
from tilewright.ops.base.dispatch import Case
from tilewright.ops.gemm import TILE_GEMM

OUT = (torch.bfloat16, torch.float16, torch.float32)


def cases():
    return st.builds(
        GemmCase, st.integers(1, 300), st.integers(1, 300), st.integers(1, 700),
        st.sampled_from((BLOCK_TILE, ROW_TILE, TENSORWISE)), st.sampled_from((E4M3, E5M2)), st.just(E4M3),
        st.booleans(), st.booleans(),
    )  # fmt: skip


def tiles(size):
    return -(-size // 128)


@examples(200)
@given(cases(), st.sampled_from(OUT), st.booleans())
def test_rules_of_the_call(case, out_dtype, on_meta):
    """Every check of ScaledBlas.cpp, and of torch's shape functions where they are right."""
    a, b, bias = case.operands(quantize)
    if on_meta:
        a, b = (dataclasses.replace(t, qdata=t.qdata.to("meta"), scale_inv=t.scale_inv.to("meta")) for t in (a, b))
        bias = None if bias is None else bias.to("meta")
    call = scaled_mm.prepare(a, b, bias, out_dtype)
    (m, k), (k_again, n) = call.mat_a.shape, call.mat_b.shape
    assert k == k_again
    assert k % 16 == 0
    assert n % 16 == 0
    assert call.mat_a.stride() == (k, 1)
    assert call.mat_b.stride() == (1, k)  # column by column
    assert (call.mat_a.dtype, call.mat_b.dtype) == (case.a_spec.dtype, case.b_spec.dtype)
    assert call.scale_a.dtype == call.scale_b.dtype == torch.float32
    assert call.out_dtype in (torch.bfloat16, torch.float32)
    if call.bias is not None:
        assert (call.bias.dtype, call.bias.shape) == (call.out_dtype, (n,))
        assert call.out_dtype != torch.float32
    if case.b_tile == TENSORWISE:
        assert call.scale_a.numel() == call.scale_b.numel() == 1
        return
    assert m % 4 == 0
    assert k % 128 == 0
    assert call.scale_a.shape == (m, tiles(k))
    assert call.scale_a.stride() == (1, m)
    if case.b_tile == ROW_TILE:
        assert call.scale_b.shape == (n, tiles(k))
        assert call.scale_b.stride() == (1, n)
    else:
        assert call.scale_b.shape == (-(-tiles(k) // 4) * 4, tiles(n))
        assert call.scale_b.stride() == (1, call.scale_b.shape[0])


def multiplied(call):
    """What the call means, in FP64, from its own arguments."""
    m, k, n = *call.mat_a.shape, call.mat_b.shape[1]
    a, b = call.mat_a.double(), call.mat_b.double()
    if call.recipe_a == "TensorWise":
        out = (a * call.scale_a.double()) @ (b * call.scale_b.double())
    else:
        a = a * call.scale_a.double().repeat_interleave(128, 1)[:, :k]
        scale_b = call.scale_b.double()
        if call.recipe_b == "BlockWise1x128":
            scale_kn = scale_b.T.repeat_interleave(128, 0)[:k]
        else:
            scale_kn = scale_b.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
        out = a @ (b * scale_kn)
    assert out.shape == (m, n)
    return (out if call.bias is None else out + call.bias.double()).to(call.out_dtype)


@examples(40)
@given(cases(), st.sampled_from(OUT))
def test_arguments_mean_the_product(case, out_dtype):
    """Padding is cut off and changes nothing; scales stand where the kernels look for them."""
    a, b, bias = case.operands(quantize)
    call = scaled_mm.prepare(a, b, bias, out_dtype)
    assert_product(scaled_mm.finish(multiplied(call), call, bias, out_dtype), a, b, bias, out_dtype, str(case))


def test_nothing_is_copied_where_layouts_fit():
    a = TiledTensor(torch.zeros(256, 512, dtype=torch.uint8), torch.ones(4, 256).T, ROW_TILE, E4M3)
    b = TiledTensor(torch.zeros(128, 512, dtype=torch.uint8), torch.ones(1, 4), BLOCK_TILE, E4M3)
    call = scaled_mm.prepare(a, b, None, torch.bfloat16)
    pairs = ((call.mat_a, a.qdata), (call.mat_b, b.qdata), (call.scale_a, a.scale_inv), (call.scale_b, b.scale_inv))
    for ours, theirs in pairs:
        assert ours.data_ptr() == theirs.data_ptr()


def test_slices_are_aligned():
    qdata, scales = torch.zeros(300, 512, dtype=torch.uint8)[3:], torch.ones(4, 400)[:, 3:300].T
    call = scaled_mm.prepare(
        TiledTensor(qdata, scales, ROW_TILE, E4M3), TiledTensor(qdata, scales, ROW_TILE, E4M3), None, torch.float32
    )
    for tensor in (call.mat_a, call.mat_b, call.scale_a, call.scale_b):
        assert tensor.data_ptr() % 16 == 0


@pytest.mark.parametrize("b_tile", [BLOCK_TILE, ROW_TILE, TENSORWISE], ids=str)
def test_traced_whole(b_tile):
    """torch.compile sees one operation, also for an N that torch's own shape function refuses (no multiple of 128)."""
    a, b, _ = GemmCase(48, 32, 136, b_tile).operands(quantize)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: (torch.empty(48, 32, dtype=torch.bfloat16),)

    def run(a_qdata, a_scale, b_qdata, b_scale):
        return scaled_mm.tile_gemm(
            TiledTensor(a_qdata, a_scale, a.tile, E4M3), TiledTensor(b_qdata, b_scale, b.tile, E4M3), None,
            torch.bfloat16,
        )  # fmt: skip

    torch.compile(run, fullgraph=True, backend=backend)(a.qdata, a.scale_inv, b.qdata, b.scale_inv)
    assert [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"][-1].count("scaled_mm")


def machine(capability, cuda="13.0") -> Machine:
    facts = detect_machine("cpu")
    versions = {name: version for name, version in facts.versions.items() if name != "cuda"} | {"triton": "3.6.0"}
    versions |= {"cuda": cuda} if cuda else {}
    return dataclasses.replace(facts, device="cuda", capability=capability, versions=versions)


@pytest.mark.parametrize(
    ("capability", "cuda", "kind", "chosen", "reason"),
    [
        ((9, 0), "13.0", "tiles", "scaled_mm", None),
        ((9, 0), "12.8", "tiles", "triton", "from CUDA 12.9 on, torch was built with 12.8"),
        ((9, 0), None, "tiles", "dequant", "without CUDA"),
        ((10, 0), "13.0", "tiles", "triton", "this device has 10.0"),
        ((8, 9), "13.0", "tiles", "triton", "this device has 8.9"),
        ((8, 9), "13.0", "tensorwise", "scaled_mm", None),
        ((10, 0), "13.0", "tensorwise", "scaled_mm", None),
        ((8, 0), "13.0", "tensorwise", "triton", "compute capability 8.0, 8.9 needed"),
        ((7, 5), "13.0", "tiles", "dequant", "this device has 7.5"),
    ],
)
def test_the_next_candidate_with_a_reason(capability, cuda, kind, chosen, reason):
    from tilewright.ops.base.dispatch import choose

    facts, case = machine(capability, cuda), Case("cuda", torch.bfloat16, kind)
    choice = choose(TILE_GEMM, facts, case)
    assert choice.candidate.name == chosen
    assert (reason is None) == (needs_scaled_mm(facts, case) is None)
    if reason is not None:
        assert reason in dict(choice.rejected)["scaled_mm"]


def test_not_on_cpu_nor_fp64():
    assert "CUDA" in needs_scaled_mm(machine((9, 0)), Case("cpu", torch.bfloat16, "tiles"))
    assert "FP64" in needs_scaled_mm(machine((9, 0)), Case("cuda", torch.float64, "tiles"))
