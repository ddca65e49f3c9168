"""Parts of an exported graph: norm, rotary turn, causal mask, linear layers of one input joined into one.

Plain torch without kernels, so that each exporter knows every operation.

Legend: S new positions  T all positions so far  D model width  H heads  R rotary width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class GraphNorm(nn.Module):
    """RMSNorm of `models.decoder.layers`."""

    def __init__(self, weight_D: Tensor, eps: float):
        super().__init__()
        self.weight = nn.Parameter(weight_D.detach(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in a graph: x [..., D] -> the same shape and dtype."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Cosine and sine of the rotary angles of S positions from `start` on.

    Args:
        rope_dim: R, even.
        theta: base of the frequencies.
    """

    frequencies: Tensor

    def __init__(self, rope_dim: int, theta: float):
        super().__init__()
        exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
        self.register_buffer("frequencies", 1.0 / theta**exponent, persistent=False)

    def forward(self, position_S: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rotary factors in a graph: positions [S] integers -> cos and sin, each [S, R/2] FP32."""
        angles = position_S[:, None].float() * self.frequencies
        return angles.cos(), angles.sin()


def turn(x_1HSR: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate the two halves of x by the rotary factors in a graph, as `ops.backends.ref.math.rope`."""
    first, second = x_1HSR.chunk(2, dim=-1)
    return torch.cat((first * cos_SR - second * sin_SR, second * cos_SR + first * sin_SR), dim=-1)


def causal_bias(query_S: Tensor, key_T: Tensor, window: int = 0) -> Tensor:
    """Causal mask of a graph's layers, [S, T] FP32: 0 where a query's position may look at a key's, minus infinity
    elsewhere. `window`: positions that each one sees at most, itself included; 0: all before it."""
    zero, never = torch.zeros(()), torch.full((), float("-inf"))
    seen_ST = key_T[None, :] <= query_S[:, None]
    if window:
        seen_ST = seen_ST & (key_T[None, :] > query_S[:, None] - window)
    return torch.where(seen_ST, zero, never)


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Join layers of a graph that read the same input into one; their outputs follow each other.

    An input is then read, and quantised, once. Each output channel keeps its own weights, so scales per channel or
    per group are what they were.
    """
    weights = [linear.weight.detach().float() for linear in linears]
    joined = nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=linears[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias.detach().float() for linear in linears]), requires_grad=False)
    return joined
