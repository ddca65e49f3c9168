"""A weight as matmuls read it, by device: which layout is quantised, and that both ways give the same bits."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.formats.quantize import quantize
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import fp8_format
from tilewright.precision.float8.gemm.weight_store import new_store, weight_operand

SQUARE = (BLOCK_TILE, TENSORWISE, Tile(32, 32))


@pytest.mark.parametrize("tile", [*SQUARE, ROW_TILE], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_which_layout_is_quantised(device, tile):
    """Kernels of a GPU multiply codes row by row: a transposed view would be copied byte by byte in each backward."""
    asked = []

    def note(x, form):
        asked.append(x)
        return SimpleNamespace(transposed=lambda: "a view")

    with FakeTensorMode():
        weight = torch.empty(300, 200, device=device)
    view = weight_operand(None, weight, SimpleNamespace(quantize=note), fp8_format(E4M3, tile), transposed=True)
    turned = device == "cuda" or tile == ROW_TILE
    assert [tuple(x.shape) for x in asked] == [(200, 300) if turned else (300, 200)]
    assert [x.stride() for x in asked] == [(1, 200) if turned else (200, 1)], "nothing was copied before"
    assert (view == "a view") == (not turned)


@pytest.mark.parametrize("tile", SQUARE, ids=str)
@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=lambda spec: spec.name)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_square_tiles_of_the_transpose_have_the_same_bits(tile, spec, power_of_two):
    weight = torch.randn(300, 200) * torch.exp2(4 * torch.randn(300, 1))
    form = fp8_format(spec, tile, power_of_two=power_of_two)
    one, other = quantize(weight.T, form), quantize(weight, form).transposed()
    assert torch.equal(one.qdata, other.qdata)
    assert torch.equal(one.scale_inv, other.scale_inv)


def test_a_gpu_keeps_no_store():
    with FakeTensorMode():
        assert new_store(torch.empty(128, 128, device="cuda"), fp8_format(E4M3, BLOCK_TILE)) is None
