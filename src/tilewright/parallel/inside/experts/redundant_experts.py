"""Experts that several ranks hold a copy of (`parallel.redundant_experts`): one gradient for all copies, counted once.

Each copy sees some of the rows of its expert, so that the sum over copies is the gradient over all rows. A rank sends
its own to the others that hold the expert, and adds up what has come in the order of ranks: copies get the same bits,
and with them the same updates, and no weights travel. Layers take turns: beside gradients a rank has, for a moment, two
more of those that it shares in one layer.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.ops.base.tensor_parts import local
from tilewright.parallel.communicate.traffic import wire_name
from tilewright.parallel.inside.experts.exchange import ExpertExchange
from tilewright.parallel.inside.experts.rank_experts import mixtures


def held_before(model: nn.Module) -> frozenset[Tensor]:
    """Parameters of copies of this rank's experts that a rank before it holds too.

    Args:
        model: what `hold_experts` has made of it, or any other.
    """
    found: set[Tensor] = set()
    for experts, exchange in _with_copies(model):
        before = {expert for held in exchange.held_by_rank[: exchange.group.rank] for expert in held}
        found.update(param for number in before & experts.keys() for param in experts[number].parameters())
    return frozenset(found)


@torch.no_grad()
def sum_of_copies(model: nn.Module) -> None:
    """Add up the gradients of experts' copies. Once per step, when each is summed over the rows that its copy has seen;
    all ranks that hold experts of a layer call it together.

    Args:
        model: see `held_before`.
    """
    for experts, exchange in _with_copies(model):
        _sum(experts, exchange)


def _with_copies(model: nn.Module) -> list[tuple[dict[int, nn.Module], ExpertExchange]]:
    """Find the layers in which ranks hold copies of experts: this rank's experts of each, and their exchange."""
    exchanges = ((layer, layer.exchange) for layer in mixtures(model))
    return [
        (dict(zip(exchange.held, layer.experts, strict=True)), exchange)
        for layer, exchange in exchanges
        if isinstance(exchange, ExpertExchange) and len(exchange.order) > exchange.num_experts
    ]


def _sum(experts: dict[int, nn.Module], exchange: ExpertExchange) -> None:
    # 1. What this rank sends to each other one: its gradients of the experts that both hold, flat, in FP32.
    group, held = exchange.group, exchange.held_by_rank
    shared = [sorted(experts.keys() & set(of_rank)) if rank != group.rank else [] for rank, of_rank in enumerate(held)]
    grads = {
        number: [local(param.grad) for param in experts[number].parameters() if param.grad is not None]
        for number in sorted({number for of_rank in shared for number in of_rank})
    }
    own = {number: torch.cat([grad.flatten().float() for grad in parts]) for number, parts in grads.items() if parts}
    pairs = [(rank, number) for rank, of_rank in enumerate(shared) for number in of_rank if number in own]
    # Both ranks of a pair send equally much: gradients of the same experts.
    sizes = [sum(len(own[number]) for to, number in pairs if to == rank) for rank in range(group.size)]
    device = next(next(iter(experts.values())).parameters()).device
    sent = torch.cat([torch.empty(0, device=device), *(own[number] for _, number in pairs)])
    came = torch.empty_like(sent)
    with group.traffic.waited("all_to_all", sent, sent.nbytes, wire_name(sent.dtype)):
        dist.all_to_all_single(came, sent, sizes, sizes, group=group.handle)
    # 2. Summed in the order of ranks, which is the same on all: copies get the same bits.
    others = dict(zip(pairs, came.split([len(own[number]) for _, number in pairs]), strict=True))
    for number, mine in own.items():
        first, *rest = (
            mine if rank == group.rank else others[rank, number]
            for rank, of_rank in enumerate(held)
            if number in of_rank
        )
        total = first.clone()
        for part in rest:
            total += part
        for grad, part in zip(grads[number], total.split([grad.numel() for grad in grads[number]]), strict=True):
            grad.copy_(part.view_as(grad))
