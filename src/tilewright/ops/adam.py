"""adam and low_bit_adam: one AdamW step, in place. follow_writes: FP32 masters that take over what others wrote.

adam: over lists of tensors, with parameters and states of FP32 or BF16. For each tensor, in FP32 (decoupled decay,
Loshchilov and Hutter 2019; as torch.optim.AdamW orders it):
    p <- p * (1 - lr * weight_decay)
    m <- m + (1 - beta1) * (g - m);   v <- beta2 * v + (1 - beta2) * g^2
    p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
BF16 targets (states or parameters) are written with stochastic rounding: the expectation of what is
stored is the FP32 value, so updates below half a BF16 step are not lost. The random bits are a hash of
(seed, step, the tensor's number, element), so a resumed run draws the same, and so does one that updates the
tensors in another order. Of a shard, `firsts` says how many elements of its tensor come before it, and `skips` how
many are between two rows of it (of a part by columns), and each element gets the bits that it gets in the whole tensor.
The case's dtype is the narrowest of those stored. With `weights`, 16-bit ones of which the targets are the masters,
each master follows its weight before (see below) and is stored as it after.

low_bit_adam: of one tensor, with both moments in 8 bits. The same formulas. Between steps the first moment m and the
root of the second moment v are in square codes (`formats.quadratic_map`), 2.06 bytes per parameter. The root, because
that is what the update divides by: v alone would lose its small values. The target is one of

    FP32       a parameter, or the master of one (`weight`, with which the same is done as in adam)
    BF16       rounded stochastically
    24 bits    BF16 and 8 bits of correction (`formats.rounding`)

All roundings are stochastic, with bits of one hash of (seed, step, the tensor's number, element): 0-15 for the target,
16-23 for m, 24-31 for v. Elements of a shard count from `first`, with `skip` between two rows of a part by columns.
`ops.backends.ref.low_bit_adam` is the definition: targets, codes and scales of every candidate are equal to its, bit
for bit. The case's dtype is the target's.

follow_writes: FP32 masters take over what was written to their 16-bit weights. An optimizer updates a master and stores
it as the weight, rounded to nearest. So a weight has the bits of its master rounded, or something else has written it
since: a clamp, a loaded checkpoint, a broadcast. Each element whose bits differ becomes its master; the others keep the
bits that they have beyond the weight. It goes by content, since writes through `.data`, or past torch, leave no other
trace. The case's dtype is the weight's.

    follow_writes(master, weight): both of one shape; writes to `master` alone.
"""

from typing import Any

import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.ops.backends.cpu.build import LOW_BIT_ADAM as LIBRARY
from tilewright.ops.backends.native import adam as native
from tilewright.ops.backends.ref import adam as ref
from tilewright.ops.backends.ref import low_bit_adam as low_bit
from tilewright.ops.backends.ref.follow_writes import follow_writes
from tilewright.ops.backends.triton.availability import needs_triton
from tilewright.ops.base.dispatch import Candidate, Case, Op, always, needs_compiler


def _needs_wide(machine: Machine, case: Case) -> str | None:
    if case.dtype in (torch.bfloat16, torch.float16):
        return "torch's fused AdamW rounds 16-bit storage to nearest, which loses small updates"
    return None


def _triton(tensors: low_bit.LowBitTensors, hyper: ref.AdamHyper) -> None:
    from tilewright.ops.backends.triton import low_bit_adam  # it imports triton

    low_bit_adam.low_bit_adam(tensors, hyper)


def _cpu(tensors: low_bit.LowBitTensors, hyper: ref.AdamHyper) -> None:
    from tilewright.ops.backends.cpu import low_bit_adam

    low_bit_adam.low_bit_adam(tensors, hyper)


def _cpu_adam(*args: Any) -> None:
    from tilewright.ops.backends.cpu import low_bit_adam

    low_bit_adam.adam(*args)


def _why_not_cpu(machine: Machine, case: Case) -> str | None:
    if case.dtype not in (torch.float32, torch.bfloat16):
        return "it updates in FP32, what is stored in FP32 or BF16"
    return LIBRARY.why_not(machine, case)


_NATIVE = Candidate("native", native.fused, _needs_wide)
_COMPILED = Candidate("compiled", native.compiled, needs_compiler)
_CPU = Candidate("cpu", _cpu_adam, _why_not_cpu)
_REF = Candidate("ref", ref.adam, always)
ADAM = Op("adam", (_NATIVE, _COMPILED, _CPU, _REF))
MASTER_ADAM = Op("master_adam", (_CPU, _NATIVE, _COMPILED, _REF), setting="adam")
"""adam with `weights`: the C++ goes through memory once."""
LOW_BIT_ADAM = Op(
    "low_bit_adam",
    (
        Candidate("triton", _triton, needs_triton),
        Candidate("cpu", _cpu, LIBRARY.why_not),
        Candidate("ref", low_bit.low_bit_adam, always),
    ),
)


def _triton_follow_writes(master: Tensor, weight: Tensor) -> None:
    from tilewright.ops.backends.triton import follow_writes as triton  # it imports triton

    triton.follow_writes(master, weight)


FOLLOW_WRITES = Op(
    "follow_writes",
    (Candidate("triton", _triton_follow_writes, needs_triton), Candidate("ref", follow_writes, always)),
)
