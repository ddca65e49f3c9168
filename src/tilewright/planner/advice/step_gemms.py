"""The matmuls of a step by themselves: what the machine reaches in these very shapes and formats, nothing around them.

Forward, input gradient and weight gradient of each linear layer and of a head that is one, through the kernels that the
step calls. Attention, and experts in one tensor, are not in it, nor is what is computed again.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilewright.planner.machine.microbench import RateProbe
from tilewright.planner.model.gemms import DTYPES, multiplied_in
from tilewright.planner.model.model_shape import ModelShape


@dataclass(frozen=True)
class StepGemm:
    """One matmul of a step: that of a linear layer in one micro-batch."""

    rows: int
    num_in: int
    num_out: int
    fmt: str
    """That it is multiplied in, one of `Ceilings.matmul`."""
    frozen: bool = False
    """Its weight has no gradient."""

    @property
    def flops(self) -> int:
        """FLOPs of the two or three matmuls (GEMMs) of a layer in a step."""
        return (4 if self.frozen else 6) * self.rows * self.num_in * self.num_out


def step_gemms(shape: ModelShape, tokens: Sequence[int], units: Collection[str]) -> Mapping[StepGemm, int]:
    """The GEMMs of a step by shape and format, and how often each runs.

    Args:
        shape: the model.
        tokens: of each micro-batch.
        units: formats that the machine has rates of.
    """
    found: Counter[StepGemm] = Counter()
    for number in tokens:
        for one, count in _of_model(shape, number, units):
            found[one] += count
    return found


def alone_s(probe: RateProbe, gemms: Mapping[StepGemm, int]) -> float:
    """Seconds of a step's GEMMs, each shape timed by itself.

    Args:
        probe: of the device, with the kernels of the run.
        gemms: from `step_gemms`.
    """
    return sum(count * probe.clock(_work(probe, one)) for one, count in gemms.items())


def total_flops(gemms: Mapping[StepGemm, int]) -> int:
    """FLOPs of a step's GEMMs."""
    return sum(count * one.flops for one, count in gemms.items())


def _of_model(shape: ModelShape, tokens: int, units: Collection[str]) -> Iterator[tuple[StepGemm, int]]:
    for layers, count in [*((found, found.count) for found in shape.classes), (shape.rest, 1)]:
        for matmul in layers.matmuls:
            fmt = multiplied_in(matmul.gemms["fprop"], units)
            rows = max(1, round(tokens * matmul.share))
            yield StepGemm(rows, matmul.num_in, matmul.num_out, fmt, matmul.frozen), count
    if shape.plain_head:
        yield StepGemm(tokens, shape.dim, shape.vocab_size, shape.matmul_format), 1


def _work(probe: RateProbe, one: StepGemm) -> Callable[[], object]:
    if one.fmt == "fp8":
        return probe.tiled_linear(one.rows, one.num_in, one.num_out, frozen=one.frozen)
    return probe.linear(one.rows, one.num_in, one.num_out, DTYPES[one.fmt], frozen=one.frozen)
