"""Exchanges of FSDP2's groups, in a wire format and counted: by its public `set_custom_reduce_scatter` and
`set_custom_all_gather`, and `set_all_reduce_hook` for copies of the shards.

    exchange_shards(model, AsyncCommunicator(group, axis="dp_shard", wire="fp8", traffic=traffic))

Gradients are summed in the wire format. Parameters are gathered as they are, or as codes where their layers read no
more (`coded_weights`), and counted. torch calls these in its own streams on a GPU, and waits for each on a CPU.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.log import get_logger
from tilewright.parallel.communicate.coded_weights import EXACT, GatheredPart, offsets
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.traffic import Operation, whole_bytes, wire_name
from tilewright.parallel.communicate.transport import GroupTransport, all_gather_rows, reduce_scatter_rows
from tilewright.parallel.inside.experts.rank_experts import expert_meshes
from tilewright.parallel.shard import fsdp_modules
from tilewright.precision.assign.gather_dtype import param_groups, reads_codes

log = get_logger(__name__)


class _Counted:
    """A collective of one group's, as FSDP2 asks for it.

    Args:
        communicator: says how, and counts.
        name: of the group, for error feedback.
    """

    def __init__(self, communicator: AsyncCommunicator, name: str) -> None:
        self._communicator, self._name = communicator, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of what an exchange of FSDP2 sends, or receives."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _timed(self, operation: Operation, wire: str, tensor: Tensor, work: Any) -> Any:
        """The timed result of an exchange of FSDP2, `work`; it is through then, but on a GPU, or where it is
        asynchronous."""
        began = time.perf_counter()
        found = work()
        if found is None and not tensor.is_cuda:
            took = time.perf_counter() - began
            self._communicator.traffic.took(self._communicator.axis, operation, wire, took, took)
        return found


class CountedAllGather(_Counted):
    """FSDP2's all-gather of a group's parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather the ranks' parts for FSDP2, counted."""
        wire, size = wire_name(input_tensor.dtype), whole_bytes("all_gather", output_tensor.nbytes, group.size())
        self._communicator.traffic.sent(self._communicator.axis, "all_gather", wire, size)
        options = {"group": group, "async_op": async_op}
        return self._timed(
            "all_gather", wire, output_tensor, lambda: all_gather_rows(output_tensor, input_tensor, **options)
        )


