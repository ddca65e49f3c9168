"""Bytes read and written to make 8-bit operands of matmuls, and to decode them where no unit multiplies them.

A pass over a layer quantises its inputs, or their gradients, once for each group of layers that reads them. Without a
unit for 8 bits the codes of both operands are decoded before each matmul. The codes of weights are made once per step
on a CPU, which keeps them, and in each pass on a GPU (`precision.float8.gemm.weight_store`) and of sharded weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.core.hardware import Machine
from tilewright.models.decoder.activation_bytes import shared_input
from tilewright.planner.model.gemms import LinearGemm, fp8_unit

READ_BYTES = 2
"""An element of an input or gradient as quantisation reads it; each copy that it writes has one byte."""
DECODE_BYTES = 3
"""A code is read, a BF16 number written."""
WEIGHT_BYTES = 5
"""A weight is read in FP32, its codes are written."""


@dataclass(frozen=True)
class OperandBytes:
    """Bytes moved for 8-bit operands. `forward`: in a micro-batch's forward pass, and again where it is recomputed.
    `backward`: in its backward pass. `step`: once per step."""

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0

    @classmethod
    def of(cls, matmuls: Iterable[LinearGemm], tokens: float, machine: Machine, kept: bool) -> "OperandBytes":
        """Bytes of 8-bit operands of some linear layers for `tokens` tokens of a micro-batch, experts as evenly used.
        `kept`: codes of weights are, from step to step."""
        forward = backward = qdata = 0.0
        seen = set[tuple[str, int]]()
        for matmul in matmuls:
            gemms, rows = matmul.gemms, tokens * matmul.share
            has_unit = all(fp8_unit(machine, each) for each in gemms.formats if each.scaled)
            fprop, dgrad, wgrad = (each.scaled for each in gemms.formats)
            wgrad = wgrad and not matmul.frozen
            x, dy, weight = rows * matmul.num_in, rows * matmul.num_out, matmul.num_weights
            reader = shared_input(matmul.fqn)
            if (fprop or wgrad) and reader not in seen:
                seen.add(reader)
                forward += x * (READ_BYTES + fprop + wgrad)
            if dgrad or wgrad:
                backward += dy * (READ_BYTES + dgrad + wgrad)
            if not has_unit:
                forward += DECODE_BYTES * fprop * (x + weight)
                backward += DECODE_BYTES * (dgrad * (dy + weight) + wgrad * (dy + x))
            qdata += WEIGHT_BYTES * weight * gemms.any_scaled * (not matmul.coded)
            if dgrad and gemms.operands is not None and not gemms.operands.weight.is_square:
                backward += WEIGHT_BYTES * weight  # quantised along its other dimension, in each pass
        if kept:
            return cls(forward, backward, qdata)
        return cls(forward + qdata, backward + qdata)
