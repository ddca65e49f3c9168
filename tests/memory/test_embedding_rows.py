"""Gradients of embeddings by rows are autograd's, bit for bit, in memory of the rows that are read."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.memory.layer_major.embedding_rows import RowGradients

V, D = 50, 8


def gradient(by_rows, dtype, grad_dtype, tied, **options):
    """Of two passes over a table, which a head reads too where it is tied."""
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.randn(V, D, generator=generator).to(dtype))
    table.grad_dtype = grad_dtype
    for _ in range(2):
        ids = torch.randint(0, 9, (3, 20), generator=generator)  # each row many times: their sum is rounded
        scale = torch.randn(3, 20, D, generator=generator).to(dtype)
        if tied:
            (scale[0] @ table.T).float().square().sum().backward()
        with RowGradients() if by_rows else torch.enable_grad():
            out = F.embedding(ids, table, **options)
        (out * scale).sum().backward()
    return table.grad


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_the_numbers_are_those_of_autograd(tied, dtype, grad_dtype, options):
    mine, theirs = (gradient(by_rows, dtype, grad_dtype, tied, **options) for by_rows in (True, False))
    assert mine.dtype == theirs.dtype == grad_dtype
    assert mine.layout == torch.strided
    assert torch.equal(mine, theirs)


class Tables(TorchDispatchMode):
    """Counts new dense tensors of the table's size."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        new = isinstance(out, torch.Tensor) and out.layout == torch.strided and out.shape == (V, D)
        self.count += new and all(out is not arg and out.data_ptr() != arg.data_ptr() for arg in _dense(args))
        return out


def _dense(args):
    return [arg for arg in args if isinstance(arg, torch.Tensor) and arg.layout == torch.strided]


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_is_made_once_where_there_is_none(tied):
    table = torch.nn.Parameter(torch.randn(V, D).bfloat16())
    table.grad_dtype = torch.float32
    if tied:
        table.grad = torch.ones(V, D)
    before = table.grad
    with RowGradients():
        out = F.embedding(torch.tensor([1, 3, 1]), table)
    with Tables() as tables:
        out.sum().backward()
    assert tables.count == (0 if tied else 1)
    assert not tied or table.grad is before