class CodedAllGather(CountedAllGather):
    """FSDP2's all-gather of a group's parameters, as 8-bit codes if layers read such codes, else as they are.

    Which these are is seen in each gather: where matmuls have left 8 bits since the last one, their weights are
    gathered as they are from now on, and a warning says so. What is gathered has the values of the codes, in the dtype
    of the others, so it takes the memory that it takes without them.

    Args:
        communicator, name: see `_Counted`.
        group: of FSDP2, whose parameters these are.
    """

    def __init__(self, communicator: AsyncCommunicator, name: str, group: Any) -> None:
        super().__init__(communicator, name)
        self._group, self._coded = group, -1

    def _pieces(self) -> list[GatheredPart]:
        pieces = [_piece(held) for held in self._group.fsdp_params]
        coded = sum(piece.shape is not None for piece in pieces)
        if 0 <= coded < self._coded:
            log.warning(
                "%d of %d weights of %s are gathered as they are from now on: their matmuls have left 8 bits",
                *(self._coded - coded, self._coded, self._name),
            )
        self._coded = coded
        return pieces

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather the ranks' parts for FSDP2 as codes; through, or in the order of its stream, before it returns."""
        pieces = self._pieces()
        if not self._coded:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        axis, traffic = self._communicator.axis, self._communicator.traffic
        others = group.size() - 1
        for piece in pieces:
            wire = wire_name(piece.dtype) if piece.shape is None else "fp8"
            traffic.sent(axis, "all_gather", wire, others * piece.sent_bytes)
        exchange = partial(self._exchange, output_tensor, input_tensor, group, pieces)
        return self._timed("all_gather", "fp8", output_tensor, exchange)

    def _exchange(self, out: Tensor, own: Tensor, group: dist.ProcessGroup, pieces: Sequence[GatheredPart]) -> None:
        rank, ranks = group.rank(), group.size()
        parts = [(piece, _values(part, piece)) for piece, part in zip(pieces, _split(own, pieces), strict=True)]
        grids = self._shared_scales(parts, group)
        kernels = self._communicator.codes
        sent = [
            part.reshape(-1).view(torch.uint8)
            if piece.shape is None
            else piece.pack(part.view(piece.shape), rank, grid, kernels)
            for (piece, part), grid in zip(parts, grids, strict=True)
        ]
        row_B = torch.cat(sent)
        found = row_B.new_empty(ranks * row_B.numel())
        all_gather_rows(found, row_B, group=group)
        bounds = list(pairwise(offsets([piece.sent_bytes for piece in pieces])))
        for other, (row, place) in enumerate(zip(found.view(ranks, -1), out.view(ranks, -1), strict=True)):
            for piece, (begin, end), target in zip(pieces, bounds, _split(place, pieces), strict=True):
                if piece.shape is None:
                    target.view(torch.uint8).copy_(row[begin:end])
                elif target.dtype == piece.dtype:
                    piece.unpack(row[begin:end], other, target.view(piece.shape))
                else:  # among tensors of several dtypes it is bytes, which may begin anywhere
                    values = torch.empty(piece.shape, dtype=piece.dtype, device=row.device)
                    piece.unpack(row[begin:end], other, values)
                    target.copy_(values.view(-1).view(torch.uint8))

    def _shared_scales(
        self, parts: Sequence[tuple[GatheredPart, Tensor]], group: dist.ProcessGroup
    ) -> list[Tensor | None]:
        """Exchange the largest magnitudes of tiles that are divided among ranks, in one all-reduce, so that FSDP2's
        codes share their scales."""
        rank, ranks = group.rank(), group.size()
        grids = [
            None if piece.shape is None or piece.is_even else piece.amax(part.view(piece.shape), rank, ranks)
            for piece, part in parts
        ]
        uneven = [grid for grid in grids if grid is not None]
        if uneven:
            flat = torch.cat([grid.flatten() for grid in uneven])
            size = whole_bytes("all_reduce", flat.nbytes, ranks)
            self._communicator.traffic.sent(self._communicator.axis, "all_reduce", "fp32", size)
            dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
            for grid, found in zip(uneven, flat.split([grid.numel() for grid in uneven]), strict=True):
                grid.view(-1).copy_(found)
        return grids


def _piece(held: Any) -> GatheredPart:
    """The part of a parameter of FSDP2 that a rank sends."""
    size, where = held.padded_sharded_param_size, held._module_info
    dtype = held.param_dtype or held.orig_dtype
    alone = where.param_name == "weight" and not where.shared_modules
    coded = alone and len(size) == 2 and dtype in EXACT and reads_codes(where.module)
    return GatheredPart(size.numel(), dtype, (size[0], size[1]) if coded else None)


def _split(flat: Tensor, pieces: Sequence[GatheredPart]) -> Sequence[Tensor]:
    """The pieces of an exchange of FSDP2 from one rank; of bytes, where their dtypes differ."""
    whole = flat.dtype != torch.uint8
    return flat.split([piece.numel if whole else piece.nbytes for piece in pieces])


def _values(part: Tensor, piece: GatheredPart) -> Tensor:
    return part if part.dtype == piece.dtype else part.clone().view(piece.dtype)


