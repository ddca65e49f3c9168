"""Seconds of what a step computes and moves, over what this machine was measured to reach.

Parts are added up, not overlapped: one operation runs after the other. The first step (which compiles), the data,
evaluations and checkpoints are not in it. Of the precision modes that a run passes through, the last one counts.
"""

from collections.abc import Mapping

import torch

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.models.decoder.activation_bytes import FP32
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.gemms import BYTES

FORWARD_SHARE = 0.39
"""Of the bytes that element-wise work moves, forward and backward, what the forward pass moves; as counted of eager
layers (tests/planner/test_live_bytes.py)."""
_COMPILED_PASSES, _EAGER_PASSES = 5, 11
"""Passes over what backward keeps. Compiled: it is written and read, its gradient too, one more for the rest. Eager:
as counted of a decoder's layer."""

_PIECES_BESIDE_EXPERTS = 4
"""Compiled pieces of a layer with experts in addition to those (counted)."""
_CALLS_A_PIECE = 9
"""To enter a compiled piece, forward and backward, takes as long as so many eager linear layers on next to nothing
(profiled: 0.7 ms and 0.08)."""

FRESH_PASSES = 4.5
"""Passes that writing into new memory costs a CPU too: the system clears each page (measured: a Mamba and seven
attention models, user and system time of their steps, `elementwise` from `ceilings`)."""
CALL_SHARE = 0.1
"""Of the seconds that calling a linear layer on almost nothing takes, forward and backward, those of one operation."""

CAST_BYTES = 6
"""A weight is read in FP32 and written in 16 bit, in each micro-batch."""
GRADIENT_BYTES = 12
"""A gradient is read, added to and written in FP32."""
CLIP_BYTES = 12
"""A gradient is read for its norm, and read and written to be clipped."""

FORMAT_OF = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Formats by dtype; FP32 for all others."""

BOUND_BY = {
    "matmuls": "compute",
    "recompute": "compute",
    "attention": "compute",
    "head": "compute",
    "teacher": "compute",
    "loss": "bandwidth",
    "elementwise": "bandwidth",
    "weights": "bandwidth",
    "quantize": "bandwidth",
    "optimizer": "bandwidth",
    "calls": "overhead",
    "link": "transfers",
    "communication": "transfers",
}
"""Which ceiling limits each part."""


def backward_passes(recipe: Recipe) -> int:
    """Count the backward passes of a layer-major step: two if clipping by the exact norm comes before the first
    update."""
    return 2 if recipe.optim.clip == "two_pass" and recipe.optim.clip_norm > 0 else 1


def expert_rows(machine: Machine) -> float:
    """The rows that an expert multiplies over the rows that it was given. A CPU fills them up to a multiple of a
    quarter of the mean (`models.decoder.moe`), by half of that on average."""
    return 1.125 if machine.device == "cpu" else 1.0


def calls_s(num_experts: int, rates: Ceilings) -> float:
    """The seconds to enter the compiled pieces of a layer, forward and backward: one, or its experts and the code
    between them."""
    pieces = num_experts + _PIECES_BESIDE_EXPERTS if num_experts else 1
    return pieces * _CALLS_A_PIECE * rates.call_s()


def element_passes(fused: bool) -> float:
    """The roofline's passes of element-wise work, forward and backward, over the bytes that a layer of our decoder
    keeps for backward.

    Args:
        fused: it is compiled into loops.
    """
    return _COMPILED_PASSES if fused else _EAGER_PASSES


def walked(machine: Machine, moved: float, fresh: float) -> float:
    """The bytes that loops move, in which bytes written into new memory count more on a CPU."""
    return moved + (FRESH_PASSES * fresh if machine.device == "cpu" else 0.0)


def remade_share(fused: bool, operand_bytes: float) -> float:
    """The part by which backward takes longer, as a share of the time of forward's loops, if matmuls are kept and the
    rest is recomputed.

    Compiled FP32 loops wait for memory, and making a result again costs no more than loading one that was kept: 0.1 to
    0.2 % of a layer at three widths on a CPU with AMX, where BF16 took what forward takes (rounding between operations
    is arithmetic; docs/log.md, 2026-11-22).
    """
    return 0.05 if fused and operand_bytes == FP32 else 1.0


def head_s(tokens: float, dim: int, vocab_size: int, fmt: str, rates: Ceilings) -> float:
    """Roofline seconds of the matmuls of the head, forward and backward."""
    return 6 * tokens * dim * vocab_size / rates.matmul_rate(fmt, (dim * vocab_size) ** 0.5)


def loss_s(logits: float, compiled: bool, fmt: str, rates: Ceilings) -> float:
    """The roofline's seconds of the loss over so many logits: eager as measured; compiled two exponentials and four
    passes over each."""
    if not compiled:
        return logits / rates.loss[fmt]
    return logits * (2 / rates.exp + 4 * BYTES[fmt] / rates.bandwidth)


def binding(parts: Mapping[str, float]) -> tuple[str, str]:
    """The ceiling of the roofline that most of the step's time waits for, and the largest part under it."""
    by_ceiling: dict[str, float] = {}
    for name, seconds in parts.items():
        by_ceiling[BOUND_BY[name]] = by_ceiling.get(BOUND_BY[name], 0.0) + seconds
    ceiling = max(by_ceiling, key=lambda name: by_ceiling[name])
    return ceiling, max((name for name in parts if BOUND_BY[name] == ceiling), key=lambda name: parts[name])
