"""One Muon update of one matrix, or of a stack of them, whatever its momentum and weights are stored in.

In FP32, with decoupled decay, in torch.optim.Muon's order of operations:
    m <- m + (1 - momentum) * (g - m);   u <- g + momentum * (m - g) (Nesterov), else m
    p <- p * (1 - lr * weight_decay) - lr * adjustment * newton_schulz(u)
Storage in 16, 24 and 8 bits is that of `ops.adam`, rounded stochastically with bits of the same
hash, so a resumed run draws the same, and so does one that updates the matrices in another order. It is read and
written `CHUNK` elements at a time, so that what rounding takes does not grow with the matrix.

Only Newton-Schulz needs the whole matrix. All else goes by elements, so of a sharded matrix each rank begins and ends
the update of its rows, and `optim.muon_shards` gets the direction from the rank that computes it.

Legend: R rows and K elements of each, in the order of memory of a contiguous tensor  B blocks of 128 of a row.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tilewright.formats import quadratic_map
from tilewright.formats.rounding import join24, round_bf16, split24
from tilewright.ops.backends.ref.adam import AdamHyper, hash_of
from tilewright.ops.kernels import Kernels

AdjustLr = Literal["match_rms_adamw", "original"]
Writes = list[tuple[Tensor, Tensor]]
"""Targets, and what is to be copied into them."""
CHUNK, GPU_CHUNK = 2**18, 2**24
"""Elements that are rounded at a time: whole blocks, or whole rows. On a GPU some twenty launches are a chunk, and
their temporary tensors 0.3 GB."""


@dataclass(frozen=True)
class MuonHyper:
    """Hyperparameters of one step. See `Muon`."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    num_steps: int
    adjust_lr: AdjustLr
    rounding: AdamHyper
    """Step and seed, from which the random bits of the rounding come."""


def lr_factor(shape: torch.Size, adjust_lr: AdjustLr) -> float:
    """The factor of a matrix's learning rate in a Muon update, all of whose singular values are about 1.

    match_rms_adamw: 0.2 sqrt(max(R, C)); the update's root mean square is then that of AdamW's updates, about 0.2
    (arXiv 2502.16982, section 2.2). original: sqrt(max(1, R / C)).

    Example:
        >>> lr_factor(torch.Size([400, 100]), "match_rms_adamw"), lr_factor(torch.Size([400, 100]), "original")
        (4.0, 2.0)
    """
    rows, columns = shape[-2:]
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / max(1, columns)))


