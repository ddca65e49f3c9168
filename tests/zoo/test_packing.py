"""Packed documents are as if alone: the loss of packed rows is the sum of the losses of their documents."""

import pytest
import torch

from tests.zoo.cases import cases
from tests.zoo.families import TRAINED, VOCAB

TEXTS = [family for family in TRAINED if family.batch == "text"]
SAMPLE = ("gpt2", "gemma2", "modernbert", "bloom", "granitemoe", "mamba2", "recurrent_gemma", "rwkv")
LENGTHS = ((10, 11, 3), (5, 19))


def documents(task):
    """ids and labels [1, length] of each document, row by row."""
    generator = torch.Generator().manual_seed(1)
    for row in LENGTHS:
        for length in row:
            ids = torch.randint(4, VOCAB, (1, length), generator=generator)
            masked = torch.where(torch.arange(length) % 5 == 2, ids, -100)
            shifted = torch.cat((ids[:, 1:], torch.full((1, 1), -100)), dim=1)
            yield {"input_ids": ids, "labels": masked if task == "masked_lm" else shifted}


def packed(pieces):
    """The documents in two rows, with positions and segments."""
    pieces, rows = iter(pieces), []
    for lengths in LENGTHS:
        members = [next(pieces) for _ in lengths]
        row = {name: torch.cat([piece[name] for piece in members], dim=1) for name in ("input_ids", "labels")}
        row["positions"] = torch.cat([torch.arange(length) for length in lengths])[None]
        numbers = torch.arange(len(lengths), dtype=torch.int32)
        row["segments"] = numbers.repeat_interleave(torch.tensor(lengths))[None]
        rows.append(row)
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("case", cases("packing", families=TEXTS, sample=SAMPLE), indirect=True)
def test_packed_documents_are_as_if_alone(case, remark):
    model = case.family.model()
    pieces = list(documents(case.family.task))
    got = model.loss(packed(pieces))
    alone = [model.loss(piece) for piece in pieces]
    want = sum(out.loss_sum.item() for out in alone)
    assert got.count.item() == sum(out.count.item() for out in alone)
    assert got.loss_sum.item() == pytest.approx(want, rel=1e-5)
    if any("padded row" in note for note in model.notes):
        remark("each document in a padded row of its own")
