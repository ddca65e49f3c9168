"""low_bit_adam: one AdamW step of one tensor, in place, with both moments in 8 bits.

The formulas of `ops.adam`, in FP32, with decoupled decay. Between steps the first moment m and the root of the second
moment v are in square codes (`formats.quadratic_map`), 2.06 bytes per parameter. The root, because that is what the
update divides by: v alone would lose its small values. The target is one of

    FP32       a parameter, or the master of one
    BF16       rounded stochastically
    24 bits    BF16 and 8 bits of correction (`formats.rounding`)

All roundings are stochastic, with bits of one hash of (seed, step, the tensor's number, element): 0-15 for the target,
16-23 for m, 24-31 for v. Elements of a shard count from `first`. `ops.backends.ref.low_bit_adam` is the definition:
targets, codes and scales of every candidate are equal to its, bit for bit. The case's dtype is the target's.
"""

from tilewright.ops.backends.cpu.build import LOW_BIT_ADAM as LIBRARY
from tilewright.ops.backends.ref import low_bit_adam as ref
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Op, always


def _triton(tensors: ref.LowBitTensors, hyper: AdamHyper) -> None:
    from tilewright.ops.backends.triton import low_bit_adam  # it imports triton

    low_bit_adam.low_bit_adam(tensors, hyper)


def _cpu(tensors: ref.LowBitTensors, hyper: AdamHyper) -> None:
    from tilewright.ops.backends.cpu import low_bit_adam

    low_bit_adam.low_bit_adam(tensors, hyper)


LOW_BIT_ADAM = Op(
    "low_bit_adam",
    (
        Candidate("triton", _triton, needs_triton),
        Candidate("cpu", _cpu, LIBRARY.why_not),
        Candidate("ref", ref.low_bit_adam, always),
    ),
)
