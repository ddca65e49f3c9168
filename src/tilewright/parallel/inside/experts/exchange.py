"""Rows of tokens to the ranks that hold their experts, and the experts' results back. Nothing is dropped.

    exchange = ExpertExchange(group, num_experts=8)
    out_PD = exchange(rows_PD, counts_E, run)   # rows sorted by expert, as many as `counts_E` of each

Each rank sends the rows of an expert to the rank that holds it, in three all-to-alls: how many (a number for each
expert), the rows, the results. (Keys that rows have, by which adapters drop inputs, are a fourth.) A rank's experts see
the rows of rank 0 first, in its order, then those of rank 1: one process with the micro-batches of all ranks after one
another has the same rows in the same places, and the same codes where tiles of 8-bit formats go across rows. Backward
sends gradients the same ways in reverse, so an expert has its gradient over the rows of all ranks in the group, and
nothing is left to be summed over them. Of an expert that several ranks hold each gets as many of a rank's rows as the
others, and their gradients are summed (`redundant_experts`).

Rows travel in their own dtype, results and gradients always. With `dispatch="fp8"` the rows of the way there are E4M3
with a power-of-two scale per 128 values of a row, 1 byte and 1/128 per value (`communicate.wire_messages`). What
arrives has the values of these codes, in the rows' dtype, exactly: 8-bit matmuls that quantise a row again have the
values that were sent, and the column-wise copy of the weight's gradient rounds a second time only what becomes
subnormal beside the larger tokens of its tile. Rows that stay on their rank are rounded too, so that no result depends
on who holds what. Gradients pass the rounding as they are.

See: DeepSeek-V3 report, section 3.3.3 (dispatch in FP8, combine in BF16).

Legend: P rows of all tokens' experts  D model width  E experts  S experts that ranks hold, each copy counted  R ranks
B bytes of a row.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.core.config.sections.parallel import DispatchName
from tilewright.models.decoder.moe import RunExperts, permuted
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.traffic import wire_name
from tilewright.parallel.communicate.wire_messages import pack, unpack
from tilewright.parallel.inside.experts.placement import by_rank
from tilewright.parallel.world import Group


@dataclass(frozen=True)
class SentRows:
    """Rows that are sent to experts: how many go to and come from each rank, and the order by expert of those that
    come."""

    sends: list[int]
    gets: list[int]
    order: Tensor
    inverse: Tensor
    placed: tuple[Tensor, Tensor] | None = None
    """Where ranks hold the experts in another order, or copies: the order of the rows by who holds them, and back."""
    keys: Tensor | None = None
    """Of the rows that came, sorted as these are; None where rows have none."""


class ExpertExchange:
    """Runs experts that are spread over ranks. All ranks of the group call it together.

    Args:
        group: the ranks. Its counter counts what is sent.
        num_experts: of a layer, on all of them.
        order: the experts that ranks hold, as many on each, those of the first rank first, each rank's in the order of
            their numbers; some on several ranks. None: each once, in the order of their numbers.
        dispatch: what rows travel as on their way there.
        kernels: make FP8 codes; None: the machine's best.
        trained: whether an expert of any rank has something to train. The others of a frozen layer that reads what
            needs no gradient have none to send back, and send it all the same.
    """

    def __init__(
        self,
        group: Group,
        num_experts: int,
        *,
        order: Sequence[int] | None = None,
        dispatch: DispatchName = "stream",
        kernels: Kernels | None = None,
        trained: bool = False,
    ) -> None:
        self.order = tuple(range(num_experts) if order is None else order)
        self._as_numbered = self.order == tuple(range(num_experts))
        self.group, self.num_experts, self.dispatch, self.trained = group, num_experts, dispatch, trained
        self.kernels = kernels or (Kernels.default() if dispatch == "fp8" else None)
        self.sent_bytes = 0
        """Of rows, results and their gradients, that this rank has sent to others."""

    @property
    def held(self) -> tuple[int, ...]:
        """The numbers of this rank's experts, in the exchange of tokens.

        Example:
            >>> ExpertExchange(Group(1, 4), 8).held, ExpertExchange(Group(1, 2), 4, order=(0, 2, 3, 0, 1, 3)).held
            ((2, 3), (0, 1, 3))
        """
        return self.held_by_rank[self.group.rank]

    @cached_property
    def held_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the experts of each rank, in the exchange of tokens."""
        return by_rank(self.order, self.group.size)

    def __call__(self, rows_PD: Tensor, counts_E: Tensor, run: RunExperts, keys_P: Tensor | None = None) -> Tensor:
        """Exchange rows of tokens with the ranks of their experts; returns the experts' output, row by row.

        Args:
            rows_PD: [P, D] rows sorted by expert.
            counts_E: int64 [E], how many there are for each expert.
            run: this rank's experts.
            keys_P: [P] of the rows, go with them; None on all ranks: they have none.

        Returns:
            [P, D] in the dtype that `run` gives.
        """
        arrived_PD, own, way = self.there(rows_PD, counts_E, keys_P)
        keys = () if way.keys is None else (way.keys.split(own),)
        return self.back(torch.cat(run(arrived_PD.split(own), *keys)), way)

    def there(
        self, rows_PD: Tensor, counts_E: Tensor, keys_P: Tensor | None = None
    ) -> tuple[Tensor, list[int], "SentRows"]:
        """Send rows to the ranks of their experts, the first half of the exchange. Returns the rows that came for this
        rank's experts, sorted by expert, how many each has, and what takes their results back.

        Args:
            rows_PD: [P, D] rows sorted by expert.
            counts_E: int64 [E], how many there are for each expert.
            keys_P: [P] of the rows, or None on all ranks.
        """
        ranks, each = self.group.size, len(self.held)
        placed = None
        counts_S = counts_E
        if not self._as_numbered:
            counts_S, placed = self._by_holder(counts_E, len(rows_PD))
            rows_PD = permuted(rows_PD, *placed)
            keys_P = None if keys_P is None else keys_P[placed[0]]
        got_S = torch.empty_like(counts_S)
        dist.all_to_all_single(got_S, counts_S, group=self.group.handle)
        numbers = torch.stack([counts_S, got_S]).view(2, ranks, each)  # read on the host at once
        (sends, gets), own = numbers.sum(2).tolist(), numbers[1].sum(0).tolist()
        arrived_PD = _AllToAll.apply(rows_PD, sends, gets, self, self.dispatch)
        expert = torch.arange(each, device=rows_PD.device).repeat(ranks).repeat_interleave(got_S)
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        if keys_P is not None:
            keys_P = self._bytes(keys_P, sends, gets, wire_name(keys_P.dtype))[order]
        return permuted(arrived_PD, order, inverse), own, SentRows(sends, gets, order, inverse, placed, keys_P)

    def _by_holder(self, counts_E: Tensor, num_rows: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Order rows by the experts that a rank holds: how many go to each [S], the order, and its inverse. The rows of
        an expert are cut into as many equal runs as it has copies; which rank's copy gets the first run differs from
        rank to rank, so that no copy gets the remainder of all."""
        holds, number, copies = torch.tensor(self._copies, device=counts_E.device).unbind(1)
        begins_S = counts_E[holds] * number // copies
        counts_S = counts_E[holds] * (number + 1) // copies - begins_S
        begins_S += (counts_E.cumsum(0) - counts_E)[holds]
        moves_S = begins_S - (counts_S.cumsum(0) - counts_S)
        order_P = torch.arange(num_rows, device=counts_E.device)
        order_P = order_P + moves_S.repeat_interleave(counts_S, output_size=num_rows)
        return counts_S, (order_P, order_P.argsort())

    @cached_property
    def _copies(self) -> list[tuple[int, int, int]]:
        """List the experts that a rank holds by number, which copy of the expert each is, and how many copies there
        are."""
        copies, seen = Counter(self.order), Counter[int]()
        found = []
        for expert in self.order:
            found.append((expert, (seen[expert] + self.group.rank) % copies[expert], copies[expert]))
            seen[expert] += 1
        return found

    def back(self, outs_PD: Tensor, way: "SentRows") -> Tensor:
        """Send the experts' results [P, D] back in the order of the rows, the second half of the exchange.

        Args:
            outs_PD: in the order of the rows that had come.
            way: of those.
        """
        if self.trained and torch.is_grad_enabled() and not outs_PD.requires_grad:
            outs_PD = outs_PD.detach().requires_grad_()  # backward comes as far as here on all ranks
        outs_PD = _AllToAll.apply(permuted(outs_PD, way.inverse, way.order), way.gets, way.sends, self, "stream")
        return outs_PD if way.placed is None else permuted(outs_PD, *way.placed[::-1])

    def travel(self, rows_PD: Tensor, sends: list[int], gets: list[int], dispatch: DispatchName) -> Tensor:
        """Rows of an experts' exchange from all ranks, in their order. No autograd.

        Args:
            rows_PD: for all ranks, in their order.
            sends, gets: rows to and from each.
            dispatch: what they travel as.
        """
        if dispatch == "stream":
            return self._bytes(rows_PD.contiguous(), sends, gets, wire_name(rows_PD.dtype))
        assert self.kernels is not None, "made with the format"
        width = rows_PD.shape[1]
        packed_PB = pack(rows_PD.contiguous(), dispatch, self.kernels)
        found_PD = unpack(self._bytes(packed_PB, sends, gets, dispatch), width, dispatch)
        if rows_PD.dtype == torch.float16:  # the largest value may be rounded up to more than there is
            most = torch.finfo(torch.float16).max
            found_PD.clamp_(-most, most)
        return found_PD.to(rows_PD.dtype)

    def _bytes(self, rows: Tensor, sends: list[int], gets: list[int], wire: str) -> Tensor:
        found = rows.new_empty(sum(gets), *rows.shape[1:])
        others = sum(sends) - sends[self.group.rank]
        sent = others * rows[:1].numel() * rows.element_size() if len(rows) else 0
        self.sent_bytes += sent
        with self.group.traffic.waited("all_to_all", rows, sent, wire):
            dist.all_to_all_single(found, rows, gets, sends, group=self.group.handle)
        return found


class _AllToAll(torch.autograd.Function):
    """Send rows to other ranks: the first `sends[0]` to the first one, and so on. Backward sends gradients back."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, sends: list[int], gets: list[int], exchange: ExpertExchange, dispatch: DispatchName
    ) -> Tensor:
        ctx.sends, ctx.gets, ctx.exchange = sends, gets, exchange
        return exchange.travel(rows, sends, gets, dispatch)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, ctx.gets, ctx.sends, ctx.exchange, "stream"), None, None, None, None
