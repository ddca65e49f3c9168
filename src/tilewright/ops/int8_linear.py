"""int8_linear: out = x @ (qdata_NK * scale_N).T + bias_N, x in INT8 with a scale per token. No autograd.

int8_linear(x [..., K], weight: Int8Weight, bias_N) -> [..., N] in x's dtype; everything between is FP32.
Codes and scales of x are those of `formats.integer`, symmetric, per row; a token with a value that is not finite
becomes NaN, the others are as they are. Leading dims are flattened, so one token (1, 1, K) is a matrix like any other.

A candidate multiplies integers only: (codes_MK int8, qdata_NK int8, packed, made_from) -> [M, N] FP32, the sum of the
integer products, exact in INT32 and rounded once: all candidates give the same bits. `Int8Weight.of` prepares `packed`,
and `made_from` is the fingerprint of the codes that it was made from: a candidate that reads `packed` compares.

Legend: M tokens  N out features  K in features.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.formats.integer import INT8, SMALLEST_SCALE, IntegerTensor
from tilewright.formats.scaling import Tile
from tilewright.ops.backends.ref import int8 as ref
from tilewright.ops.base.dispatch import Candidate, Case, Choice, Op, always, choose
from tilewright.ops.base.fingerprint import fingerprint

CHANNEL = Tile(1, 0)
"""A scale per out feature."""


def _onednn(codes_MK: Tensor, qdata_NK: Tensor, packed: Tensor, made_from: Tensor | None) -> Tensor:
    from tilewright.ops.backends.native import int8  # it registers torch operators

    return int8.onednn(codes_MK, qdata_NK, packed, made_from)


def _int_mm(codes_MK: Tensor, qdata_NK: Tensor, packed: Tensor, made_from: Tensor | None) -> Tensor:
    from tilewright.ops.backends.native import int8  # it registers torch operators

    return int8.int_mm(codes_MK, qdata_NK, packed, made_from)


def _why_not_onednn(machine: Machine, case: Case) -> str | None:
    from tilewright.ops.backends.native import int8  # it registers torch operators

    return int8.why_not_onednn(machine, case)


def _why_not_int_mm(machine: Machine, case: Case) -> str | None:
    from tilewright.ops.backends.native import int8  # it registers torch operators

    return int8.why_not_int_mm(machine, case)


INT8_LINEAR = Op(
    "int8_linear",
    (
        Candidate("onednn", _onednn, _why_not_onednn),
        Candidate("int_mm", _int_mm, _why_not_int_mm),
        Candidate("ref", ref.int8_matmul, always),
    ),
)


@dataclass(frozen=True)
class Int8Weight:
    """A weight prepared for one candidate.

    Args:
        qdata_NK: int8 codes, -127..127.
        scale_N: FP32, one per out feature.
        packed: what the candidate reads instead of the codes; no elements where it reads those.
        made_from: int64 [1], fingerprint of the codes that `packed` was made from; None: it is known to be of these.
        run: the candidate.
        chosen: which one, with the reasons against the others.
    """

    qdata_NK: Tensor
    scale_N: Tensor
    packed: Tensor
    made_from: Tensor | None
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    chosen: Choice

    def is_packed_of(self, qdata_NK: Tensor) -> bool:
        """True if an INT8 weight's `packed` was made from codes of these values, or nothing was."""
        return self.made_from is None or int(self.made_from) == fingerprint(qdata_NK.contiguous())

    @classmethod
    def of(cls, weight: IntegerTensor, machine: Machine, candidate: str = "auto") -> "Int8Weight":
        """Prepare the weight of an INT8 linear layer, symmetric, with a scale per row.

        Raises:
            ValueError: a weight in another format.
            HardwareError, ConfigError: the candidate cannot run here, or is none.
        """
        if weight.tile != CHANNEL or weight.zero_point is not None or weight.spec != INT8:
            raise ValueError(f"int8_linear takes symmetric INT8 per row, not {weight.spec.name} in {weight.tile}")
        case = Case(weight.codes.device.type, torch.float32)
        chosen = choose(INT8_LINEAR, machine, case, candidate)
        packed, made_from = ref.prepack(weight.codes), None
        if chosen.candidate.name == "onednn":
            from tilewright.ops.backends.native import int8  # it registers torch operators

            packed = int8.onednn_prepack(weight.codes)
            made_from = torch.tensor([fingerprint(weight.codes.contiguous())])
        return cls(weight.codes, weight.scale[:, 0], packed, made_from, chosen.candidate.run, chosen)


def int8_linear(x: Tensor, weight: Int8Weight, bias_N: Tensor | None = None) -> Tensor:
    """Run a linear layer with operands in 8-bit integers; see the module.

    Example:
        >>> from tilewright.core.hardware import detect_machine
        >>> from tilewright.formats.integer import quantize_integer
        >>> weight = quantize_integer(torch.tensor([[127.0, 0.0], [2.0, 1.0]]), INT8, CHANNEL)
        >>> weight = Int8Weight.of(weight, detect_machine("cpu"))
        >>> int8_linear(torch.tensor([[[1.0, 0.0]]]), weight).shape
        torch.Size([1, 1, 2])
    """
    x_MK = x.reshape(-1, x.shape[-1])
    num_out = weight.qdata_NK.shape[0]
    if x_MK.numel() == 0:
        out_MN = x_MK.new_zeros((x_MK.shape[0], num_out), dtype=torch.float32)
    else:
        codes_MK, scale_M1 = quantize_tokens(x_MK)
        out_MN = weight.run(codes_MK, weight.qdata_NK, weight.packed, weight.made_from) * scale_M1 * weight.scale_N
    if bias_N is not None:
        out_MN = out_MN + bias_N.to(torch.float32)
    return out_MN.to(x.dtype).reshape(*x.shape[:-1], num_out)


def quantize_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise tokens for an INT8 linear layer: codes int8 [M, K] and scales FP32 [M, 1], those of `formats.integer` in
    fewer passes. Codes of a row that is not finite mean nothing; its scale is NaN."""
    x_MK = x_MK.to(torch.float32)
    amax_M1 = x_MK.abs().amax(dim=1, keepdim=True)
    scale_M1 = (amax_M1 / torch.full_like(amax_M1, INT8.highest)).clamp(min=SMALLEST_SCALE)
    codes_MK = (x_MK / scale_M1).round_().clamp_(INT8.lowest, INT8.highest).to(torch.int8)
    return codes_MK, torch.where(amax_M1 < torch.inf, scale_M1, torch.nan)
