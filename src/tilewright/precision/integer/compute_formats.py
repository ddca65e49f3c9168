"""Meaning of the compute names of integers in precision rules: the grid of the weight, and whether inputs are rounded.

The grids are those of the exports. INT8 has a scale per output channel that leaves room for sums of two products
(`formats.integer.pair_scale`), as the ONNX files have it. INT4 has groups of 32 with scales that FP16 holds, so that a
block of llama.cpp's Q4_0 and a group of XNNPACK's 8da4w take the codes as they are. Its scale is that of the group's
range: smallest and largest value are the same however a compiler orders sums, so the codes of an export are those of
training; a scale by least error, as after training, would not be.

Layers that are trained for them round in each pass, and let the gradient straight through: the weight that is optimized
stays as it is, in the parameter's own dtype, and nothing gets faster. `convert` swaps their classes in place.

See: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018.

Legend: M rows  K columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.formats.integer import (
    INT4,
    INT8,
    IntegerTensor,
    IntSpec,
    encode_integer,
    half_scale,
    pair_scale,
    scale_of_range,
    tile_range,
)
from tilewright.formats.scaling import Tile
from tilewright.precision.mixed.cast_layers import CastEmbedding, CastLinear
from tilewright.precision.quantizers.integers import round_to_integers

_TOKEN = Tile(1, 0)


@dataclass(frozen=True)
class IntegerCompute:
    """Quantisation of a layer while it is trained.

    Args:
        name: in rules.
        spec: of the weight's codes.
        group: elements of a row with one scale; 0: the whole row, with the scale of `pair_scale`.
        rounds_inputs: inputs are rounded to INT8 with a scale per token.

    Example: the values that a layer multiplies by are those of the codes that an export writes.
        >>> weight = torch.linspace(-1, 1, 64).reshape(2, 32)
        >>> int4 = COMPUTE_FORMATS["int4"]
        >>> bool((int4.weight(weight) == int4.quantize(weight).dequantize()).all())
        True
    """

    name: str
    spec: IntSpec
    group: int = 0
    rounds_inputs: bool = False

    @property
    def tile(self) -> Tile:
        """The tile of an integer compute format: which elements of the weight share a scale."""
        return Tile(1, self.group)

    def scale(self, weight_MK: Tensor) -> Tensor:
        """Scales of a weight in an integer compute format, FP32, from its present values."""
        if not self.group:
            return pair_scale(weight_MK.detach())
        scale, _ = scale_of_range(*tile_range(weight_MK.detach(), self.tile), self.spec)
        return half_scale(scale)

    def weight(self, weight_MK: Tensor) -> Tensor:
        """The weight rounded to an integer compute format, in FP32; the gradient passes straight through."""
        weight_MK = weight_MK.to(torch.float32)
        return round_to_integers(weight_MK, self.scale(weight_MK), None, self.tile, self.spec, clip=False)

    def quantize(self, weight_MK: Tensor) -> IntegerTensor:
        """Codes and scales of an integer compute format that `weight` decodes to."""
        weight_MK = weight_MK.detach().to(torch.float32)
        scale = self.scale(weight_MK)
        return IntegerTensor(
            encode_integer(weight_MK, scale, None, self.tile, self.spec), scale, None, self.tile, self.spec
        )

    def input(self, x: Tensor) -> Tensor:
        """Input x [..., K] in an integer compute format as the layer reads it, in its own dtype."""
        if not self.rounds_inputs or not x.numel():
            return x
        x_MK = x.reshape(-1, x.shape[-1])
        scale, _ = scale_of_range(*tile_range(x_MK.detach(), _TOKEN), INT8)
        return round_to_integers(x_MK, scale, None, _TOKEN, INT8, clip=False).view(x.shape)


COMPUTE_FORMATS = {
    each.name: each
    for each in (
        IntegerCompute("int8", INT8, rounds_inputs=True),
        IntegerCompute("int4", INT4, group=32),
        IntegerCompute("int4_a8", INT4, group=32, rounds_inputs=True),
    )
}


class IntegerTrainedLinear(CastLinear):
    """x W^T + b with W rounded to integers, and x too where the format says so."""

    integers: IntegerCompute = COMPUTE_FORMATS["int8"]
    """Set by `convert`."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The input and the weight of an integer compute format as they are multiplied; see `CastLinear.operands`."""
        return self.integers.input(x), self.integers.weight(self.weight)

    def extra_repr(self) -> str:
        """Describe a linear layer in an integer compute format for print: CastLinear's own text and the format."""
        return f"{super().extra_repr()}, rounded to {self.integers.name}"


class IntegerTrainedEmbedding(CastEmbedding):
    """Rows of the rounded table. Each row has its own scales, so only those that are looked up are rounded."""

    integers: IntegerCompute = COMPUTE_FORMATS["int8"]
    """Set by `convert`."""

    def rows(self, rows: Tensor) -> Tensor:
        """Rows of an embedding in an integer compute format, rounded: see `CastEmbedding.rows`."""
        return self.integers.weight(rows.flatten(0, -2)).view(rows.shape)

    def extra_repr(self) -> str:
        """Describe an embedding in an integer compute format for print: its own text and the format."""
        return f"{super().extra_repr()}, rounded to {self.integers.name}"
