"""Rows that travel to experts: those of one process in its order, whatever the loads; nothing is lost on the way."""

import pytest
import torch

from tests.parallel.inside.experts.spread import Case, world_of
from tests.ranks import on_ranks
from tilewright.parallel.agree import gather
from tilewright.parallel.inside.experts.exchange import ExpertExchange
from tilewright.parallel.inside.experts.placement import usual

pytestmark = pytest.mark.dist
EXPERTS, WIDTH = 6, 5
LOADS = {
    "mixed": lambda rank, draw: draw,
    "a rank without rows": lambda rank, draw: draw * (rank != 1),
    "no rows anywhere": lambda rank, draw: draw * 0,
    "one expert": lambda rank, draw: draw * (torch.arange(EXPERTS) == 4),
    "experts of one rank": lambda rank, draw: draw * (torch.arange(EXPERTS) < 2),
    "from one rank to others": lambda rank, draw: draw * (rank == 2) * (torch.arange(EXPERTS) < 4),
}


def _counts(world_size, load, seed):
    draws = torch.randint(0, 7, (world_size, EXPERTS), generator=torch.Generator().manual_seed(seed))
    return torch.stack([LOADS[load](rank, draw) for rank, draw in enumerate(draws)])


def _rows(rank, counts_E, dtype):
    """Of values that say where they are from: rank, expert, number."""
    rows = [(rank, expert, number, 0, 1) for expert, count in enumerate(counts_E.tolist()) for number in range(count)]
    return torch.tensor(rows, dtype=torch.float32).view(-1, WIDTH).to(dtype)


COPIES = {1: usual(EXPERTS, 3, 1), 2: (0, 1, 3, 4, 0, 2, 4, 5, 0, 3, 4, 5), 4: tuple(range(EXPERTS)) * 3}
"""Orders by how many more experts a rank holds."""


def _divided(rank, dtype, redundant):
    """Rows of experts on several ranks: each goes to one of the copies, and those of a rank evenly."""
    world, order = world_of(Case(3)), COPIES[redundant]
    for seed, load in enumerate(LOADS):
        counts = _counts(3, load, seed)
        exchange, seen = ExpertExchange(world.experts, EXPERTS, order=order), {}
        rows_PD = _rows(rank, counts[rank], dtype).requires_grad_()

        def run(rows, seen=seen, exchange=exchange):
            seen.update(zip(exchange.held, [x.detach().clone() for x in rows], strict=True))
            return [x * (expert + 1) for x, expert in zip(rows, exchange.held, strict=True)]

        out_PD = exchange(rows_PD, counts[rank], run)
        factor = rows_PD.detach()[:, 1:2] + 1
        assert torch.equal(out_PD, rows_PD.detach() * factor), load
        out_PD.backward(torch.ones_like(out_PD))
        assert torch.equal(rows_PD.grad, torch.ones_like(rows_PD) * factor), load
        of_ranks = gather(world.experts.handle, seen)
        for expert in range(EXPERTS):
            copies = [found[expert] for found in of_ranks if expert in found]
            assert len(copies) == order.count(expert)
            got = sorted(row for x in copies for row in x.tolist())
            assert got == sorted(row for other in range(3) for row in _rows(other, counts[other], dtype).tolist()
                                 if row[1] == expert), load  # fmt: skip
            for sender in range(3):
                sizes = [int((x[:, 0] == sender).sum()) for x in copies]
                assert max(sizes) - min(sizes) <= 1, f"{load}: expert {expert}, rows of rank {sender}: {sizes}"
    return redundant


@pytest.mark.parametrize("redundant", COPIES)
def test_copies_of_an_expert_share_its_rows(redundant):
    assert on_ranks(3, _divided, torch.float32, redundant) == [redundant] * 3


def _exchanged(rank, dtype):
    world, told = world_of(Case(3)), []
    for seed, load in enumerate(LOADS):
        counts = _counts(3, load, seed)
        exchange = ExpertExchange(world.experts, EXPERTS)
        rows_PD = _rows(rank, counts[rank], dtype).requires_grad_()
        seen = []

        def run(rows, seen=seen, exchange=exchange):
            seen.append([x.detach().clone() for x in rows])
            return [x * (expert + 1) for x, expert in zip(rows, exchange.held, strict=True)]

        out_PD = exchange(rows_PD, counts[rank], run)
        (got,) = seen
        for x, expert in zip(got, exchange.held, strict=True):
            all_rows = torch.cat([_rows(other, counts[other], dtype) for other in range(3)])
            assert torch.equal(x, all_rows[all_rows[:, 1] == expert]), f"{load}: expert {expert} has other rows"
        factor = rows_PD.detach()[:, 1:2] + 1
        assert torch.equal(out_PD, rows_PD.detach() * factor), load
        out_PD.backward(torch.ones_like(out_PD))
        assert torch.equal(rows_PD.grad, torch.ones_like(rows_PD) * factor), load
        elsewhere = int(counts[rank].sum() - counts[rank, exchange.held].sum())
        here = int(counts[:, exchange.held].sum() - counts[rank, exchange.held].sum())
        assert exchange.sent_bytes == 2 * (elsewhere + here) * WIDTH * rows_PD.element_size(), "there, back, twice"
        told.append(load)
    return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_one_process(dtype):
    assert on_ranks(3, _exchanged, dtype) == [list(LOADS)] * 3
