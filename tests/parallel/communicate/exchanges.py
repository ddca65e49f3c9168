"""Ranks as threads of one process: the code of the ranks, without processes. What ranks compute together, by one
process. And a link of known speed."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from tilewright.core.config.sections.parallel import WireName
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.feedback import ErrorFeedback
from tilewright.parallel.communicate.wire_messages import TILE, pack, sum_rows, unpack


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier, self.rows = Barrier(size, timeout=60), [torch.empty(0)] * size


class ThreadTransport:
    """A rank of a few that are threads. See `transport.Transport`."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, size

    @staticmethod
    def of(size: int) -> "list[ThreadTransport]":
        """All of them."""
        meeting = _Meeting(size)
        return [ThreadTransport(meeting, rank, size) for rank in range(size)]

    def _all(self, mine: Tensor) -> list[Tensor]:
        self._meeting.rows[self.rank] = mine.clone()
        self._meeting.barrier.wait()
        found = list(self._meeting.rows)
        self._meeting.barrier.wait()
        return found

    def all_to_all(self, rows_RB: Tensor) -> Tensor:
        return torch.stack([rows[self.rank] for rows in self._all(rows_RB)])

    def all_gather(self, row_B: Tensor) -> Tensor:
        return torch.stack(self._all(row_B))

    def all_reduce(self, values: Tensor) -> None:
        values.copy_(torch.stack(self._all(values)).sum(0))


def on_threads(size: int, function: Callable[[int, ThreadTransport], Any]) -> list[Any]:
    """What the function returns for each rank."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size), ThreadTransport.of(size)))


def reduced_together(
    flats: list[Tensor], wire: WireName, kernels: Kernels, feedback: list[ErrorFeedback] | None = None
) -> Tensor:
    """What `AsyncCommunicator.async_all_reduce` gives all ranks, of one process and one thread.

    Args:
        flats: of each rank, as long, in whole tiles.
        wire: the format.
        kernels: make codes.
        feedback: of each rank; None: what is lost is lost.
    """
    ranks, size = len(flats), flats[0].numel()
    share = -(-size // ranks)
    if wire == "fp8":
        share = -(-share // TILE) * TILE
    rows, packed, lost = [], [], []
    for rank, flat in enumerate(flats):
        x_RM = flat.new_zeros(ranks, share)
        x_RM.view(-1)[:size] = flat
        if feedback is not None:
            x_RM = x_RM + feedback[rank].owed("all", x_RM)
        rows.append(x_RM)
        packed.append(pack(x_RM, wire, kernels))
        lost.append(x_RM - unpack(packed[rank], share, wire))
    sums = []
    for rank in range(ranks):
        sum_M = sum_rows(torch.stack([packed_RB[rank] for packed_RB in packed]), share, wire)
        sums.append(unpack(pack(sum_M[None], wire, kernels), share, wire)[0])
        lost[rank][rank] += sum_M - sums[rank]
    for one, its in zip(feedback or (), lost, strict=False):
        one.keep("all", its)
    return torch.cat(sums)[:size]


class PacedTransport:
    """A link of one rank: what is sent takes its bytes over a rate, and a latency. Nothing is exchanged.

    Args:
        size: ranks.
        rate: bytes per second that a rank sends.
        latency: seconds of each exchange.
    """

    def __init__(self, size: int, rate: float, latency: float) -> None:
        self.rank, self.size, self._rate, self._latency = 0, size, rate, latency
        self.slept: list[float] = []

    def _send(self, sent_bytes: float) -> None:
        began = time.perf_counter()
        time.sleep(self._latency + sent_bytes / self._rate)
        self.slept.append(time.perf_counter() - began)

    def all_to_all(self, rows_RB: Tensor) -> Tensor:
        self._send(rows_RB.nbytes * (self.size - 1) / self.size)
        return rows_RB

    def all_gather(self, row_B: Tensor) -> Tensor:
        self._send(row_B.nbytes * (self.size - 1))
        return row_B.expand(self.size, *row_B.shape)

    def all_reduce(self, values: Tensor) -> None:
        self._send(2 * values.nbytes * (self.size - 1) / self.size)
