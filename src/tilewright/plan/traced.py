"""Bytes of a run of a Hugging Face model by owner at each phase, from the trace of its micro-batch.

What the trace finds alive, and on a CPU what glibc holds besides: live bytes go up and down through a step in blocks of
many sizes, and what is free between them at the peak is a share of that peak. Those pages then stay with the process.
"""

import torch

from tilewright.core.hardware import Machine
from tilewright.plan.footprint import (
    CUDA_RESERVE_BYTES,
    Footprint,
    activation_bytes,
    buffer_bytes,
    checkpoint_phase,
    evaluated_loss_work,
    head_shape,
    loss_work,
    operand_work,
    optimizer_bytes,
    process_bytes,
    product_bytes,
)
from tilewright.plan.workload import Workload


def free_pages(machine: Machine, operand_bytes: int) -> float:
    """What glibc holds free at the peak of an eager step, as a share of what is alive then.

    Measured over a first and a second step. 0.3: 17 models on a CPU with AVX-512 BF16 (0.0 to 0.4). AMX, and CPUs that
    multiply 16-bit operands in FP32 and free the FP32 results beside the rounded ones: a Llama with all kept and with
    all recomputed (benchmarks/results/plan_measured_*.json).
    """
    if machine.device != "cpu":
        return 0.0
    if operand_bytes == 2 and not machine.cpu_multiplies(torch.bfloat16):
        return 1.3
    return 0.65 if "amx_bf16" in machine.cpu_features else 0.3


def traced_footprint(work: Workload) -> Footprint:
    """The bytes of a run by the standard executor; where it passes through several precision modes, the larger ones."""
    trace, cpu, many = work.trace, work.machine.device == "cpu", work.num_micro > 1
    assert trace is not None
    process = process_bytes(work) if cpu else 0
    gradients = 4 * work.num_trainable  # FP32 also where parameters are stored in 16 bit
    kept = max(activation_bytes(work, mode) for mode in work.modes)
    loss = max(loss_work(work, mode) for mode in work.modes)
    operands = max(operand_work(work, mode) for mode in work.modes)
    head = head_shape(work)
    of_head = 4 * head[1] * head[2] if head else 0
    before = gradients if many else 0
    forward = before + max(trace.peak_bytes, kept + loss)
    alive = trace.passing_bytes if many else trace.backward_bytes + of_head
    backward = max(before + alive + operands, gradients)
    most = max(forward, backward)
    left = int(free_pages(work.machine, product_bytes(work)) * most)
    held = {"parameters": work.parameter_bytes, "optimizer": optimizer_bytes(work), "buffers": buffer_bytes(work)}
    still = min(kept, backward - gradients)  # of activations, when all gradients are there
    staying = most + left if cpu else 0
    wide = 2 * work.num_narrow if work.recipe.precision.eval_fp32 else 0
    phases = {
        "load": {"parameters": held["parameters"], "buffers": held["buffers"], "other": process},
        "forward": held | {"gradients": before, "activations": kept, "other": process + left + forward - before - kept},
        "backward": held
        | {"gradients": gradients, "activations": still, "other": process + left + backward - gradients - still},
        "update": held | {"gradients": gradients, "other": process + max(0, staying - gradients)},
        "evaluate": held
        | {"parameters": held["parameters"] + wide, "other": process + staying + evaluated_loss_work(work)},
    }
    phases["checkpoint"] = checkpoint_phase(work, phases, held["parameters"] + held["optimizer"])
    parts = {"process": process, "loss of the head": loss, "backward": backward - gradients - still, "free pages": left}
    return Footprint(phases, parts, 0 if cpu else CUDA_RESERVE_BYTES)