@dataclass
class MatrixUpdate:
    """One update of a parameter and its states in place, in two parts: `begin` and `end`.

    Args:
        param: [R, C], or [E, R, C]; of a sharded one the rows that this rank has.
        state: `exp_avg`, and what else its storage has. See `optim.states`.
        number: of the parameter, for the random stream.
        hyper: of this step.
        shape: of the whole parameter.
        first: elements of it before this rank's first one.
        gap: elements of it between two rows of this rank's part; 0 where rows are whole.
    """

    param: Tensor
    state: Mapping[str, Tensor]
    number: int
    hyper: MuonHyper
    shape: torch.Size
    first: int = 0
    gap: int = 0
    _grad: Tensor | None = None
    _writes: Writes = field(default_factory=list)

    @property
    def _target(self) -> Tensor:
        return self.state.get("master", self.param)

    def begin(self, grad: Tensor) -> Tensor:
        """Begin a Muon update: input of Newton-Schulz, in BF16, from a gradient in any float dtype. No state
        changes."""
        grad = grad.to(torch.promote_types(self._target.dtype, torch.float32))
        momentum, self._writes = self._next_momentum(grad)
        self._grad = grad
        if self.hyper.nesterov:
            torch.lerp(grad, momentum, self.hyper.momentum, out=momentum)
        return momentum.to(torch.bfloat16)

    def end(self, direction: Tensor) -> None:
        """End a Muon update, by what Newton-Schulz made of it. Nothing changes before all memory is there."""
        hyper, state, target, grad = self.hyper, self.state, self._target, self._grad
        assert grad is not None, "begin comes first"
        direction = direction.to(grad.dtype, memory_format=torch.contiguous_format)
        decay, rate = 1 - hyper.lr * hyper.weight_decay, hyper.lr * lr_factor(self.shape, hyper.adjust_lr)
        if target.dtype == grad.dtype:  # from here on nothing takes memory
            target.mul_(decay).add_(direction, alpha=-rate)
        else:
            self._writes += self._rounded_weights(direction.mul_(-rate), decay)
        if state["exp_avg"].dtype == grad.dtype:
            state["exp_avg"].lerp_(grad, 1 - hyper.momentum)
        for stored, new in self._writes:
            stored.copy_(new)
        if "master" in state:
            self.param.copy_(state["master"])

    def _next_momentum(self, grad: Tensor) -> tuple[Tensor, Writes]:
        """The next momentum of a Muon update after this gradient: not rounded, and the value to store if it is in 16 or
        8 bits."""
        exp_avg, rate = self.state["exp_avg"], 1 - self.hyper.momentum
        if exp_avg.dtype == grad.dtype:
            return exp_avg.lerp(grad, rate), []
        scale_RB = self.state.get("exp_avg_scale")
        shape_RK = self._rows(exp_avg, scale_RB)
        old_RK, grad_RK = exp_avg.reshape(shape_RK), grad.reshape(shape_RK)
        new_RK, stored_RK = torch.empty_like(grad_RK), torch.empty_like(old_RK)
        writes = [(exp_avg, stored_RK.view(exp_avg.shape))]
        if scale_RB is None:
            for part, bits in self._chunks(shape_RK, stream=1):
                torch.lerp(old_RK[part].to(grad.dtype), grad_RK[part], rate, out=new_RK[part])
                stored_RK[part] = round_bf16(new_RK[part].float(), bits & 0xFFFF)
            return new_RK.view(grad.shape), writes
        old_scale_RB = scale_RB.view(shape_RK[0], quadratic_map.num_blocks(shape_RK[1]))
        new_scale_RB = torch.empty_like(old_scale_RB)
        for part, bits in self._chunks(shape_RK):
            rows, columns = part
            blocks = rows, slice(columns.start // quadratic_map.BLOCK, quadratic_map.num_blocks(columns.stop))
            old = quadratic_map.decode(old_RK[part], old_scale_RB[blocks])
            torch.lerp(old, grad_RK[part], rate, out=new_RK[part])
            noise = bits >> 16 & 0xFF
            stored_RK[part], new_scale_RB[blocks] = quadratic_map.encode(new_RK[part], noise, signed=True)
        return new_RK.view(grad.shape), [*writes, (scale_RB, new_scale_RB.view(scale_RB.shape))]

    def _rounded_weights(self, change: Tensor, decay: float) -> Writes:
        """Round the weights of a Muon update: stored ones, BF16 alone or with 8 bits more, times `decay` plus
        `change`."""
        target, low = self._target, self.state.get("low")
        shape_RK = self._rows(target, None)
        target_RK, change_RK = target.reshape(shape_RK), change.reshape(shape_RK)
        weight_RK = torch.empty_like(target_RK)
        writes = [(target, weight_RK.view(target.shape))]
        if low is None:
            for part, bits in self._chunks(shape_RK):
                value = target_RK[part].to(torch.float32).mul_(decay).add_(change_RK[part])
                weight_RK[part] = round_bf16(value, bits & 0xFFFF)
            return writes
        low_RK = low.reshape(shape_RK)
        new_low_RK = torch.empty_like(low_RK)
        for part, bits in self._chunks(shape_RK):
            value = join24(target_RK[part], low_RK[part]).mul_(decay).add_(change_RK[part])
            weight_RK[part], new_low_RK[part] = split24(value, bits & 0xFF)
        return [*writes, (low, new_low_RK.view(target.shape))]

    def _chunks(self, shape_RK: tuple[int, int], stream: int = 0) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Cut a Muon update into parts of rows, each with 32 random bits for each of its elements."""
        seed = self.hyper.rounding.stream(self.number, stream, self.first)
        (num_rows, length), device = shape_RK, self.param.device
        chunk = GPU_CHUNK if device.type == "cuda" else CHUNK
        together = max(1, chunk // max(1, length))
        for row in range(0, num_rows, together):
            rows = slice(row, min(row + together, num_rows))
            before_R = torch.arange(rows.start, rows.stop, device=device) * (length + self.gap)
            for column in range(0, length, chunk):
                columns = slice(column, min(column + chunk, length))
                element_RK = before_R[:, None] + torch.arange(columns.start, columns.stop, device=device)
                yield (rows, columns), hash_of(element_RK.to(torch.int32), seed)

    def _rows(self, tensor: Tensor, scale_RB: Tensor | None) -> tuple[int, int]:
        """Rows of a Muon update's tensor as its blocks have them, and elements of each; one row where blocks fill rows,
        or there are none, and rows are whole."""
        if self.gap:
            return len(tensor), tensor.shape[1]
        length = tensor.numel() // max(1, 1 if scale_RB is None else len(scale_RB))
        if scale_RB is None or length % quadratic_map.BLOCK == 0:
            return 1, tensor.numel()
        return len(scale_RB), length


def update_matrix(update: MatrixUpdate, grad: Tensor, kernels: Kernels) -> None:
    """A Muon update of a matrix on one rank. `newton_schulz` has its argument to itself."""
    narrow, newton_schulz = [update.begin(grad)], kernels.newton_schulz(grad.device.type)
    update.end(newton_schulz(narrow.pop(), update.hyper.num_steps))
