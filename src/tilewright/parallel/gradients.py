"""Gradients of a step, summed over ranks: replicas by all-reduce, shards as FSDP2 does it.

gradients = GradientReduction(model, params, world.data.handle, everyone=world.everyone.handle)
for index, batch in enumerate(microbatches):
    gradients.begin(last=index + 1 == len(microbatches))
    loss(batch).backward()
gradients.finish()  # the sum over all rows is in param.grad, or in its parts

Replicas send buckets of gradients, in the order in which backward makes them, from the last backward pass on: a bucket
goes once all its parameters have theirs, and those before it are gone. What is in a bucket, and the order, are fixed by
the model alone, so that every rank sends the same, and a resumed run adds in the same order. What a bucket is sent as
is the communicator's matter (`communicate`): FP32 as torch sends it, or a narrower wire format.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.parallel.agree import OnAllRanksError, oom_on_all, reduced_on
from tilewright.parallel.communicate.communicator import AsyncCommunicator, Handle
from tilewright.parallel.inside.experts.redundant_experts import sum_of_copies
from tilewright.parallel.inside.tensor.sequence_slices import sum_of_slices
from tilewright.parallel.shard import fsdp_modules, keep_fp32_sums

BUCKET_BYTES = 25 * 2**20
"""As torch's DistributedDataParallel has it."""
_ALIGNMENT = 16
"""Elements: kernels read whole vectors."""


@dataclass(frozen=True)
class _Bucket:
    """Parameters whose gradients are sent together, where each gradient begins, and how many elements there are."""

    params: tuple[Tensor, ...]
    begins: tuple[int, ...]
    numel: int
    dtype: torch.dtype

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in a bucket: views of its memory, each in its parameter's shape and order of memory."""
        return [_like(flat[begin:], param) for begin, param in zip(self.begins, self.params, strict=True)]


@dataclass(frozen=True)
class _Sent:
    """A bucket on its way. `used`: which of its parameters had a gradient here."""

    bucket: _Bucket
    views: list[Tensor]
    used: list[bool]
    work: Handle


