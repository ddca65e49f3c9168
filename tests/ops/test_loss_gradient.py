"""The head's loss in chunks: a weight whose gradient is kept in FP32 gets the numbers of a BF16 gradient, in pieces."""

import contextlib
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.core.config.change_recipe import on_machine
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.ops.backends.native import loss, wide
from tilewright.ops.kernels import Kernels
from tilewright.planner.cost.layer_choices import settings_of
from tilewright.planner.model.constraints import Constraints

N, D, V = 96, 32, 200


@pytest.fixture(params=["native", "wide"])
def products(request, monkeypatch):
    """By torch in BF16, and in FP32 as on a CPU that does not multiply BF16. (The first may run anywhere.)"""
    monkeypatch.setattr(wide, "widens", lambda device_type, dtype: request.param == "wide")
    return request.param


@pytest.fixture
def small_pieces(monkeypatch, products):
    """Rows of the weight and its gradient go seven at a time, the last piece is shorter."""
    monkeypatch.setattr(loss, "PIECE", 7 * D)
    monkeypatch.setattr(wide, "WIDE_PIECE", 7 * D)
    assert V % 7


def gradients(weight_VD, passes=2):
    """Gradients at the input and the weight, summed over some passes with different rows."""
    generator = torch.Generator().manual_seed(1)
    dx = []
    for _ in range(passes):
        x_ND = torch.randn(N, D, generator=generator).bfloat16().requires_grad_()
        labels_N = torch.randint(0, V, (N,), generator=generator)
        total, *_ = loss.eager(x_ND, weight_VD, labels_N, tile_bytes=V * 2 * 20)
        (total * 0.37).backward()
        dx.append(x_ND.grad)
    return torch.stack(dx), weight_VD.grad


def leaf(grad_dtype=None):
    weight_VD = torch.nn.Parameter(torch.randn(V, D, generator=torch.Generator().manual_seed(0)).bfloat16())
    if grad_dtype is not None:
        weight_VD.grad_dtype = grad_dtype
    return weight_VD


@pytest.mark.usefixtures("small_pieces")
def test_a_wide_gradient_has_the_numbers_of_the_rounded_one():
    """One pass: what BF16 holds, bit for bit. Two: their sum in FP32, which BF16 could not hold."""
    _, narrow = gradients(leaf(), passes=1)
    _, wide = gradients(leaf(torch.float32), passes=1)
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(wide, narrow.float())
    _, summed = gradients(leaf(torch.float32), passes=2)
    assert not torch.equal(summed, summed.bfloat16().float())


@pytest.mark.usefixtures("products")
def test_pieces_change_no_bit(monkeypatch):
    whole = gradients(leaf(torch.float32))
    monkeypatch.setattr(loss, "PIECE", 7 * D)
    pieces = gradients(leaf(torch.float32))
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


@pytest.mark.usefixtures("small_pieces")
def test_a_weight_that_was_cast_keeps_autograd_s_rules():
    """Of an FP32 weight used in BF16 the gradient arrives through the cast, in FP32 and rounded once."""
    weight_VD = torch.nn.Parameter(leaf().detach().float())
    x_ND = torch.randn(N, D).bfloat16()
    labels_N = torch.randint(0, V, (N,))
    loss.eager(x_ND, weight_VD.bfloat16(), labels_N, tile_bytes=2**20)[0].backward()
    low = leaf()
    loss.eager(x_ND, low, labels_N, tile_bytes=2**20)[0].backward()
    assert torch.equal(weight_VD.grad, low.grad.float())


class WideCopies(TorchDispatchMode):
    """Counts copies of a whole weight's size in FP32."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.float32 and out.numel() == V * D:
            self.count += 1
        return out


@pytest.mark.usefixtures("small_pieces")
def test_autograd_makes_no_second_fp32_copy():
    with WideCopies() as copies:
        gradients(leaf(torch.float32))
    assert copies.count == 0


class Tables(TorchDispatchMode):
    """Counts FP32 results as large as the weight, which itself is in BF16."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.count += isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.numel() == V * D
        return out


