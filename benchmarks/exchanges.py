"""Ranks as threads of one process: the code of the ranks, without processes. And a link of known speed."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor


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
