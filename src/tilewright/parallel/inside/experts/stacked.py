"""Experts of a Hugging Face model, stacked in one tensor per matrix [E, N, K], of which a rank holds some.

Parameters are DTensors over `ep` for what stores and updates them: names, optimizer, checkpoints have whole tensors.
While the module runs, a hook puts the rank's part in their place, as a plain tensor, and the module's code runs the
experts that are here: the hook before it has sent rows of tokens to where their experts are, and hands it those that
have come, each for one expert, with a weight of one. The hook behind it sends the results back, and weighs them. A
layer that is recomputed in backward sends its tokens to the experts of the forward pass, whatever its router chooses
then: ranks exchange rows of the same sizes.

`forward` is never replaced, so formats move and evaluation is in FP32 as in a model that is whole.

See: transformers, `distributed.expert_parallel`, whose `EPImplementation`s replace `forward` on the object.

Legend: N tokens  K experts a token  P rows  D model width  E experts.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tilewright.models.decoder.moe import permuted
from tilewright.parallel.inside.experts.exchange import ExpertExchange, SentRows
from tilewright.parallel.inside.tensor.parameter_parts import part_along

NO_BACKWARD = -1
"""What torch calls the backward pass that runs where none does. It has no public name for whether one does."""
TAKES = ("hidden_states", "top_k_index", "top_k_weights")
"""What the experts of transformers are called with."""


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of stacked experts that can be spread, with their names: they say how many there are (`num_experts`), all
    their parameters are stacks of so many, and they are called with tokens, choices and weights."""
    for name, module in model.named_modules():
        params = list(module.parameters())
        number = getattr(module, "num_experts", None)
        if not isinstance(number, int) or not params or any(param.ndim < 2 or len(param) != number for param in params):
            continue
        if tuple(inspect.signature(type(module).forward).parameters)[1:] == TAKES:
            yield name, module


@torch.no_grad()
def spread_stack(module: nn.Module, exchange: ExpertExchange, ep: DeviceMesh, shards: DeviceMesh) -> None:
    """Keep this rank's experts of a module with stacks, in place.

    Args:
        module: from `stacked_experts`; its parameters are new objects.
        exchange: of its experts.
        ep: the axis over which experts are spread.
        shards: over which FSDP2 shards them.
    """
    for name, whole in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, part_along(ep, whole, 0))
    module.sharded_over = shards  # type: ignore[assignment]
    ways: list[_Sent] = []
    chosen: list[Tensor] = []

    def choices(experts_NK: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != NO_BACKWARD and chosen and chosen[0].shape == experts_NK.shape:
            return chosen[0]
        if torch.is_grad_enabled() or not chosen:
            chosen[:] = [experts_NK.detach()]
        return experts_NK

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x_ND, experts_NK, weights_NK = (*args, *(kwargs[name] for name in TAKES[len(args) :]))
        sent, rows_PD, expert_P = _Sent.of(exchange, x_ND, choices(experts_NK), weights_NK)
        ways.append(sent)
        module.num_experts = len(exchange.held)  # type: ignore[assignment]  # its code runs as many
        for name, param in module._parameters.items():
            if isinstance(param, DTensor):  # found before the parameter by whoever reads the attribute
                module.__dict__[name] = param.to_local()
        return (rows_PD, expert_P[:, None], torch.ones_like(expert_P[:, None], dtype=weights_NK.dtype)), {}

    def behind(module: nn.Module, _: Any, __: Any, out: Tensor | None) -> Tensor | None:
        for name in module._parameters:
            module.__dict__.pop(name, None)
        module.num_experts = exchange.num_experts  # type: ignore[assignment]
        sent = ways.pop()
        return None if out is None else sent.back(exchange, out)  # None: the module has raised

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(behind, with_kwargs=True, always_call=True)


@dataclass(frozen=True)
class _Sent:
    """Tokens whose rows are with their experts."""

    way: SentRows
    order: Tensor
    inverse: Tensor
    weights_NK: Tensor
    dtype: torch.dtype
    arrived: int
    """Rows that have come; the module runs on one at least, so that its parameters have gradients."""

    @staticmethod
    def of(
        exchange: ExpertExchange, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor
    ) -> "tuple[_Sent, Tensor, Tensor]":
        """Send tokens to stacked experts; (what brings them back, rows that have come [P, D], the expert here of each
        [P])."""
        flat = experts_NK.flatten()
        order = flat.argsort(stable=True)
        counts_E = torch.bincount(flat, minlength=exchange.num_experts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        copies = x_ND.unsqueeze(1).expand(-1, experts_NK.shape[1], -1).flatten(0, 1)
        rows_PD, own, way = exchange.there(permuted(copies, order, inverse), counts_E)
        expert_P = torch.arange(len(own), device=order.device).repeat_interleave(torch.tensor(own, device=order.device))
        arrived = len(rows_PD)
        if not arrived:
            rows_PD, expert_P = F.pad(rows_PD, (0, 0, 0, 1)), expert_P.new_zeros(1)
        return _Sent(way, order, inverse, weights_NK, x_ND.dtype, arrived), rows_PD, expert_P

    def back(self, exchange: ExpertExchange, out_PD: Tensor) -> Tensor:
        """Results of stacked experts for the sent tokens, weighted and summed: [N, D]."""
        out_PD = exchange.back(out_PD[: self.arrived], self.way)
        out_NKD = permuted(out_PD, self.inverse, self.order).unflatten(0, self.weights_NK.shape)
        return (out_NKD * self.weights_NK.unsqueeze(-1)).sum(1).to(self.dtype)