class GradientSums:
    """The sums over ranks of replicated parameters' gradients, in buckets.

    Args:
        communicator: of the ranks; nothing happens where it has no group.
        params: the same on all of them, in the order in which they are sent.
        bucket_bytes: that are sent together; a parameter with more goes alone.
    """

    def __init__(self, communicator: AsyncCommunicator, params: Sequence[Tensor], bucket_bytes: int) -> None:
        self._communicator, self._group = communicator, communicator.group
        self._params, self._bytes = list(params), bucket_bytes
        self._buckets: list[_Bucket] = []
        self._trained: list[bool] = []
        self._sent: list[_Sent] = []
        self._all_sent = False
        self._late: dict[Tensor, Tensor] = {}
        self._waiting: list[set[int]] = []
        """Of each bucket: its parameters without a gradient from this pass; none where nothing is sent in the pass."""
        self._place: dict[Tensor, int] = {}

    def overlap(self) -> None:
        """Send gradients while the backward pass that `begin(last=True)` announces still runs."""
        this = weakref.ref(self)

        def ready(param: Tensor) -> None:
            sums = this()
            if sums is not None:
                sums._ready(param)

        handles = [p.register_post_accumulate_grad_hook(ready) for p in self._params if p.requires_grad]
        weakref.finalize(self, _remove, handles)

    def begin(self, *, last: bool) -> None:
        """Begin summing gradients: called before the forward pass of a micro-batch."""
        self.drop()
        if last and self._group is not None:
            self._divide()
            self._waiting = [set(map(id, bucket.params)) for bucket in self._buckets]

    def _ready(self, param: Tensor) -> None:
        """Note that a gradient is ready to be summed. If it was sent before (inner backward passes), the rest of it is
        `_late`."""
        if not self._waiting or param not in self._place:
            return
        self._waiting[self._place[param]].discard(id(param))
        while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
            self._send(self._buckets[len(self._sent)])

    @torch.no_grad()
    def send_rest(self) -> None:
        """Send the gradients that are left, zeros where there is no gradient. What is in `.grad` then is on its way."""
        if self._group is None or self._all_sent:
            return
        if not self._sent:
            self._divide()
        self._waiting = []
        for sent in self._sent:
            self._late |= {param: param.grad for param in sent.bucket.params if param.grad is not None}
        for bucket in self._buckets[len(self._sent) :]:
            self._send(bucket)
        for sent in self._sent:
            for param, view in zip(sent.bucket.params, sent.views, strict=True):
                param.grad = view
        self._all_sent = True

    @torch.no_grad()
    def finish(self) -> None:
        """Finish summing gradients after the last backward pass: they become the sums over all ranks.

        A parameter that this rank did not use may be used on another, and has a gradient then; one that no rank used
        has none.
        """
        if self._group is None or not self._params:
            return
        self.send_rest()
        sent, late = self._sent, self._late
        self._sent, self._late, self._all_sent = [], {}, False
        params = [param for one in sent for param in one.bucket.params]
        flags = [flag for one in sent for flag in one.used] + [param in late for param in params]
        found = torch.tensor(flags, dtype=torch.uint8, device=self._params[0].device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        used, more = found.view(2, -1).tolist() if params else ([], [])
        for one in sent:
            one.work.wait()
        for param, is_used, has_more in zip(params, used, more, strict=True):
            if has_more:
                assert param.grad is not None, "`send_rest` has set it"
                rest = late[param] if param in late else torch.zeros_like(param.grad)
                dist.all_reduce(rest, group=self._group)
                param.grad.add_(rest)
            elif not is_used:
                param.grad = None

    def drop(self) -> None:
        """Wait for gradient sums that are under way, and drop them."""
        for sent in self._sent:
            sent.work.wait()
        self._sent, self._late, self._waiting, self._all_sent = [], {}, [], False

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        grads = [None if param.grad is None else _dense(param.grad) for param in bucket.params]
        (first, *others) = grads
        if not others and first is not None and first.dtype == bucket.dtype and _fills_memory(first):
            flat, views = first.as_strided((first.numel(),), (1,)), [first]
        else:
            flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.params[0].device)
            if self._communicator.packs(flat):
                flat.zero_()  # what is between parameters shares a scale with them
            views = bucket.views(flat)
            pairs = list(zip(views, grads, strict=True))
            here = [(view, grad) for view, grad in pairs if grad is not None]
            if here:
                torch._foreach_copy_([view for view, _ in here], [grad for _, grad in here])
            for view, grad in pairs:
                if grad is None:
                    view.zero_()
        for param in bucket.params:
            param.grad = None
        used = [grad is not None for grad in grads]
        work = self._communicator.async_all_reduce(flat, name=f"bucket {self._place[bucket.params[0]]}")
        self._sent.append(_Sent(bucket, views, used, work))

    def _divide(self) -> None:
        """Buckets of gradients of the parameters that are trained now."""
        trained = [param.requires_grad for param in self._params]
        if trained == self._trained:
            return
        self._trained, self._buckets = trained, []
        part: list[Tensor] = []
        alignment = max(_ALIGNMENT, self._communicator.alignment)
        for param in (param for param, is_trained in zip(self._params, trained, strict=True) if is_trained):
            size = sum(map(_bytes, part)) + _bytes(param)
            if part and (size > self._bytes or _kind(part[0]) != _kind(param)):
                self._buckets.append(_bucket(part, alignment))
                part = []
            part.append(param)
        self._buckets += [_bucket(part, alignment)] if part else []
        self._place = {param: place for place, bucket in enumerate(self._buckets) for param in bucket.params}


