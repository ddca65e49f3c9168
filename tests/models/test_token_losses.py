"""`LossOutput.each` of every kind of model and batch: of a row it is the loss of a batch in which that row alone has
targets, and it tells documents apart in rows that a model cuts too."""

import pytest
import torch

from tests.models.shapes import make_batch, make_decoder
from tests.models.test_hf_models import ALL, CAUSAL, DOCUMENTS, MASKED, make, make_inputs
from tilewright.data.batches.microbatches import sums_by_document, sums_by_row

CLOSE = 2e-6
"""Of FP32 sums of some dozens of losses: 24 roundings of 6e-8, and as many in the other order."""


def taught(batch):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*batch["labels"].shape, 8, generator=generator)
    head = torch.randn(61, 8, generator=generator)
    return batch | {"teacher_hidden": hidden, "teacher_head": head, "teacher_how": torch.tensor([2.0, 0.3, 0.0])}


def alone(batch, row):
    """The batch with the targets of one row."""
    labels = torch.full_like(batch["labels"], -100)
    labels[row] = batch["labels"][row]
    return batch | {"labels": labels}


def assert_rows(model, batch):
    out = model.loss(batch)
    assert out.each.shape == batch["labels"].shape
    assert not out.each.requires_grad
    sums, counts = sums_by_row(out.each, batch)
    for row in range(len(sums)):
        want = model.loss(alone(batch, row))
        assert int(counts[row]) == int(want.count)
        assert abs(float(sums[row]) - float(want.loss_sum)) <= CLOSE * max(1.0, float(out.loss_sum))
    assert abs(float(sums.sum()) - float(out.loss_sum)) <= CLOSE * float(out.loss_sum)


@pytest.mark.parametrize("kind", ["plain", "taught"])
@pytest.mark.parametrize("name", ["gqa", "mla", "deepseek"])
def test_rows_of_the_decoder(name, kind):
    batch = make_batch(rows=3)
    assert_rows(make_decoder(name).eval(), taught(batch) if kind == "taught" else batch)


@pytest.mark.parametrize("name", ALL)
def test_rows_of_hugging_face_models(name):
    model = make(name).eval()
    assert_rows(model, make_inputs(model, rows=3))


@pytest.mark.parametrize("name", [n for n in (*CAUSAL, *MASKED) if n in DOCUMENTS or n == "llama"])
def test_documents_of_packed_rows(name):
    """In place, or as rows of their own: the losses are where the packed batch has them."""
    model = make(name).eval()
    batch = make_inputs(model, rows=2, positions=24)
    segments = torch.tensor([[0] * 10 + [1] * 11 + [-1] * 3, [0] * 5 + [1] * 19], dtype=torch.int32)
    positions = torch.tensor([[*range(10), *range(11), 0, 0, 0], [*range(5), *range(19)]])
    batch["labels"][segments < 0] = -100
    batch |= {"segments": segments, "positions": positions}
    assert_rows(model, batch)
    out = model.loss(batch)
    sums, counts = sums_by_document(out.each, batch)
    for row, document in ((0, 0), (0, 1), (1, 0), (1, 1)):
        inside = (segments[row] == document).nonzero().flatten()
        piece = {key: batch[key][row : row + 1, inside] for key in ("input_ids", "labels")}
        want = model.loss(piece)
        assert int(counts[row, document]) == int(want.count)
        assert abs(float(sums[row, document]) - float(want.loss_sum)) <= 5 * CLOSE * float(out.loss_sum)


def test_pairs_of_answers_are_rows():
    model = make_decoder("gqa").eval()
    batch = make_batch(rows=6)
    pairs = {name: tensor.view(3, 2, -1) for name, tensor in batch.items()}
    pairs |= {"reference": torch.randn(3, 2), "beta": torch.full((3,), 0.2), "rows": torch.tensor([4, -1, 5])}
    out = model.loss(pairs)
    sums, counts = sums_by_row(out.each, pairs)
    assert counts.tolist() == [1, 0, 1]
    for row in range(3):
        want = model.loss({name: tensor[row : row + 1] for name, tensor in pairs.items()})
        assert abs(float(sums[row]) - float(want.loss_sum)) <= CLOSE * max(1.0, float(out.loss_sum))
    assert torch.equal(out.each.sum(), out.loss_sum.detach())