class WireReduceScatter(_Counted):
    """FSDP2's reduce-scatter of a group's gradients, which are FP32.

    Attributes:
        ended_s: `perf_counter` when this rank last had its part of the sum; of one part, which FSDP2 copies, when it
            had the memory for that.
    """

    ended_s = 0.0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the ranks' gradients for FSDP2's reduce-scatter, then of this rank's part."""
        found = super().allocate(size, dtype=dtype, device=device)
        self.ended_s = time.perf_counter()
        return found

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Sum the ranks' gradients for FSDP2's reduce-scatter and give each rank its part. A wire format has sums only;
        `shard` asks for nothing else."""
        communicator = self._communicator
        if communicator.packs(input_tensor):
            assert op == dist.ReduceOp.SUM, "gradients are sums"
            wire, transport = communicator.wire, GroupTransport(group)
            work = partial(communicator.scatter_packed, transport, output_tensor, input_tensor, self._name)
        else:
            wire = wire_name(input_tensor.dtype)
            size = whole_bytes("reduce_scatter", input_tensor.nbytes, group.size())
            communicator.traffic.sent(communicator.axis, "reduce_scatter", wire, size)
            options = {"op": op, "group": group, "async_op": async_op}
            work = partial(reduce_scatter_rows, output_tensor, input_tensor, **options)
        found = self._timed("reduce_scatter", wire, input_tensor, work)
        self.ended_s = time.perf_counter()
        return found


def exchange_shards(
    model: nn.Module,
    shards: AsyncCommunicator,
    *,
    experts: AsyncCommunicator | None = None,
    copies: AsyncCommunicator | None = None,
    coded: bool = False,
) -> None:
    """Exchange shards of FSDP2's groups by communicators, and count what is sent.

    Args:
        model: from `parallel.shard`.
        shards: of the model.
        experts: shards of experts that are spread over other ranks; None where none are.
        copies: of the shards. In `fp32` FSDP2 sums their gradients itself, between its reduce-scatter and its hook:
            that time is counted as theirs. In other formats the model is sharded over an axis alone, and what the hook
            does is their sum. None: one copy.
        coded: weights whose layers read 8-bit codes are gathered as these.
    """
    if coded:
        _tell(model)
    spread = expert_meshes(model).keys()
    names = {module: name for name, module in model.named_modules()}
    for module in fsdp_modules(model):
        groups = param_groups(module)
        for place, group in enumerate(groups):
            of_experts = any(held.sharded_param in spread for held in group.fsdp_params)
            one = experts if experts is not None and of_experts else shards
            name = f"{names.get(module, '')}.{place}"
            gather = CodedAllGather(one, name, group) if coded else CountedAllGather(one, name)
            reduce = WireReduceScatter(one, name)
            hook = None if copies is None else partial(_sum_copies, copies, f"{name}.copies", reduce)
            if len(groups) == 1:
                module.set_custom_all_gather(gather)  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
                if hook is not None:
                    module.set_all_reduce_hook(hook)
            else:  # FSDP2 has no public way where one module's parameters have two meshes
                group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook = gather, reduce, hook


def _tell(model: nn.Module) -> None:
    """Tell FSDP2's exchanges which of a model's matrices travel as codes."""
    groups = [group for module in fsdp_modules(model) for group in param_groups(module)]
    pieces = [_piece(held) for group in groups for held in group.fsdp_params if len(held.padded_sharded_param_size) > 1]
    coded = sum(piece.shape is not None for piece in pieces)
    if coded:
        log.info("%d of %d matrices are gathered in FP8", coded, len(pieces))
    else:
        log.warning("No weight is gathered in FP8: matmuls of no layer read theirs in tiles of FP8 alone")


def _sum_copies(copies: AsyncCommunicator, name: str, reduce: WireReduceScatter, part: Tensor) -> None:
    if copies.packs(part):
        copies.async_all_reduce(part, name=name).wait()
        return
    wire = wire_name(part.dtype)  # FSDP2 has summed it
    size = whole_bytes("all_reduce", part.nbytes, dist.get_world_size(copies.group))
    copies.traffic.sent(copies.axis, "all_reduce", wire, size)
    if not part.is_cuda:
        took = time.perf_counter() - reduce.ended_s
        copies.traffic.took(copies.axis, "all_reduce", wire, took, took)
