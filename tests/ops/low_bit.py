"""Cases of `ops.adam` for the tests of all candidates, and a comparison that shows the first difference."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tests.ops.follow import awkward
from tilewright.formats.quadratic_map import scale_shape
from tilewright.ops.backends.ref.adam import AdamHyper
from tilewright.ops.backends.ref.low_bit_adam import LowBitTensors

HALF = {"of_bf16": torch.bfloat16, "of_fp16": torch.float16}
KINDS = ("fp32", "bf16", "split24", *HALF)
"""Of targets: the last two are FP32 masters of weights of these dtypes, some of which were written."""
SIZES = (1, 127, 128, 129, 300, 128 * 64 + 5)
ROWS = ((300, 1), (70, 3), (9, 127), (5, 256), (7, 300), (0, 300))
"""Numbers of rows, and their lengths."""


@dataclass(frozen=True)
class LowBitCase:
    """A tensor of `rows` rows, `size` elements in all, and its states, before the first step."""

    kind: str
    size: int
    seed: int = 0
    rows: int = 1

    def tensors(self) -> LowBitTensors:
        """Fresh tensors, with an empty gradient."""
        target = torch.randn(self.size, generator=torch.Generator().manual_seed(self.seed))
        scales = scale_shape((self.rows, self.size // max(1, self.rows)))
        weight = None
        if self.kind in HALF:
            chosen = torch.rand(self.size, generator=torch.Generator().manual_seed(self.seed + 2)) < 0.1
            weight = torch.where(chosen, -0.7 * target, target).to(HALF[self.kind])
        return LowBitTensors(
            target=target.bfloat16() if self.kind in ("bf16", "split24") else target,
            low=torch.zeros(self.size, dtype=torch.int8) if self.kind == "split24" else None,
            grad=torch.empty(0),
            exp_avg=torch.zeros(self.size, dtype=torch.int8),
            exp_avg_scale=torch.zeros(scales),
            exp_avg_sq=torch.zeros(self.size, dtype=torch.uint8),
            exp_avg_sq_scale=torch.zeros(scales),
            number=5,
            weight=weight,
        )

    def grads(self, steps: int) -> list[Tensor]:
        """Gradients over a wide range, some blocks without any, one in four in BF16."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        found = []
        for step in range(steps):
            grad = torch.randn(self.size, generator=generator)
            grad *= torch.exp2(4 * torch.randn(self.size, generator=generator))
            grad[torch.rand(self.size, generator=generator) < 0.05] = 0
            if step != 1:
                grad[256:512] = 0
            found.append(grad.bfloat16() if step % 4 == 3 else grad)
        return found

    def awkward_grads(self, steps: int) -> list[Tensor]:
        """The same with numbers that are not finite, subnormal, or with squares that overflow (size 640 at least)."""
        found = self.grads(steps)
        for grad in found:
            grad[3], grad[131], grad[260] = torch.nan, -torch.inf, 1e30
            grad[384:512] *= 1e-30
            grad[512:640] *= 1e-42
        return found


def written_pairs(low: int) -> LowBitTensors:
    """BF16 weights of all exponents beside a correction of 8 bits that another number left, with moments and gradients
    of zero."""
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    weights = weights[(weights & 0x7F) % 63 < 2].to(torch.int16).view(torch.bfloat16)
    tensors = LowBitCase("split24", len(weights)).tensors()
    return replace(tensors, target=weights, low=torch.full_like(tensors.low, low), grad=torch.zeros(len(weights)))


def written_masters(kind: str, every: int = 1) -> LowBitTensors:
    """Masters of all exponents beside all 16-bit weights, or every so many of the pairs; moments and gradients are
    zero."""
    weights = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(HALF[kind])
    some = awkward()
    masters = torch.cat([weights.float().roll(1), weights.float(), some, some[:63].repeat(2**10), weights.float()])
    near = masters[-(2**16) :].view(torch.int32)
    near += torch.arange(2**16, dtype=torch.int32) % 9 * 2**11 - 2**13  # about the halves between them, and on them
    near[(weights.float().isnan() | weights.float().isinf())] = 0
    beside = torch.cat([weights, weights, some.to(HALF[kind]), weights[: 63 * 2**10], weights])
    masters, beside = masters[::every].clone(), beside[::every].clone()
    tensors = LowBitCase(kind, len(masters)).tensors()
    return replace(tensors, target=masters, weight=beside, grad=torch.zeros(len(masters)))


def hyper(step: int, lr: float = 1e-3) -> AdamHyper:
    """Settings of a step."""
    return AdamHyper(step, lr, 0.9, 0.95, 1e-8, 0.1, 3)


def assert_same(got: LowBitTensors, want: LowBitTensors, name: str = "") -> None:
    """Equal bits in all tensors but the gradient (where both are NaN, whatever the bits of it)."""
    for field in fields(LowBitTensors):
        ours, theirs = getattr(got, field.name), getattr(want, field.name)
        if field.name in ("grad", "number", "first", "skip") or theirs is None:
            continue
        ours, theirs = ours.flatten(), theirs.flatten()
        different = ((ours != theirs) & ~(ours.isnan() & theirs.isnan())).nonzero()
        if len(different):
            at = int(different[0])
            raise AssertionError(
                f"{name} {field.name}: {len(different)} of {len(ours)} differ; at {at}: {ours[at]}, want {theirs[at]}"
            )
