"""Bytes of a process that no tensor of the model accounts for, as measured.

process     interpreter, torch, libraries, and what the compiler leaves in the process. On CUDA it is not in the
            allocator's figures.
work        what operations need while they run: the chunks of the head's loss, a layer's gradients in backward.
kept pages  what glibc's malloc does not return after a free (CPU only). They are what backward's work leaves, so the
            same number stands for both; a layer that was recomputed leaves what it kept too.

benchmarks/plans/plan_measured.py holds the sums of `planner.cost.step_phases` against real runs.
"""

from dataclasses import dataclass

import torch

from tilewright.core.hardware import Machine
from tilewright.ops.backends.native.loss import chunk_rows
from tilewright.ops.backends.native.wide import WIDE_PIECE

MIB = 2**20
PROCESS_BYTES = 415 * MIB
"""Resident set with torch and this package imported and the data open, before the model (measured, CPU build)."""
COMPILER_BYTES = 105 * MIB
"""Added by torch.compile: its own modules, and the code it made (measured)."""
KIND_BYTES = 8 * MIB
"""Of those, graphs and code for one way of treating layers; each further way adds as much (measured: 5, 8 and 10)."""
GRAPH_BYTES = {
    "keep": 75 * 2**10,
    "selective": 58 * 2**10,
    "matmuls": 58 * 2**10,
    "attention": 56 * 2**10,
    "recompute": 54 * 2**10,
}
"""Of an eager layer of a decoder on a CPU, from forward to backward, by what it keeps: autograd's nodes, and Python's
objects of functions and checkpoints, which are no tensors (measured in runs, by what malloc has given out beyond the
tensors: 8 and 16 layers; docs/log.md, 2026-11-27)."""
TRANSFORMERS_BYTES = 65 * MIB
"""Added by transformers where the model is one of its own (measured)."""
TRITON_BYTES = 70 * MIB
"""Added by triton where it is installed: torch's compiler imports it (measured)."""
CUDA_RESERVE_BYTES = 700 * MIB
"""CUDA context and kernels, outside the allocator (not measured by this project yet)."""
LOSS_CHUNKS = {(True, 2): 1.0, (True, 4): 1.0, (False, 2): 5.0, (False, 4): 2.9}
"""Chunk-sized blocks alive at once in the head's loss, by (compiled, bytes of a logit): the logits, which become their
own gradient, and in eager form the FP32 softmax and its intermediates (measured)."""
WIDE_CHUNKS, WIDE_PIECES = 2.0, 3
"""More where a CPU multiplies 16-bit operands in FP32 (`ops.backends.native.wide`): the logits of a chunk in FP32, but
no more than pieces of logits, weight and product."""
EVALUATED_CHUNKS = {2: 5.0, 4: 2.0}
"""Chunk-sized blocks alive at once in the loss of an evaluation, which is not compiled and makes no gradient, by bytes
of a logit: the logits and their FP32 log-softmax, and of 16-bit logits an FP32 copy."""


@dataclass(frozen=True)
class Pages:
    """Memory of backward beside the kept tensors, and memory that it leaves, as shares.

    `work`: of what a layer keeps where all is kept: its gradients, in FP32 in part, and the allocator's gaps.
    `rebuilt`: of what a layer makes again that did not keep it, too. `gaps`: free pages between what all layers
    keep, as a share of it.
    """

    work: float
    rebuilt: float
    gaps: float

    @classmethod
    def of(cls, machine: Machine, operand_bytes: int, compiled: bool) -> "Pages":
        """The page shares of a machine, for operands of so many bytes, and for compiled layers or others.

        Measured with glibc on two kinds of CPU, 4 to 16 rows, 6 and 12 layers, a decoder and a Llama. One that
        multiplies 16-bit operands in FP32 frees the FP32 result beside the rounded one that is kept. Compiled FP32
        layers: 4 to 12 of them, three widths (docs/log.md, 2026-11-22).
        """
        if machine.device != "cpu":
            return cls(3.3, 1.0, 0.0)
        if _widened(machine, operand_bytes):
            return cls(3.3, 1.0, 0.0 if compiled else 0.47)
        if not compiled:
            return cls(2.0, 0.0, 0.4)
        return cls(2.5, 0.0, 0.1) if operand_bytes < 4 else cls(0.7, 1.0, 0.15)


def _widened(machine: Machine, operand_bytes: int) -> bool:
    """True if the process holds 16-bit operands in FP32 too, since they are multiplied so."""
    return machine.device == "cpu" and operand_bytes == 2 and not machine.cpu_multiplies(torch.bfloat16)


def free_pages(machine: Machine, operand_bytes: int) -> float:
    """Bytes of the process that glibc holds free at the peak of an eager step, as a share of what is alive then.

    Measured over a first and a second step. 0.3: 17 models on a CPU with AVX-512 BF16 (0.0 to 0.4). AMX, and CPUs that
    multiply 16-bit operands in FP32 and free the FP32 results beside the rounded ones: a Llama with all kept and with
    all recomputed (benchmarks/results/plan_measured_*.json).
    """
    if machine.device != "cpu":
        return 0.0
    if operand_bytes == 2 and not machine.cpu_multiplies(torch.bfloat16):
        return 1.3
    return 0.65 if "amx_bf16" in machine.cpu_features else 0.3


def process_size(machine: Machine, *, compiles: bool, foreign: bool) -> int:
    """The bytes of the process in addition to the model, for runs that compile or not, of a transformers model or
    ours."""
    triton = TRITON_BYTES if machine.versions.get("triton") else 0
    return PROCESS_BYTES + triton + (COMPILER_BYTES if compiles else 0) + (TRANSFORMERS_BYTES if foreign else 0)


def evaluated_loss_bytes(num_tokens: int, dim: int, vocab_size: int, size: int, loss_chunk_bytes: int) -> float:
    """Bytes of the process for the head's loss at its busiest chunk of an evaluation, with logits of `size` bytes; a
    weight that is cast is copied."""
    chunk = chunk_rows(num_tokens, vocab_size * size, loss_chunk_bytes) * vocab_size * size
    return EVALUATED_CHUNKS[size] * chunk + (size * vocab_size * dim if size < 4 else 0)


def chunk_bytes(machine: Machine, compiled: bool, logit_bytes: int, chunk: float) -> float:
    """Bytes of the process that live at once in the head's loss, for logits of `chunk` bytes."""
    if machine.device != "cpu":
        return 2.0 * chunk
    wide = min(WIDE_CHUNKS * chunk, WIDE_PIECES * 4.0 * WIDE_PIECE) if _widened(machine, logit_bytes) else 0.0
    return LOSS_CHUNKS[compiled, logit_bytes] * chunk + wide
