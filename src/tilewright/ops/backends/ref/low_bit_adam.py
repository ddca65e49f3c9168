"""The reference for AdamW with moments in 8 bits, one tensor at a time. See `ops.adam`.

Legend: N elements  R rows  K elements of a row  B blocks of 128 of a row.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.formats import quadratic_map
from tilewright.formats.rounding import join24, round_bf16, split24
from tilewright.ops.backends.ref.adam import AdamHyper, elements, hash_of
from tilewright.ops.backends.ref.follow_writes import followed


@dataclass(frozen=True)
class LowBitTensors:
    """The tensors that one call reads and writes: contiguous tensors of one shape, read as the rows that the scales
    have.

    Args:
        target: what is updated: an FP32 parameter or master, or a BF16 parameter.
        low: int8, the last 8 of 24 bits of a BF16 target; None where it has 16, or 32.
        grad: FP32 or BF16.
        exp_avg: int8 codes of the first moment.
        exp_avg_scale: FP32 [R, B], contiguous.
        exp_avg_sq: uint8 codes of the root of the second moment.
        exp_avg_sq_scale: FP32 [R, B].
        number: of the tensor, for the random stream.
        first: elements of the whole tensor before these, which are a shard of it.
        skip: elements of the whole tensor between two rows of these: of a part by columns, of whole blocks each.
        weight: BF16 or FP16, where the target is its master: what was written there since becomes the master (see
            `follow_writes`), and it gets the new one, rounded to nearest.
    """

    target: Tensor
    low: Tensor | None
    grad: Tensor
    exp_avg: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor
    number: int
    first: int = 0
    skip: int = 0
    weight: Tensor | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """The number of rows for low-bit AdamW, and the elements of each. Whole blocks follow each other as in one
        row."""
        num_rows, numel = len(self.exp_avg_scale), self.target.numel()
        length = numel // max(1, num_rows)
        return (1, numel) if length % quadratic_map.BLOCK == 0 and not self.skip else (num_rows, length)

    def stream(self, hyper: AdamHyper) -> int:
        """Random stream's number for low-bit AdamW."""
        return hyper.stream(self.number, first=self.first)


@functools.lru_cache(maxsize=16)  # all tensors of a group and step have the same
def factors(hyper: AdamHyper) -> tuple[float, ...]:
    """The numbers of low-bit AdamW's formulas, each FP32: decay, 1 - beta1, beta2, 1 - beta2, step size, one over the
    root of the second bias correction, eps."""
    decay, rate1, beta2, size, root_correction2, eps = hyper.coefficients().tolist()
    return tuple(torch.tensor([decay, rate1, beta2, 1 - hyper.beta2, size, 1 / root_correction2, eps]).tolist())


@torch.no_grad()
def low_bit_adam(tensors: LowBitTensors, hyper: AdamHyper) -> None:
    """Low-bit AdamW by the reference, with moments in 8 bits: see `ops.adam`. Nothing changes before all memory is
    there."""
    decay, rate1, beta2, rate2, size, inv_root, eps = factors(hyper)
    rows_RK = tensors.rows
    blocks_RB = rows_RK[0], quadratic_map.num_blocks(rows_RK[1])
    grad_N = tensors.grad.view(-1).to(torch.float32)
    exp_avg_N, exp_avg_sq_N = tensors.exp_avg.view(-1), tensors.exp_avg_sq.view(-1)
    m_N = quadratic_map.decode(exp_avg_N.view(rows_RK), tensors.exp_avg_scale.view(blocks_RB)).reshape(-1)
    root_N = quadratic_map.decode(exp_avg_sq_N.view(rows_RK), tensors.exp_avg_sq_scale.view(blocks_RB)).reshape(-1)
    m_N = m_N + rate1 * (grad_N - m_N)
    root_N = quadratic_map.root(beta2 * (root_N * root_N) + rate2 * grad_N * grad_N)
    p_N = decay * _value(tensors) - size * m_N / (root_N * inv_root + eps)
    bits_N = hash_of(elements(grad_N.numel(), rows_RK[1], tensors.skip, grad_N.device), tensors.stream(hyper))
    writes = _targets(tensors, p_N, bits_N)
    for qdata_N, scale_RB, value_N, noise_N in (
        (exp_avg_N, tensors.exp_avg_scale, m_N, bits_N >> 16 & 0xFF),
        (exp_avg_sq_N, tensors.exp_avg_sq_scale, root_N, bits_N >> 24 & 0xFF),
    ):
        signed = qdata_N.dtype == torch.int8
        qdata, scale = quadratic_map.encode(value_N.view(rows_RK), noise_N.view(rows_RK), signed=signed)
        writes += [(qdata_N.view(rows_RK), qdata), (scale_RB.view(blocks_RB), scale)]
    for target, value in writes:
        target.copy_(value)


def _value(tensors: LowBitTensors) -> Tensor:
    target_N = tensors.target.view(-1)
    if tensors.weight is not None:
        return followed(target_N, tensors.weight.view(-1))
    return target_N.to(torch.float32) if tensors.low is None else join24(target_N, tensors.low.view(-1))


def _targets(tensors: LowBitTensors, p_N: Tensor, bits_N: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The values that low-bit AdamW writes into the parameter, and the tensor that takes them."""
    target_N = tensors.target.view(-1)
    if tensors.low is not None:
        weight, low = split24(p_N, bits_N & 0xFF)
        return [(target_N, weight), (tensors.low.view(-1), low)]
    if target_N.dtype == torch.bfloat16:
        return [(target_N, round_bf16(p_N, bits_N & 0xFFFF))]
    if tensors.weight is not None:
        return [(target_N, p_N), (tensors.weight.view(-1), p_N.to(tensors.weight.dtype))]
    return [(target_N, p_N)]
