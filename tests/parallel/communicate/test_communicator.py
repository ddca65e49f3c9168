"""Exchanges on ranks: sums against FP64, bits the same on all ranks, handles, bytes, NaN, a rank that lags."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.models.shapes import KERNELS
from tests.parallel.communicate.exchanges import PacedTransport, ThreadTransport, on_threads, reduced_together
from tests.ranks import on_ranks
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.feedback import ErrorFeedback

SIZES = (1, 5, 128, 129, 1000, 4096)
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp8": 2.0**-4}
"""Of a value, relative to the largest of its tile in FP8's subnormals (2^-10 of it), else to itself."""


def values(rank, size, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank)).to(dtype)


def everything(rank, wire):
    """All four exchanges of all sizes; what came of them."""
    ranks = dist.get_world_size()
    communicator = AsyncCommunicator(dist.group.WORLD, wire=wire)
    handles, found = [], {}
    for size in SIZES:  # all under way at once
        handles.append((f"all_reduce {size}", communicator.async_all_reduce(values(rank, size))))
        part, whole = torch.empty(size), torch.cat([values(rank, size) * (1 + r) for r in range(ranks)])
        handles.append((f"reduce_scatter {size}", communicator.async_reduce_scatter(part, whole)))
        gathered = torch.empty(ranks * size)
        handles.append((f"all_gather {size}", communicator.async_all_gather(gathered, values(rank, size))))
        sent = torch.stack([values(rank, size) * (1 + r) for r in range(ranks)])
        handles.append((f"all_to_all {size}", communicator.async_all_to_all(torch.empty_like(sent), sent)))
    integers = torch.full((3,), rank + 1)
    handles.append(("integers", communicator.async_all_reduce(integers)))
    for name, handle in reversed(handles):
        found[name] = handle.wait().numpy()
        assert handle.done()
        assert handle.wait() is not None, "twice is once"
    return found, communicator.traffic.total


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_exchanges(ranks, wire):
    results = on_ranks(ranks, everything, wire)
    results = [({name: torch.from_numpy(x) for name, x in found.items()}, traffic) for found, traffic in results]
    for rank, (found, traffic) in enumerate(results):
        assert found["integers"].tolist() == [ranks * (ranks + 1) // 2] * 3
        for size in SIZES:
            parts = torch.stack([values(r, size) for r in range(ranks)]).double()
            reach = parts.abs().sum(0) + parts.abs().amax() * (2.0**-6 if wire == "fp8" else 0)
            wholes = {
                "all_reduce": (parts.sum(0), (ranks + 1) * reach),
                "reduce_scatter": (parts.sum(0) * (1 + rank), (ranks + 1) * reach * (1 + rank)),
            }
            for operation, (want, scale) in wholes.items():
                off = (found[f"{operation} {size}"].double() - want).abs() - ROUNDING[wire] * scale
                assert float(off.max()) <= 0, (operation, size, float(off.max()))
            exact = torch.cat([values(r, size) for r in range(ranks)])
            assert torch.equal(found[f"all_gather {size}"], exact)
            assert torch.equal(found[f"all_to_all {size}"], (exact * (1 + rank)).view(ranks, size))
            assert torch.equal(found[f"all_reduce {size}"], results[0][0][f"all_reduce {size}"])
        kinds = {(operation, name) for _, operation, name in traffic}
        assert {("all_reduce", wire), ("reduce_scatter", wire), ("all_reduce", "int64")} <= kinds
        assert all(one.seconds >= one.exposed_s >= 0 for one in traffic.values())


def large(rank, wire):
    communicator = AsyncCommunicator(dist.group.WORLD, wire=wire)
    x = torch.randn(100_000)
    communicator.async_all_reduce(x).wait()
    communicator.async_reduce_scatter(torch.empty(50_000), torch.randn(100_000)).wait()
    return {operation: one.sent_bytes for (_, operation, _), one in communicator.traffic.total.items()}


@pytest.mark.dist
def test_fp8_gradients_take_a_quarter_of_the_bytes():
    """Counted where tensors are handed to the group: of two ranks each sends half, twice where all get the sum."""
    (full, _), (narrow, _) = on_ranks(2, large, "fp32"), on_ranks(2, large, "fp8")
    assert full == {"all_reduce": 400_000, "reduce_scatter": 200_000}
    for operation, sent in narrow.items():
        assert sent <= 0.27 * full[operation], (operation, sent / full[operation])


def bad(rank, wire):
    communicator = AsyncCommunicator(dist.group.WORLD, wire=wire)
    x = torch.ones(1000)
    if rank:
        x[3], x[700] = torch.nan, torch.inf
    return communicator.async_all_reduce(x).wait().numpy()


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp8"])
def test_nan_and_overflow_of_one_rank_arrive_on_all_and_nowhere_else(wire):
    for x in map(torch.from_numpy, on_ranks(2, bad, wire)):
        assert x[3].isnan()
        assert x[700].isnan() if wire == "fp8" else x[700].isinf()
        rest = torch.ones(1000, dtype=torch.bool).index_fill(0, torch.tensor([3, 700]), False)
        assert torch.equal(x[rest], torch.full((998,), 2.0))


def lagging(rank, wire):
    communicator = AsyncCommunicator(dist.group.WORLD, wire=wire)
    found = []
    for number in range(3):
        if rank == 1 and number == 1:
            time.sleep(0.5)
        found.append(communicator.async_all_reduce(values(rank, 300) * (1 + number)))
    return [handle.wait().numpy() for handle in found]


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_a_rank_that_lags_gets_the_same_sums(wire):
    first, second = ([torch.from_numpy(x) for x in found] for found in on_ranks(2, lagging, wire))
    expected = on_threads(2, lambda rank, transport: [_sum(transport, wire, values(rank, 300) * n) for n in (1, 2, 3)])
    for number in range(3):
        assert torch.equal(first[number], second[number])
        assert torch.equal(first[number], expected[0][number]), "threads compute what ranks compute"


def _sum(transport: ThreadTransport, wire, x):
    communicator = AsyncCommunicator(None, wire=wire, transport=transport)
    return communicator.async_all_reduce(x.clone()).wait()


def gone(rank):
    communicator = AsyncCommunicator(dist.group.WORLD, wire="fp8")
    if rank:
        return None
    handle = communicator.async_all_reduce(torch.ones(10))
    while not handle.done():
        time.sleep(0.01)
    with pytest.raises(RuntimeError):
        handle.wait()
    return "raised"


@pytest.mark.dist
def test_a_rank_that_ends_is_an_error_where_the_sum_is_waited_for():
    assert on_ranks(2, gone)[0] == "raised"


def test_alone_nothing_is_sent():
    communicator = AsyncCommunicator(None, wire="fp8")
    x, part, whole, found = torch.tensor([1.0, torch.nan]), torch.empty(2), torch.empty(2), torch.empty(2)
    assert communicator.async_all_reduce(x).wait() is x
    communicator.async_reduce_scatter(part, torch.ones(2)).wait()
    communicator.async_all_gather(whole, part).wait()
    communicator.async_all_to_all(found, whole).wait()
    assert found.tolist() == whole.tolist() == part.tolist() == [1.0, 1.0]
    assert not communicator.traffic.total


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_with_feedback_sums_over_steps_lose_nothing(wire, operation):
    """The same gradient in each step, far below the others of its tile: without feedback FP8 never sends it."""
    steps, size = 64, 256
    gradient = torch.full((size,), 1e-7)
    gradient[::128] = 1.0
    gradient[1::2] = 1.001  # rounded the same way each time

    def total(transport, fed):
        feedback = ErrorFeedback() if fed else None
        communicator = AsyncCommunicator(None, wire=wire, transport=transport, feedback=feedback)
        found = torch.zeros(size if operation == "all_reduce" else size // 2, dtype=torch.float64)
        for _ in range(steps):
            if operation == "all_reduce":
                found += communicator.async_all_reduce(gradient.clone(), name="g").wait()
            else:
                found += communicator.async_reduce_scatter(torch.empty(size // 2), gradient.clone(), name="g").wait()
            if feedback is not None:
                feedback.commit()
        return found

    want = (2 * steps * gradient.double())[: size if operation == "all_reduce" else size // 2]
    for fed in (True, False):
        for found in on_threads(2, lambda _, transport, fed=fed: total(transport, fed)):
            off = (found - want)[1::2].abs().max() / want[1]
            # With it what is missing at the end is one step's rounding of each rank and of the sum, not 64 of them.
            assert off <= 4 * ROUNDING[wire] / steps if fed else off > 0.0005, (fed, float(off))


def test_feedback_of_a_step_that_is_skipped_is_forgotten():
    feedback = ErrorFeedback()
    like = torch.ones(4)
    feedback.keep("a", torch.tensor([0.5, torch.nan, torch.inf, -0.25]))
    assert feedback.owed("a", like).tolist() == [0.5, 0.0, 0.0, -0.25], "the next micro-batch of the step takes it"
    feedback.forget()
    assert feedback.owed("a", like).tolist() == [0.0] * 4
    feedback.keep("a", like)
    feedback.commit()
    assert feedback.owed("a", torch.ones(5)).tolist() == [0.0] * 5, "another size begins anew"
    assert feedback.owed("b", like).tolist() == [0.0] * 4
    feedback.scale = 4.0
    assert feedback.owed("a", like).tolist() == [4.0] * 4, "in units of the loss scale"
    again = ErrorFeedback()
    again.load(feedback.tensors())
    assert again.owed("a", like).tolist() == [1.0] * 4
    assert again.nbytes == feedback.nbytes == 8


@pytest.mark.slow
def test_on_a_paced_link_two_thirds_are_hidden():
    """Eight layers that take 0.1 s each, and as long a transfer of each one's gradient as half of that."""
    link = PacedTransport(2, rate=1e6, latency=0.01)
    communicator = AsyncCommunicator(None, wire="fp8", transport=link)
    handles = []
    for _ in range(8):
        time.sleep(0.1)
        handles.append(communicator.async_all_reduce(torch.ones(32_000)))
    for handle in handles:
        handle.wait()
    ((_, total),) = communicator.traffic.total.items()
    assert total.hidden_s >= 0.65 * total.seconds, total


def _fed(transport, wire, steps):
    feedback = ErrorFeedback()
    communicator = AsyncCommunicator(None, wire=wire, kernels=KERNELS, transport=transport, feedback=feedback)
    found = []
    for step_RN in steps:
        x_N = step_RN[transport.rank].clone()
        communicator.async_all_reduce(x_N, name="all").wait()
        feedback.commit()
        found.append(x_N)
    return found


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_process_computes_what_ranks_compute(wire, ranks):
    """The benchmark of the loss does, with what each rank owes."""
    generator = torch.Generator().manual_seed(ranks)
    steps = [torch.randn(ranks, 1280, generator=generator) for _ in range(4)]
    feedback = [ErrorFeedback() for _ in range(ranks)]
    of_ranks = on_threads(ranks, lambda rank, transport: _fed(transport, wire, steps))
    for number, step_RN in enumerate(steps):
        together_N = reduced_together(list(step_RN), wire, KERNELS, feedback)
        for one in feedback:
            one.commit()
        for found in of_ranks:
            assert torch.equal(found[number], together_N)
