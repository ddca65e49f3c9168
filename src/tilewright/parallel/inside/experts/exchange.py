"""Rows of tokens to the ranks that hold their experts, and the experts' results back. Nothing is dropped.

    exchange = ExpertExchange(group, num_experts=8)
    out_PD = exchange(rows_PD, counts_E, run)   # rows sorted by expert, as many as `counts_E` of each

Each rank sends the rows of an expert to the rank that holds it, in three all-to-alls: how many (a number for each
expert), the rows, the results. A rank's experts see the rows of rank 0 first, in its order, then those of rank 1: one
process with the micro-batches of all ranks after one another has the same rows in the same places, and the same codes
where tiles of 8-bit formats go across rows. Backward sends gradients the same ways in reverse, so an expert has its
gradient over the rows of all ranks in the group, and nothing is left to be summed over them.

Rows travel in their own dtype. How they are written for the way is `_AllToAll`'s matter alone.

Legend: P rows of all tokens' experts  D model width  E experts  R ranks.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.models.decoder.moe import RunExperts, permuted
from tilewright.parallel.communicate.traffic import TrafficCounter, wire_name
from tilewright.parallel.world import Group


class ExpertExchange:
    """Runs experts that are spread over ranks. All ranks of the group call it together.

    Args:
        group: the ranks. The first holds the first experts.
        num_experts: of a layer, on all of them.
        traffic: counts what is sent; None: a counter of its own.
    """

    def __init__(self, group: Group, num_experts: int, traffic: TrafficCounter | None = None) -> None:
        self.group, self.num_experts = group, num_experts
        self.traffic = TrafficCounter() if traffic is None else traffic
        self.sent_bytes = 0
        """Of rows, results and their gradients, that this rank has sent to others."""

    @property
    def held(self) -> range:
        """The numbers of this rank's experts.

        Example:
            >>> ExpertExchange(Group(1, 4), 8).held
            range(2, 4)
        """
        each = self.num_experts // self.group.size
        return range(self.group.rank * each, (self.group.rank + 1) * each)

    def __call__(self, rows_PD: Tensor, counts_E: Tensor, run: RunExperts) -> Tensor:
        """What the experts make of the rows, row by row.

        Args:
            rows_PD: [P, D] rows sorted by expert.
            counts_E: int64 [E], how many there are for each expert.
            run: this rank's experts.

        Returns:
            [P, D] in the dtype that `run` gives.
        """
        ranks, each = self.group.size, len(self.held)
        got_RE = torch.empty_like(counts_E)
        dist.all_to_all_single(got_RE, counts_E, group=self.group.handle)
        numbers = torch.stack([counts_E, got_RE]).view(2, ranks, each)  # read on the host at once
        (sends, gets), own = numbers.sum(2).tolist(), numbers[1].sum(0).tolist()
        arrived_PD = self._all_to_all(rows_PD, sends, gets)
        expert = torch.arange(each, device=rows_PD.device).repeat(ranks).repeat_interleave(got_RE)
        order = expert.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        outs = run(permuted(arrived_PD, order, inverse).split(own))
        return self._all_to_all(permuted(torch.cat(outs), inverse, order), gets, sends)

    def _all_to_all(self, rows: Tensor, sends: list[int], gets: list[int]) -> Tensor:
        return _AllToAll.apply(rows, sends, gets, self)


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: the first `sends[0]` to the first one, and so on. Backward sends gradients back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sends: list[int], gets: list[int], exchange: ExpertExchange) -> Tensor:
        ctx.sends, ctx.gets, ctx.exchange = sends, gets, exchange
        found = rows.new_empty(sum(gets), *rows.shape[1:])
        began, kind = time.perf_counter(), ("ep", "all_to_all", wire_name(rows.dtype))
        dist.all_to_all_single(found, rows.contiguous(), gets, sends, group=exchange.group.handle)
        others = sum(sends) - sends[exchange.group.rank]
        sent = others * rows[:1].numel() * rows.element_size() if len(rows) else 0
        exchange.sent_bytes += sent
        exchange.traffic.sent(*kind, sent)
        if not rows.is_cuda:
            took = time.perf_counter() - began
            exchange.traffic.took(*kind, took, took)
        return found

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.gets, ctx.sends, ctx.exchange), None, None, None
