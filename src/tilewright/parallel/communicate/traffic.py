"""Counts of what a rank has sent to others: bytes by axis of the mesh, operation and wire format, and the seconds of
it.

    traffic = TrafficCounter()
    traffic.sent("data", "all_reduce", "fp8", 1_000_000)
    traffic.took("data", "all_reduce", "fp8", seconds=0.5, exposed=0.1)
    traffic.take()  # what came since the last call

Bytes are what this rank sends to others. Of a collective whose algorithm is the backend's own they are the least that
any algorithm sends: of N bytes over R ranks an all-gather and a reduce-scatter send N (R - 1) / R, an all-reduce twice
that. Seconds are those from the start of an exchange to its end, as soon as that is seen; exposed are those in which
the rank waited for it, and the rest is hidden behind computation. Of messages between stages a rank waits before and
between its passes, whatever kept the other stage. On a GPU streams wait, which the host does not see: there seconds are
not counted.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Literal

import torch
from torch import Tensor

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
Kind = tuple[str, Operation, str]
"""Axis, operation and wire format. The format of what is sent as it is: its dtype's name."""


@dataclass(frozen=True)
class Exchanged:
    """Bytes that a rank sent in exchanges of one kind, and their seconds, summed."""

    sent_bytes: int = 0
    exchanges: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Seconds of traffic during which something else was computed.

        Example:
            >>> Exchanged(seconds=2.0, exposed_s=0.5).hidden_s
            1.5
        """
        return max(0.0, self.seconds - self.exposed_s)

    def __add__(self, other: "Exchanged") -> "Exchanged":
        sent_bytes, exchanges = self.sent_bytes + other.sent_bytes, self.exchanges + other.exchanges
        return Exchanged(sent_bytes, exchanges, self.seconds + other.seconds, self.exposed_s + other.exposed_s)

    def __sub__(self, other: "Exchanged") -> "Exchanged":
        sent_bytes, exchanges = self.sent_bytes - other.sent_bytes, self.exchanges - other.exchanges
        return Exchanged(sent_bytes, exchanges, self.seconds - other.seconds, self.exposed_s - other.exposed_s)


class TrafficCounter:
    """Counts the bytes that this rank sends to others. Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums: dict[Kind, Exchanged] = {}
        self._taken: dict[Kind, Exchanged] = {}

    def sent(self, axis: str, operation: Operation, wire: str, sent_bytes: float) -> None:
        """Count the traffic of an exchange that begins, in bytes."""
        self._add((axis, operation, wire), Exchanged(int(sent_bytes), 1))

    def took(self, axis: str, operation: Operation, wire: str, seconds: float, exposed: float) -> None:
        """Count the seconds of traffic of an exchange that has ended.

        Args:
            axis, operation, wire: as it began.
            seconds: from its start to its end.
            exposed: of these, in which the rank waited for it.
        """
        self._add((axis, operation, wire), Exchanged(0, 0, seconds, min(exposed, seconds)))

    def _add(self, kind: Kind, more: Exchanged) -> None:
        with self._lock:
            self._sums[kind] = self._sums.get(kind, Exchanged()) + more

    @property
    def total(self) -> Mapping[Kind, Exchanged]:
        """Sum all exchanges since the traffic counter was made."""
        with self._lock:
            return dict(self._sums)

    def numbers(self) -> dict[str, float]:
        """Numbers of traffic since the last call of `take`, for a row of metrics: all that was sent, its seconds
        exposed and hidden, these by axis too, and bytes by axis, operation and format. Nothing where nothing was
        sent."""
        found = self.take()
        if not found:
            return {}
        axes: dict[str, Exchanged] = {}
        for (axis, _, _), one in found.items():
            axes[axis] = axes.get(axis, Exchanged()) + one
        told: dict[str, float] = {"sent_bytes": sum(one.sent_bytes for one in found.values())}
        told |= {"exchange_exposed_s": sum(one.exposed_s for one in found.values())}
        told |= {"exchange_hidden_s": sum(one.hidden_s for one in found.values())}
        for axis, one in axes.items():
            if one.seconds:
                told |= {f"exchange_exposed_s.{axis}": one.exposed_s, f"exchange_hidden_s.{axis}": one.hidden_s}
        return told | {f"sent_bytes.{'.'.join(kind)}": one.sent_bytes for kind, one in found.items() if one.sent_bytes}

    def take(self) -> dict[Kind, Exchanged]:
        """Take the traffic counted since the last call; kinds without an exchange are left out."""
        with self._lock:
            found = {kind: now - self._taken.get(kind, Exchanged()) for kind, now in self._sums.items()}
            self._taken = dict(self._sums)
        return {kind: one for kind, one in found.items() if one != Exchanged()}


@dataclass(frozen=True)
class AxisTraffic:
    """Counts bytes of exchanges along one axis of the mesh.

    Args:
        counter: of the rank.
        axis: its name.
    """

    counter: TrafficCounter
    axis: str

    @contextmanager
    def waited(self, operation: Operation, sent: Tensor, sent_bytes: float, wire: str = "") -> Iterator[None]:
        """Count as traffic an exchange inside that is through at the end, so that all its seconds are exposed; on a
        GPU, where streams wait, none are counted.

        Args:
            operation: that it is.
            sent: a tensor of it.
            sent_bytes: that this rank sends to others.
            wire: its format; empty: that of the tensor.
        """
        wire = wire or wire_name(sent.dtype)
        self.counter.sent(self.axis, operation, wire, sent_bytes)
        began = time.perf_counter()
        yield
        if not sent.is_cuda:
            took = time.perf_counter() - began
            self.counter.took(self.axis, operation, wire, took, took)


def whole_bytes(operation: Operation, tensor_bytes: float, ranks: int) -> float:
    """The least bytes that one of `ranks` ranks sends in a collective, so that all get its result.

    Args:
        operation: of them.
        tensor_bytes: of the whole tensor: what each rank reduces, sends to all, or ends up with.
        ranks: in the group.

    Example:
        >>> whole_bytes("all_gather", 400, 4), whole_bytes("all_reduce", 400, 4)
        (300.0, 600.0)
    """
    return tensor_bytes * (ranks - 1) / ranks * (2 if operation == "all_reduce" else 1)


def wire_name(dtype: torch.dtype) -> str:
    """The wire format in which traffic counts what is sent as it is.

    Example:
        >>> wire_name(torch.float32), wire_name(torch.int64)
        ('fp32', 'int64')
    """
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)