@pytest.mark.usefixtures("small_pieces")
def test_a_frozen_head_costs_no_gradient_of_its_own():
    """Under adapters: the same gradient at the input, and nothing as large as the head is made."""
    labels_N = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    found, tables = [], []
    for frozen in (False, True):
        weight_VD = leaf(torch.float32).requires_grad_(not frozen)
        x_ND = torch.randn(N, D, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        with Tables() as made:
            (loss.eager(x_ND, weight_VD, labels_N, tile_bytes=V * 2 * 20)[0] * 0.37).backward()
        found.append(x_ND.grad)
        tables.append(made.count)
        assert (weight_VD.grad is None) == frozen
    assert torch.equal(*found)
    assert tables[0] > 0
    assert tables[1] == 0


# ---- a GPU's: the GEMM adds ----


def addmm_in_fp32(sum_VD, a, b, out_dtype, *, beta=1, alpha=1, out):
    """torch's `_addmm_dtype_out_cuda`: 16-bit operands, sum and result in FP32, nothing rounded between."""
    assert a.dtype == b.dtype
    assert a.dtype in (torch.bfloat16, torch.float16)
    assert out_dtype == out.dtype == sum_VD.dtype == torch.float32
    assert out.data_ptr() == sum_VD.data_ptr(), "in place: nothing of the weight's size beside it"
    assert (beta, alpha) == (1, 1)
    out.copy_((sum_VD.double() + a.double() @ b.double()).float())
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("chunks", [1, 3, 64])
def test_the_gradient_of_many_chunks_on_a_gpu_is_not_rounded_in_between(chunks, dtype):
    """Beside FP64: an FP32 sum is off by half an ulp of the running sum per chunk at most. Rounded to BF16 per chunk,
    as it was, 64 chunks are off by 2^-9 of each product."""
    tokens, vocab, dim = 256, 40, 24
    generator = torch.Generator().manual_seed(chunks)
    x_ND, dlogits_NV = (torch.randn(tokens, width, generator=generator).to(dtype) for width in (dim, vocab))
    high = torch.promote_types(dtype, torch.float32)
    add = loss._weight_gradient_adder("cuda", dtype)
    dweight_VD = torch.zeros(vocab, dim, dtype=high)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", addmm_in_fp32, "CPU")
        for x_CD, part_CV in zip(x_ND.chunk(chunks), dlogits_NV.chunk(chunks), strict=True):
            add(dweight_VD, part_CV, x_CD)
    want = dlogits_NV.double().T @ x_ND.double()
    sizes = dlogits_NV.double().abs().T @ x_ND.double().abs()
    operations = chunks if dtype in (torch.bfloat16, torch.float16) else tokens
    bound = sizes * (operations + 1) * torch.finfo(high).eps / 2
    worst = ((dweight_VD.double() - want).abs() - bound).max()
    assert worst <= 0, worst.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_to_the_compiler_the_adding_gemm_is_one_operator(dtype):
    """On a CUDA device that is not there. torch's compiler lowers no `addmm` with `out_dtype`, and would fail."""
    add = loss._weight_gradient_adder("cuda", dtype)
    called = []

    def note(graph, example):
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    def run(sum_VD, part_CV, x_CD):
        add(sum_VD, part_CV, x_CD)
        return sum_VD * 2

    with FakeTensorMode():
        sum_VD, part_CV, x_CD = (
            torch.empty(shape, dtype=kind, device="cuda")
            for shape, kind in (((40, 24), torch.float32), ((8, 40), dtype), ((8, 24), dtype))
        )
        with contextlib.suppress(RuntimeError):  # after the compiler has been given the graph: running it fails here
            torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=note))(sum_VD, part_CV, x_CD)
    assert sum("add_product_" in name for name in called) + sum("auto_functionalized" in name for name in called) == 1
    assert not any("addmm" in name for name in called)


def test_compiled_it_adds_in_place():
    """The operator among others, as a head inside of compiled code has it."""
    add = loss._weight_gradient_adder("cuda", torch.bfloat16)
    part_CV, x_CD = torch.randn(8, 40).bfloat16(), torch.randn(8, 24).bfloat16()

    def run(sum_VD):
        add(sum_VD, part_CV, x_CD * 2)
        return sum_VD + 1

    found = torch.ones(40, 24)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", addmm_in_fp32, "CPU")
        more = torch.compile(run, fullgraph=True, backend="aot_eager")(found)
    want = 1 + part_CV.double().T @ (x_CD * 2).double()
    torch.testing.assert_close(found.double(), want, rtol=0, atol=2.0**-24 * want.abs().max().item())
    assert torch.equal(more, found + 1)


# ---- how many logits at once ----


def test_logits_at_once_are_those_of_the_machine_unless_somebody_says():
    cpu = replace(detect_machine("cpu"), device="cpu")
    cards = {gib: replace(cpu, device="cuda", device_memory_bytes=gib * 2**30) for gib in (8, 24, 80, 141)}
    assert Kernels(cpu).loss_chunk_bytes == 64 * 2**20
    assert {gib: Kernels(card).loss_chunk_bytes // 2**20 for gib, card in cards.items()} == {
        8: 128, 24: 384, 80: 1024, 141: 1024,
    }  # fmt: skip
    assert Kernels(cards[80], loss_chunk_bytes=5).loss_chunk_bytes == 5
    written = load_recipe("cpu_10m", {"memory.loss_chunk_bytes": "64MiB"}, environ={})
    default = load_recipe("cpu_10m", environ={})
    assert on_machine(written, cards[80]) is written
    assert on_machine(default, cards[80]).recipe.memory.loss_chunk_bytes == 2**30
    assert on_machine(default, cpu).recipe == default.recipe
    assert on_machine(on_machine(default, cards[80]), cpu).recipe == default.recipe


def test_a_plan_may_take_fewer_logits_where_memory_is_short():
    recipe = on_machine(load_recipe("cpu_10m", environ={}), replace(detect_machine("cpu"), device="cuda")).recipe
    large = recipe.model_copy(update={"memory": recipe.memory.model_copy(update={"loss_chunk_bytes": 2**30})})
    tiles = list(dict.fromkeys(setting.loss_chunk_bytes for setting in settings_of(large, Constraints())))
    assert tiles == [2**30, 64 * 2**20, 16 * 2**20], "the largest first"