class GradientReduction(GradientSums):
    """Sums gradients over the ranks of a run.

    Args:
        model: of which `params` are; sharded by `parallel.shard`, or the same on all ranks.
        params: trained parameters.
        data: ranks that read different rows; None where this one reads all, and nothing is summed.
        everyone: ranks that stop together where one finds no memory; None on one rank.
        reduce_each: sum the gradients of a sharded model after each micro-batch: each rank keeps only its part of them
            from the first on. False: once per step, and whole gradients (4 bytes per parameter) until then, where
            there are several micro-batches.
        bucket_bytes: of gradients that replicas send together. A parameter with more goes alone.
        communicator: sends them, of `data`; None: one that sends them as they are. What shards send is FSDP2's matter
            (`communicate.fsdp_exchanges`).

    Raises:
        ConfigError: sharded parameters in a model that is not sharded as a whole, and rows that differ.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Tensor],
        data: dist.ProcessGroup | None,
        *,
        everyone: dist.ProcessGroup | None,
        reduce_each: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        communicator: AsyncCommunicator | None = None,
    ) -> None:
        self._everyone = everyone
        self._fsdp = list(fsdp_modules(model))
        self._model = model
        self._reduce_each = reduce_each
        whole = [param for param in params if not isinstance(param, DTensor)]
        self._parts = bool(self._fsdp) or len(whole) < len(params)
        if len(whole) < len(params) and not self._fsdp and data is not None:
            raise ConfigError(
                "Sharded parameters in a model that is not sharded as a whole",
                got=f"{len(params) - len(whole)} DTensor parameters, and no module of FSDP2",
                need="torch's fully_shard on the model, or a replica of it on each rank",
                try_="tilewright.parallel.shard.shard(model, model.layers, mesh, Sharding())",
            )
        # Backward makes the last gradients first. An optimizer's groups have the parameters in another order.
        places: dict[Tensor, int] = {param: place for place, param in enumerate(model.parameters())}
        whole.sort(key=lambda param: -places.get(param, -1))
        super().__init__(communicator or AsyncCommunicator(data), whole, bucket_bytes)
        if data is not None and not self._fsdp:
            self.overlap()

    @property
    def sharded(self) -> bool:
        """True if gradients are sharded, as ranks hold parts of the model: they meet in its passes, and all run as many
        micro-batches."""
        return self._parts

    def begin(self, *, last: bool) -> None:
        """Begin reducing gradients, before the forward pass of a micro-batch.

        Args:
            last: of this step. Gradients of replicas are sent in its backward pass.
        """
        if self._fsdp:
            keep_fp32_sums(self._model)
        for module in self._fsdp:
            module.set_requires_gradient_sync(last or self._reduce_each, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)  # copies of a shard are summed once in any case
        super().begin(last=last)

    @contextmanager
    def passes(self, device: torch.device) -> Iterator[None]:
        """Run passes whose gradients are reduced, inside this context; if an allocator finds no memory on one rank, all
        stop.

        Replicas meet after their passes: the rank that has stopped sends what the others wait for, of no use as it is.
        Parts of one model meet in the passes, where none can stop alone: the error is raised as it is.

        Args:
            device: of what the ranks exchange.

        Raises:
            OnAllRanksError: an allocator found no memory on one of the replicas.
        """
        if self._everyone is None or self._parts:
            yield
            return
        try:
            with oom_on_all(self._everyone, device, before=self.send_rest):
                yield
        except OnAllRanksError:
            self.drop()
            raise

    def finish(self) -> None:
        """Finish the gradient sums of a step: see `GradientSums.finish`. Gradients of tensors whose ranks read the same
        rows are also summed over these ranks, those of copied experts over the copies."""
        super().finish()
        sum_of_slices(self._model)
        sum_of_copies(self._model)

    def passed(self) -> None:
        """Send the gradients that are not sent yet, after the last backward pass. `finish` does it too."""
        if not self._fsdp:
            self.send_rest()


def sum_gradients(communicator: AsyncCommunicator, params: Sequence[Tensor]) -> None:
    """Sum the gradients of replicated parameters over ranks, as `GradientReduction.finish` does; nothing where the
    communicator has no group.

    Args:
        communicator: of the ranks.
        params: the same on all of them, in one order.
    """
    GradientSums(communicator, params, BUCKET_BYTES).finish()


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _bucket(params: Sequence[Tensor], alignment: int) -> _Bucket:
    begins, numel = [], 0
    for param in params:
        begins.append(numel)
        numel += -(-param.numel() // alignment) * alignment
    if len(params) == 1:
        numel = params[0].numel()
    return _Bucket(tuple(params), tuple(begins), numel, _grad_dtype(params[0]))


def _grad_dtype(param: Tensor) -> torch.dtype:
    return param.grad_dtype or param.dtype


def _kind(param: Tensor) -> tuple[torch.dtype, torch.device]:
    return _grad_dtype(param), param.device


def _bytes(param: Tensor) -> int:
    return param.numel() * _grad_dtype(param).itemsize


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()


def _fills_memory(tensor: Tensor) -> bool:
    """True if elements that do not overlap fill a stretch of memory, for flat gradients."""
    reach = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != reach:
            return False
        reach *= size
    return True


def _like(flat: Tensor, param: Tensor) -> Tensor:
    """The beginning of flat memory of gradients in a parameter's shape, and in its order where it has no gaps."""
    if param.is_contiguous() or not _fills_memory(param):
        return flat[: param.numel()].view(param.shape)
    return flat.as_strided(param.shape, param.stride(), flat.storage_offset())


def check_as_many(group: dist.ProcessGroup | None, microbatches: int, device: torch.device) -> None:
    """Check before gradients are reduced that ranks that hold parts of one model, which they gather together, run as
    many micro-batches.

    Raises:
        ConfigError: on all ranks, where one has another number.
    """
    if group is None:
        return
    bounds = torch.tensor([microbatches, -microbatches], device=reduced_on(group, device))
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    most, fewest = bounds.tolist()
    least = -fewest
    if most != least:
        raise ConfigError(
            "Ranks of a sharded model with different numbers of micro-batches",
            got=f"{least} on one rank, {most} on another",
            need="the same number on each, some without targets if need be",
            try_="tilewright's `Stream`, which fills up ranks that have fewer rows",
        )
