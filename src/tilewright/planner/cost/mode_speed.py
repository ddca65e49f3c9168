"""How fast the matmuls of each precision mode are on a machine, against those of mode fp32.

A mode may be slower than FP32: on a CPU that has no instructions for its format, or where 8-bit operands are decoded
before they are multiplied. `doctor`, plans and the start of a run name such a mode; all three ask here.
"""

from collections.abc import Mapping

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.gemms import LinearGemm, multiplied_in
from tilewright.planner.model.operand_bytes import OperandBytes
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, Gemms
from tilewright.precision.policy.policy import MODES, Policy
from tilewright.precision.policy.schedule import ModeSchedule

SLOWER = 0.95
"""Speed, over that of mode fp32, below which a mode is called slower: measured rates scatter by less."""
TOKENS = 2048
"""Of the micro-batch that modes are compared on; with fewer, decoding weights is a larger part."""


def mode_speeds(rates: Ceilings, machine: Machine) -> dict[str, float]:
    """The speed of each precision mode's matmuls over that of mode fp32, for a linear layer of the largest measured
    width: forward and backward, with making and decoding its 8-bit operands.

    Args:
        rates: of the machine.
        machine: what multiplies there.
    """
    width = max(rates.matmul["fp32"])
    seconds = {mode: _seconds(mode, width, rates, machine) for mode in MODES}
    return {mode: seconds["fp32"] / found for mode, found in seconds.items()}


def slow_modes(rates: Ceilings, machine: Machine) -> dict[str, float]:
    """The precision modes that are slower than fp32, with their speed over that of fp32.

    Example: an H100, by its published rates.
        >>> from tilewright.planner.machine.gpu_specs import find_published
        >>> from tilewright.core.hardware import detect_machine
        >>> spec = find_published("h100")
        >>> list(slow_modes(spec.ceilings(), spec.machine(detect_machine("cpu"), 2**30)))  # multiplied in FP32
        ['nvfp4']
    """
    return {mode: speed for mode, speed in mode_speeds(rates, machine).items() if speed < SLOWER}


def slow_mode_notes(recipe: Recipe, rates: Ceilings, machine: Machine) -> tuple[str, ...]:
    """Notes on a run whose precision mode is slower than fp32; none where it is not.

    Args:
        recipe: of the run; of two modes that it passes through the last one counts.
        rates, machine: where it runs.
    """
    mode = ModeSchedule.from_section(recipe.precision, recipe.train.steps).mode
    speed = slow_modes(rates, machine).get(mode)
    if speed is None:
        return ()
    return (
        f"precision.mode {mode} is slower than fp32 on this machine: its matmuls run at {speed:.2g} times the speed of "
        "those in FP32. It saves memory all the same; --precision.mode fp32 is faster",
    )


def in_words(found: Mapping[str, float]) -> str:
    """Slow precision modes with their speeds in words, the slowest first."""
    return ", ".join(f"{mode} {speed:.2g}x" for mode, speed in sorted(found.items(), key=lambda item: item[1]))


def _seconds(mode: str, width: int, rates: Ceilings, machine: Machine) -> float:
    """Seconds of the three matmuls of a linear layer in a precision mode."""
    policy = Policy(mode, device_type=machine.device)
    flops = 2.0 * TOKENS * width * width
    if not policy.is_fp8:
        return 3 * rates.matmul_s(policy.matmul, width, flops)
    layer = LinearGemm("layer", width, width, 1.0, Gemms.all(mode))
    coded = OperandBytes.of([layer], TOKENS, machine, kept=machine.device == "cpu")
    fmt = multiplied_in(layer.gemms.fprop, rates.matmul)
    return len(GEMM_NAMES) * rates.matmul_s(fmt, width, flops) + (coded.forward + coded.backward) / rates.bandwidth
