"""Modules that multiply by weights of their own, as transformers writes them, given over to `Float8Weight`.

Two kinds are known for certain: `Conv1D` (GPT-2), a linear layer whose weight is stored [K, M]; and the stacked experts
of its mixtures, weights [E, M, K] or [E, K, M] behind one interface (`use_experts_implementation`), which promises that
implementations may be exchanged. A module becomes a subclass of its class, in place: parameters, names, hooks and
state_dict stay, and copies and pickles work. Read `owned` first.

Legend: N tokens  K input features  M output features  E experts  C experts chosen for a token.
"""

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.precision.float8.weight import Float8Weight
from tilewright.precision.mixed.derived import Derived, Maker, derive


@dataclass(frozen=True)
class Owned:
    """A weight that a module multiplies by in its own way.

    Args:
        name: of the parameter.
        bias: of the parameter added to the matmul; empty for none.
        stacked: [E, ., .], one matrix for each expert.
        transposed: stored [K, M], not [M, K].
    """

    name: str
    bias: str = ""
    stacked: bool = False
    transposed: bool = False

    def features(self, module: nn.Module) -> tuple[int, int]:
        """The input and output features of a third-party module's matrix, or of each matrix of a stack."""
        rows, columns = getattr(module, self.name).shape[-2:]
        return (rows, columns) if self.transposed else (columns, rows)

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Weight and bias of a third-party module."""
        return [getattr(module, name) for name in (self.name, self.bias) if name]


def owned(module: Any) -> tuple[Owned, ...]:
    """Owned weights of a third-party module that can be given over; none for a module of any other kind.

    Example:
        >>> owned(nn.Linear(2, 2))
        ()
    """
    if _is_conv1d(module):
        return (Owned("weight", "bias", transposed=True),)
    if not _is_stacked(module):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return tuple(Owned(name, f"{name}_bias" if module.has_bias else "", True, module.is_transposed) for name in names)


@dataclass(frozen=True)
class Given:
    """A weight that was given over, and what multiplies by it."""

    parameter: nn.Parameter
    matmuls: Float8Weight


def tile_weights(model: nn.Module) -> dict[str, Given]:
    """Weights of third-party modules that were given over, by the names of their rows in the report."""
    return {
        row_name(fqn, weight): Given(getattr(module, weight.name), module.tile_weights[weight.name])
        for fqn, module in model.named_modules()
        if isinstance(module, _GivenOver)
        for weight in owned(module)
    }


def counters(model: nn.Module) -> list[Tensor]:
    """Counters of what was executed of third-party weights, which a pass that leaves nothing behind puts back."""
    return [given.matmuls.counts for given in tile_weights(model).values()]


def row_name(fqn: str, weight: Owned) -> str:
    """Name a third-party weight in reports and rules: by its module, or by itself if the module has several."""
    return f"{fqn}.{weight.name}" if weight.stacked and fqn else weight.name if weight.stacked else fqn


def give_over(module: Any) -> dict[str, Float8Weight]:
    """Give a third-party module over: make its matmuls those of `Float8Weight`s, one for each weight by its name. They
    start in FP32."""
    if not isinstance(module, _GivenOver):
        module.tile_weights = {weight.name: Float8Weight() for weight in owned(module)}
        derive(module, _given_conv1d if _is_conv1d(module) else _given_experts)
    return module.tile_weights


class _GivenOver(Derived):
    """Marks the classes made here."""

    tile_weights: dict[str, Float8Weight]


@functools.cache
def _given_conv1d(plain: type[nn.Module]) -> type[nn.Module]:
    return _given_over(_Conv1D, plain, _given_conv1d)


@functools.cache
def _given_experts(plain: type[nn.Module]) -> type[nn.Module]:
    return _given_over(_Stacked, plain, _given_experts)


def _given_over(way: type, plain: type[nn.Module], maker: Maker) -> type[nn.Module]:
    names = {"plain": plain, "made_by": maker, "__module__": plain.__module__, "__doc__": plain.__doc__}
    return type(plain.__name__, (way, plain), names)


# ---- Conv1D ----


def _is_conv1d(module: Any) -> bool:
    """True for a third-party Conv1D. A model can only hold one where transformers is imported already."""
    source = sys.modules.get("transformers.pytorch_utils")
    return source is not None and isinstance(module, source.Conv1D)


class _Conv1D(_GivenOver):
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Run a third-party Conv1D: x [..., K] -> [..., M]."""
        return self.tile_weights["weight"].linear(x, self.weight.T, self.bias)


# ---- stacked experts ----

_INTERFACE = ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate")
"""Attributes of a module that transformers' implementations of experts read; its decorator sets it."""


def _is_stacked(module: Any) -> bool:
    """True for third-party stacked experts, behind transformers' interface, all of them on this device."""
    if not all(hasattr(module, name) for name in _INTERFACE) or getattr(module, "_is_expert_parallel", False):
        return False
    # Read as its code reads them: where other ranks hold other experts, a part stands there while it runs.
    stacks = [getattr(module, name) for name, param in module.named_parameters(recurse=False) if param.ndim == 3]
    return len(stacks) == 2 and all(len(stack) == module.num_experts for stack in stacks)


class _Stacked(_GivenOver):
    """Each token's experts, weighted and summed, as transformers' own implementations compute them."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run third-party stacked experts: hidden_states [N, K], index [N, C] int64 and weights [N, C] of the chosen
        experts -> [N, K].

        An index of E or more is no expert's, and adds nothing.
        """
        if torch.compiler.is_compiling():
            from tilewright.ops.base.opaque import eager  # its decorators take seconds to import

            return eager(self.run_experts, hidden_states, top_k_index, top_k_weights)
        return self.run_experts(hidden_states, top_k_index, top_k_weights)

    def run_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run the third-party experts that tokens were routed to: see `forward`. Not for compiled code: shapes depend
        on the data."""
        num_tokens, num_chosen = top_k_index.shape
        experts = top_k_index.reshape(-1)
        order = experts.argsort(stable=True)
        counts = _rows_of_each(experts, self.num_experts)
        order = order[: sum(counts[:-1])]
        # A copy of its row for each choice, not `index // C`: whose gradient is summed in 16 bits, in any order.
        copies = hidden_states.unsqueeze(1).expand(-1, num_chosen, -1).flatten(0, 1)
        rows = copies.index_select(0, order)
        first, second = owned(self)
        inner = self._multiply(first, rows, counts[:-1])
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        out = self._multiply(second, inner, counts[:-1])
        if getattr(self, "has_post_expert_norm", False):
            out = self.post_expert_norm(out)
        out = out * top_k_weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        slots = out.new_zeros(num_tokens * num_chosen, out.shape[-1]).index_copy(0, order, out)
        return slots.view(num_tokens, num_chosen, -1).sum(1).to(hidden_states.dtype)

    def _multiply(self: Any, weight: Owned, rows: Tensor, counts: list[int]) -> Tensor:
        stack = getattr(self, weight.name)
        bias = getattr(self, weight.bias) if weight.bias else None
        stack_EMK = stack.transpose(1, 2) if weight.transposed else stack
        return self.tile_weights[weight.name].grouped(rows, counts, stack_EMK, bias)


def _rows_of_each(experts: Tensor, num_experts: int) -> list[int]:
    """Count the choices of each third-party expert, and at the end those of none."""
    if isinstance(experts, FakeTensor):  # a plan's: nobody chooses, so all are equally busy
        share, rest = divmod(experts.numel(), num_experts)
        return [share + (index < rest) for index in range(num_experts)] + [0]
    return torch.bincount(experts.clamp(max=num_experts), minlength=num_experts + 1).tolist()
