"""newton_schulz: U V^T, nearly, where x = U diag(s) V^T: singular values are moved towards 1.

newton_schulz(x, num_steps): x [R, C], or a stack [E, R, C] of matrices that are each treated by themselves, any float
dtype and layout; rounded to BF16 first. Returns BF16 of the same shape. Zeros stay zeros. No autograd.

The quintic polynomial and its coefficients are those of `torch.optim.Muon`; their source: K. Jordan, "Muon",
kellerjordan.github.io/posts/muon. Five iterations bring singular values to about 0.7 to 1.2, not to 1: an update needs
no more. `native` multiplies in BF16, and a single matrix has the bits of `torch.optim.Muon`. `wide` does all in FP32
and rounds the result once: rounding what is between the products to BF16, as `native` does, would take more memory (the
FP32 operands of a product beside what is kept in BF16) and time, and be less exact. The case's dtype is BF16.
"""

import torch

from tilewright.core.hardware import Machine
from tilewright.ops.backends.native import newton_schulz as native
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.dispatch import Candidate, Case, Op, always, choose


def _why_not_wide(machine: Machine, case: Case) -> str | None:
    if case.device_type != "cpu":
        return "it is for CPUs"
    return "the CPU multiplies BF16 itself" if machine.cpu_multiplies(torch.bfloat16) else None


NEWTON_SCHULZ = Op(
    "newton_schulz",
    (
        Candidate("wide", native.wide, _why_not_wide),
        Candidate("native", native.native, always),
        Candidate("ref", ref.newton_schulz, always),
    ),
)


def operand_format(machine: Machine, forced: str = "auto") -> str:
    """Newton-Schulz's format of the products on a machine's device, for plans: bf16 or fp32.

    Args:
        machine: where.
        forced: of `[ops] newton_schulz`.
    """
    chosen = choose(NEWTON_SCHULZ, machine, Case(machine.device, torch.bfloat16), forced)
    return "bf16" if chosen.candidate.name == "native" else "fp32"
