"""Exchanges between ranks that run beside computation, in a wire format, counted.

    communicator = AsyncCommunicator(group, wire="fp8")
    handle = communicator.async_all_reduce(grad)  # returns at once
    ...                                           # compute
    handle.wait()                                 # grad is the sum over the ranks

`fp32` sends tensors as they are, by the backend's own collectives: the same bits as torch's. `bf16` and `fp8` are for
FP32 tensors: each rank gets its share of every rank's values in an all-to-all and adds them in FP32 (`wire_messages`).
An all-reduce sends the sums to all in the same format, and each rank, the one that made them too, takes what was sent:
all have the same bits. Tensors of other dtypes are sent as they are.

On a CPU such an exchange runs in a thread, on a group of its own, in the order of the calls, which must be the same on
all ranks. On a GPU it runs in a stream.

See: DeepSeek's articles on asynchronous all-reduce; VeOmni #1167 (BF16 all-to-all with FP32 sums).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.core.config.sections.parallel import WireName
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.feedback import ErrorFeedback
from tilewright.parallel.communicate.sum_error import SumError
from tilewright.parallel.communicate.traffic import Operation, TrafficCounter, whole_bytes, wire_name
from tilewright.parallel.communicate.transport import (
    ExchangeThread,
    GroupTransport,
    Transport,
    all_gather_rows,
    own_group,
    reduce_scatter_rows,
)
from tilewright.parallel.communicate.wire_messages import TILE, pack, sum_rows, unpack


class Handle:
    """An exchange between ranks that is under way.

    Args:
        result: the tensor that has the result once `wait` has returned. It is not to be touched before.
        wait: returns once it is there.
        done: whether that is at once.
        ended: when it was there, `perf_counter`; asked as soon as it is seen to be.
        took: told the seconds of the exchange and of waiting for it.
    """

    def __init__(
        self,
        result: Tensor,
        wait: Callable[[], Any],
        done: Callable[[], bool],
        ended: Callable[[], float],
        took: Callable[[float, float], None],
    ) -> None:
        self._result, self._wait, self._done, self._ended, self._took = result, wait, done, ended, took
        self._began, self._waited = time.perf_counter(), False
        self._end: float | None = None

    def wait(self) -> Tensor:
        """Wait for an exchange of the communicator; its result. On a GPU the stream waits for it, and not the host.

        Raises:
            RuntimeError: the exchange failed, as torch tells it: a rank is gone, or was waited for too long.
        """
        if not self._waited:
            began = time.perf_counter()
            self._wait()
            self._waited = True
            if not self._result.is_cuda:
                end = self._ended() if self._end is None else self._end
                self._took(end - self._began, time.perf_counter() - began)
        return self._result

    def done(self) -> bool:
        """True if an exchange of the communicator is done: `wait` returns at once."""
        if self._waited or self._end is not None:
            return True
        if not self._done():
            return False
        self._end = self._ended()
        return True


class AsyncCommunicator:
    """Exchanges between the ranks of one group beside computation, in a wire format.

    Args:
        group: the ranks; None: this one alone, and nothing is sent. All of them make one of these, in the same order.
        axis: of the mesh, along which they are: the name under which their bytes are counted.
        wire: of FP32 tensors that are summed.
        kernels: make FP8 codes; None: the machine's best.
        traffic: counts; None: a counter of its own.
        feedback: keeps what the wire format loses; None: it is lost.
        errors: told what it loses, in steps that are measured; None: it is not measured.
        transport: takes the place of the group's own.
        timeout: of the group that a thread exchanges on; None: torch's.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        axis: str = "data",
        wire: WireName = "fp32",
        kernels: Kernels | None = None,
        traffic: TrafficCounter | None = None,
        feedback: ErrorFeedback | None = None,
        errors: SumError | None = None,
        transport: Transport | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.group, self.axis, self.feedback, self.errors = group, axis, feedback, errors
        self.wire: WireName = wire
        self._packs = wire != "fp32"
        self.alignment = TILE if wire == "fp8" else 1
        """Values after which another tensor may begin in what is sent together, such that it shares no scale."""
        self.traffic = TrafficCounter() if traffic is None else traffic
        self.kernels = kernels or (Kernels.default() if wire == "fp8" else None)
        self._given = transport
        self._open: list[Handle] = []
        """Of torch's own exchanges, whose end is seen when the next one begins."""
        self._size, self._rank = 1, 0
        if transport is not None:
            self._size, self._rank = transport.size, transport.rank
        elif group is not None:
            self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._worker: ExchangeThread | None = None
        self._transport = transport
        self.stream: torch.cuda.Stream | None = None
        """Of exchanges on a GPU, from the first one on."""
        if group is not None and transport is None and wire != "fp32":
            self._transport = GroupTransport(own_group(group, timeout))

    def packs(self, tensor: Tensor) -> bool:
        """True if the communicator would send this tensor in the wire format, and not as it is."""
        return self._packs and tensor.dtype == torch.float32

    def widen(self, wire: WireName) -> None:
        """Send gradients in a wider format from now on, up to FP32. The exchanges stay those of the first format, so
        that each rank sums the same parts as before. All ranks call it between steps.

        Args:
            wire: the format.
        """
        assert self._packs, "made with a format that rounds"
        self.wire = wire

    def async_all_reduce(self, tensor: Tensor, *, name: str = "") -> Handle:
        """Begin the communicator's all-reduce: the sum over the ranks, in place.

        Args:
            tensor: contiguous, of one size on all ranks.
            name: of it in the error feedback, the same in each step; empty: what is lost is lost.
        """
        return self._run(
            tensor,
            "all_reduce",
            lambda transport: self.reduce_packed(transport, tensor, name),
            lambda: dist.all_reduce(tensor, group=self.group, async_op=True),
            lambda transport: transport.all_reduce(tensor),
            whole_bytes("all_reduce", tensor.nbytes, self._size),
        )

    def async_reduce_scatter(self, part: Tensor, whole: Tensor, *, name: str = "") -> Handle:
        """Begin the communicator's reduce-scatter: each rank gets its part of the sum over the ranks.

        Args:
            part: gets this rank's part, a flat tensor.
            whole: flat, the ranks' parts one after another.
            name: see `async_all_reduce`.
        """
        if self.group is None and self._transport is None:
            part.copy_(whole)

        def native(transport: Transport) -> None:
            part.copy_(transport.all_to_all(whole.view(transport.size, -1)).sum(0))

        return self._run(
            part,
            "reduce_scatter",
            lambda transport: self.scatter_packed(transport, part, whole, name),
            lambda: reduce_scatter_rows(part, whole, group=self.group, async_op=True),
            native,
            whole_bytes("reduce_scatter", whole.nbytes, self._size),
        )

    def async_all_gather(self, whole: Tensor, part: Tensor) -> Handle:
        """Begin the communicator's all-gather: the ranks' parts one after another, sent as they are.

        Args:
            whole: gets them, a flat tensor.
            part: flat, of one size on all ranks.
        """
        if self.group is None and self._transport is None:
            whole.copy_(part)
        return self._run(
            whole,
            "all_gather",
            None,
            lambda: all_gather_rows(whole, part, group=self.group, async_op=True),
            lambda transport: whole.copy_(transport.all_gather(part).view_as(whole)),
            whole_bytes("all_gather", whole.nbytes, self._size),
        )

    def async_all_to_all(
        self, found: Tensor, sent: Tensor, gets: list[int] | None = None, sends: list[int] | None = None
    ) -> Handle:
        """Begin the communicator's all-to-all: rows to each rank, sent as they are.

        Args:
            found: gets the rows from all ranks, in their order.
            sent: rows for all ranks, in their order.
            gets, sends: rows from and to each rank; None: as many each.
        """
        if self.group is None and self._transport is None:
            found.copy_(sent)
        own = len(sent) // self._size if sends is None else sends[self._rank]
        others = (len(sent) - own) * sent[:1].nbytes
        return self._run(
            found,
            "all_to_all",
            None,
            lambda: dist.all_to_all_single(found, sent.contiguous(), gets, sends, group=self.group, async_op=True),
            lambda transport: found.copy_(transport.all_to_all(sent.view(transport.size, -1)).view_as(found)),
            others,
        )

    # ---- how ----

    def _run(
        self,
        result: Tensor,
        operation: Operation,
        packed: Callable[[Transport], None] | None,
        native: Callable[[], Any],
        through: Callable[[Transport], Any],
        native_bytes: float,
    ) -> Handle:
        """Start an exchange of the communicator: `packed` in the wire format, `native` by torch, `through` a transport
        that was given."""
        if self.group is None and self._given is None:
            return Handle(result, _nothing, lambda: True, time.perf_counter, _nothing)
        if packed is not None and self.packs(result):
            assert self._transport is not None, "made with the wire format"
            transport = self._transport
            kind = (self.axis, operation, self.wire)
            return self._beside(result, lambda: packed(transport), kind)
        kind = (self.axis, operation, wire_name(result.dtype))
        self.traffic.sent(*kind, native_bytes)
        if self._given is not None:
            given = self._given
            return self._beside(result, lambda: through(given), kind)
        self._open = [handle for handle in self._open if not handle.done()]
        work = native()
        handle = Handle(result, work.wait, work.is_completed, time.perf_counter, partial(self.traffic.took, *kind))
        self._open.append(handle)
        return handle

    def _beside(self, result: Tensor, work: Callable[[], Any], kind: tuple[str, Operation, str]) -> Handle:
        if result.is_cuda:
            return self._in_stream(result, work)
        if self._worker is None:
            self._worker = ExchangeThread()

        def timed() -> float:
            with torch.no_grad():
                work()
            return time.perf_counter()

        future: Future[float] = self._worker.submit(timed)

        def ended() -> float:
            return time.perf_counter() if future.exception() else future.result()

        return Handle(result, future.result, future.done, ended, partial(self.traffic.took, *kind))

    def _in_stream(self, result: Tensor, work: Callable[[], Any]) -> Handle:
        if self.stream is None:
            self.stream = torch.cuda.Stream(result.device)
        stream, ended = self.stream, torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(result.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            work()
            ended.record()
        result.record_stream(stream)

        def wait(_read: Callable[[], Any] = work) -> None:  # what the work reads is kept until the caller has waited
            torch.cuda.current_stream(result.device).wait_event(ended)

        return Handle(result, wait, ended.query, time.perf_counter, _nothing)

    def reduce_packed(self, transport: Transport, tensor: Tensor, name: str = "") -> None:
        """The communicator's `async_all_reduce` in the wire format, here and now."""
        size, flat_N = transport.size, tensor.view(-1)
        share = -(-flat_N.numel() // size)
        share = -(-share // self.alignment) * self.alignment
        x_RM = flat_N.new_zeros(size, share)
        x_RM.view(-1)[: flat_N.numel()] = flat_N
        packed_RB, lost_RM = self._packed(x_RM, name)
        arrived_RB = transport.all_to_all(packed_RB)
        sum_M = sum_rows(arrived_RB, share, self.wire)
        row_1B = pack(sum_M[None], self.wire, self.codes)
        if lost_RM is not None:
            lost_M = sum_M - unpack(row_1B, share, self.wire)[0]
            self._measure(transport, lost_RM, sum_M, lost_M)
            lost_RM[transport.rank] += lost_M
            self._keep(name, lost_RM)
        self.traffic.sent(self.axis, "all_reduce", self.wire, (packed_RB[0].nbytes + row_1B.nbytes) * (size - 1))
        every_RB = transport.all_gather(row_1B[0])
        flat_N.copy_(unpack(every_RB, share, self.wire).view(-1)[: flat_N.numel()])

    def scatter_packed(self, transport: Transport, part: Tensor, whole: Tensor, name: str = "") -> None:
        """The communicator's `async_reduce_scatter` in the wire format, here and now."""
        x_RM = whole.view(transport.size, -1)
        packed_RB, lost_RM = self._packed(x_RM, name)
        self.traffic.sent(self.axis, "reduce_scatter", self.wire, packed_RB[0].nbytes * (transport.size - 1))
        sum_M = sum_rows(transport.all_to_all(packed_RB), x_RM.shape[1], self.wire)
        if lost_RM is not None:
            self._measure(transport, lost_RM, sum_M, torch.zeros(()))
            self._keep(name, lost_RM)
        part.view(-1).copy_(sum_M)

    def _packed(self, x_RM: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
        """Rows as the communicator sends them, with what was lost before; and what is lost now, where that is kept or
        measured."""
        kept = self.feedback is not None and bool(name)
        if self.feedback is not None and kept:
            x_RM = x_RM + self.feedback.owed(name, x_RM)
        packed_RB = pack(x_RM, self.wire, self.codes)
        if not kept and not self._measures:
            return packed_RB, None
        return packed_RB, x_RM - unpack(packed_RB, x_RM.shape[1], self.wire)

    def _keep(self, name: str, lost: Tensor) -> None:
        if self.feedback is not None and name:
            self.feedback.keep(name, lost)

    @property
    def _measures(self) -> bool:
        return self.errors is not None and self.errors.measuring

    def _measure(self, transport: Transport, lost_RM: Tensor, sum_M: Tensor, lost_M: Tensor) -> None:
        """Measure a communicator's error: add up what all ranks have lost of this rank's share, and what its sum
        loses."""
        if self.errors is None or not self.errors.measuring:
            return
        rows_RB = pack(lost_RM, "fp32", self.codes)
        self.traffic.sent(self.axis, "all_to_all", "fp32", rows_RB[0].nbytes * (transport.size - 1))
        missing_M = sum_rows(transport.all_to_all(rows_RB), len(sum_M), "fp32")
        self.errors.add(self.axis, missing_M + lost_M.to(missing_M.device), missing_M + sum_M)

    @property
    def codes(self) -> Kernels:
        """The communicator's function that makes FP8 codes."""
        if self.kernels is None:  # BF16 takes none
            self.kernels = Kernels.default()
        return self.kernels


def _nothing(*_: object) -> None:
    pass
