"""The compiled loops of the loss, given micro-batches of many numbers of rows: none of them may run uncompiled.

torch runs a function uncompiled from its ninth shape on, without an error: `fail_on_recompile_limit_hit` makes one.
"""

import pytest
import torch
from torch import Tensor

from tilewright.ops.backends.compiled_rows import BLOCKS, blocks_of, in_blocks
from tilewright.ops.backends.native import loss as native_loss


@pytest.fixture(autouse=True)
def none_uncompiled():
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def graphs() -> int:
    """Compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_every_number_of_rows_is_compiled():
    """Code for any number of rows would write outside of its memory in torch 2.13."""
    step = native_loss._compiled_step()
    eager = native_loss.ChunkStep(native_loss.row_lse, native_loss.masked_softmax_)
    before = graphs()
    with torch.no_grad():
        for rows in (*range(1, 130, 9), 511, 512, 513, 700, 1025, 40, 7):
            logits = torch.randn(rows, 512)
            labels = torch.randint(0, 512, (rows,))
            labels[::5] = -100
            found, wanted = logits.clone(), logits.clone()
            torch.testing.assert_close(step(found, labels), eager(wanted, labels), rtol=0, atol=2e-6)
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-7)
    assert graphs() - before <= 2 * len(BLOCKS), "two loops for each block"


def test_gradients_of_steps_with_documents_of_many_lengths():
    """What a run calls, with fewer rows in its last chunk."""
    weight_VD = torch.randn(512, 64)
    for rows in (16 * i + 3 for i in range(1, 13)):
        x_ND, labels_N = torch.randn(rows, 64), torch.randint(0, 512, (rows,))
        found = [
            _loss_and_gradients(loss, x_ND, weight_VD, labels_N) for loss in (native_loss.compiled, native_loss.eager)
        ]
        for ours, wanted in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=2e-5, atol=2e-6)


def _loss_and_gradients(loss, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
    x_ND, weight_VD = x_ND.clone().requires_grad_(), weight_VD.clone().requires_grad_()
    total, _, each_N = loss(x_ND, weight_VD, labels_N, tile_bytes=100 * 512 * 4)
    return total.detach(), each_N, *torch.autograd.grad(total / len(x_ND), (x_ND, weight_VD))


def _halves(x_CV: Tensor) -> Tensor:
    return x_CV / 2


def test_models_of_many_widths_in_one_process():
    """A teacher, trials of formats, a second run: torch counts all shapes of a function together."""
    run = in_blocks(_halves)
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (16, 17, 18):
            x = torch.randn(BLOCKS[-1], width)
            assert torch.equal(run(x), x / 2)


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 575, 4097])
def test_blocks_are_all_rows_once(rows):
    found = list(blocks_of(rows))
    assert [row for start, end in found for row in range(start, end)] == list(range(rows))
    assert all(end - start in BLOCKS for start, end in found[:-1])
