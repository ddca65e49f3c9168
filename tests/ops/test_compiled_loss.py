"""The compiled loops of the loss, given micro-batches of several numbers of rows."""

import torch

from tilewright.ops.backends.native import loss as native_loss


def test_numbers_of_rows_are_compiled_one_by_one():
    """Code for any number of rows writes outside of its memory in torch 2.13."""
    torch._dynamo.reset()
    step = native_loss._compiled_step()
    eager = native_loss.ChunkStep(native_loss.row_lse, native_loss.masked_softmax_)
    counters = torch._dynamo.utils.counters["stats"]
    before, graphs = counters["unique_graphs"], []
    with torch.no_grad():
        for rows in (40, 24, 32, 40):
            logits = torch.randn(rows, 512).bfloat16()
            labels = torch.randint(0, 512, (rows,))
            found, wanted = logits.clone(), logits.clone()
            torch.testing.assert_close(step(found, labels), eager(wanted, labels), rtol=0, atol=2e-6)
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
            graphs.append(counters["unique_graphs"] - before)
    assert graphs == [2, 4, 6, 6], "two loops for each number of rows"
