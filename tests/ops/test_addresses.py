"""Kernels in C++ take no address of a tensor without bytes: they would write to address 0."""

import ast
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import tilewright.ops.backends.cpu
from tests.ops.low_bit import LowBitCase, hyper
from tests.ops.test_cached_layer import drawn as drawn_layer
from tests.ops.test_row_linear import drawn as drawn_rows
from tilewright.core.hardware import detect_machine
from tilewright.formats.scaling import ROW_TILE
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.backends.cpu import fp8, low_bit_adam
from tilewright.ops.backends.cpu.cached_layer import cached_layer
from tilewright.ops.backends.cpu.row_linear import row_linear

FOLDER = Path(tilewright.ops.backends.cpu.__file__).parent
pytestmark = pytest.mark.skipif(detect_machine("cpu").cxx_compiler is None, reason="no C++ compiler here")


def _fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def _freed(tensor: Tensor) -> Tensor:
    """As FSDP2 leaves a parameter that is gathered again when it is needed."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


MADE = {
    "fake": _fake,
    "meta": lambda tensor: tensor.to("meta"),
    "of other tensors": lambda tensor: TwoTensor(tensor, tensor),
    "freed": _freed,
}


def adam(made):
    tensors = [[made(torch.ones(8))] for _ in range(4)]
    low_bit_adam.adam(*tensors, [1], hyper(1))


def adam_with_one_real_tensor(made):
    tensors = [[torch.ones(8)], [made(torch.ones(8))], [torch.ones(8)], [torch.ones(8)]]
    low_bit_adam.adam(*tensors, [1], hyper(1))


def adam_of_masters(made):
    tensors = [[torch.ones(8)] for _ in range(4)]
    low_bit_adam.adam(*tensors, [1], hyper(1), weights=[made(torch.ones(8, dtype=torch.bfloat16))])


def low_bit(made):
    tensors = replace(LowBitCase("of_bf16", 256).tensors(), grad=torch.ones(256))
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    faked = {name: made(value) for name, value in values.items() if isinstance(value, Tensor)}
    low_bit_adam.low_bit_adam(replace(tensors, **faked), hyper(1))


def rows(made):
    row_linear(*map(made, drawn_rows(2, 3, 4, torch.float32, True, 0)))


def layer(made):
    x, *rest = drawn_layer(1, 1, 1, 4, 8, 8, 2, torch.float32)
    cached_layer(made(x), *rest)


def decode(made):
    codes, scales = torch.zeros(4, 128, dtype=torch.uint8), torch.ones(4, 1)
    fp8.decode_bf16(TiledTensor(made(codes), made(scales), ROW_TILE, E4M3))


def exact(made):
    codes, scales = torch.zeros(4, 128, dtype=torch.uint8), torch.ones(4, 1)
    fp8.is_exact(TiledTensor(made(codes), made(scales), ROW_TILE, E4M3))


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize(
    "call", [adam, adam_with_one_real_tensor, adam_of_masters, low_bit, rows, layer, decode, exact]
)
def test_a_kernel_refuses_tensors_without_bytes(call, made):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's own word on the address of a fake tensor
        with pytest.raises(TypeError, match="on the CPU"):
            call(made)


def test_addresses_are_taken_in_one_place():
    """So that a kernel that is new checks them too."""
    for file in FOLDER.glob("*.py"):
        taken = [node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        assert taken.count("data_ptr") == (1 if file.name == "addresses.py" else 0), file.name
