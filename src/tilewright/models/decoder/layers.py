"""The small parts of the decoder: RMSNorm, rotary angles, SwiGLU MLP.

Modules hold parameters and call `kernels`; they hold no formats. `precision.convert` swaps them by name.
Parameter names are those of Hugging Face's Llama.

Legend: B rows  S positions  D model width  F hidden width  R rotary width.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from tilewright.formats.tiled import WithCopies
from tilewright.ops.kernels import Kernels


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim; statistics in FP32, returns x's dtype.

    See: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, dim: int, eps: float, kernels: Kernels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.kernels = kernels
        self.quantizing: Callable[[Tensor, Tensor, float], WithCopies] | None = None
        """A norm that adds 8-bit copies for the layers that read it. Set by `precision.convert`."""

    def forward(self, x: Tensor) -> Tensor | WithCopies:
        """Normalise x by RMSNorm: x [..., D] any float dtype -> the same."""
        if self.quantizing is not None:
            return self.quantizing(x, self.weight, self.eps)
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class MLP(nn.Module):
    """The decoder's MLP with SwiGLU: down(silu(gate(x)) * up(x)).

    See: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(self, dim: int, hidden_dim: int, kernels: Kernels):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)
        self.kernels = kernels
        self.quantizing: Callable[[Tensor, Tensor], WithCopies] | None = None
        """SwiGLU that adds 8-bit copies for the last layer. Set by `precision.convert`."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the decoder's SwiGLU MLP: x [..., D] -> [..., D]."""
        swiglu = self.quantizing or self.kernels.swiglu
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))

    def readers(self) -> list[nn.Linear]:
        """The layers of the decoder that read the input of an MLP."""
        return [self.gate_proj, self.up_proj]

    def quantized_readers(self) -> Iterator[tuple[nn.Module, str, list[nn.Linear]]]:
        """The linear layers that read the result of SwiGLU: see `Block.quantized_readers`."""
        yield self, "swiglu", [self.down_proj]


def rope_angles(positions: Tensor, rope_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Compute the cosine and sine of the rotary angle of each position and pair.

    Pair i of R/2 turns by position * theta^(-2i/R). The frequencies are computed here, not kept in a buffer, so a
    model on the meta device has nothing to restore.

    Args:
        positions: [B or 1, S] integers.
        rope_dim: R, even.
        theta: base of the frequencies.

    Returns:
        (cos, sin), each [B or 1, S, R/2] FP32.

    See: Su et al., "RoFormer", 2021, section 3.2.
    """
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=positions.device) / rope_dim
    angles = positions[..., None].float() * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


class StreamSlices(Protocol):
    """Who gives ranks slices of the residual stream (`parallel.inside.tensor.sequence_slices`): each has some positions
    of rows. All ranks call each of these together. B rows, S positions, s of a slice, D model width."""

    def positions(self, length: int) -> int:
        """The number s of positions in one slice of the decoder's stream of `length` positions."""
        ...

    def enter(self, x_BSD: Tensor) -> Tensor:
        """This rank's slice [B, s, D] of the decoder's stream that all have."""
        ...

    def leave(self, x_BsD: Tensor, length: int) -> Tensor:
        """The decoder's stream [B, S, D] of all ranks from slices; `length` is S."""
        ...

    def documents_of(self, segments_BS: Tensor | None, rows: int, device: torch.device) -> Tensor | None:
        """The document numbers of a slice of the decoder's stream, below 0 where there is no token; None if there is a
        token everywhere."""
        ...

    def token_numbers(self, rows: int, device: torch.device) -> Tensor:
        """The numbers [B * s] of a slice's tokens among the B * S of the decoder's stream."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks that have slices of the decoder's stream, without a gradient."""
        ...
