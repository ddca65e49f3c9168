"""Linear layers and embeddings that are trained for integers: rounded in each pass, the gradient straight through.

The weight that the optimizer changes stays as it is, in the parameter's own dtype. What is multiplied are the values
of the codes that an export writes, in the dtype that the layer would compute in without this; nothing gets faster.
Classes are swapped in place by `convert`, like those of `cast`.

See: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018.

Legend: N out features  K in features.
"""

from torch import Tensor

from tilewright.precision.integer.compute_formats import COMPUTE_FORMATS, IntegerCompute
from tilewright.precision.mixed.cast import CastEmbedding, CastLinear


class IntegerTrainedLinear(CastLinear):
    """x W^T + b with W rounded to integers, and x too where the format says so."""

    integers: IntegerCompute = COMPUTE_FORMATS["int8"]
    """Set by `convert`."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Input and weight as they are multiplied; see `CastLinear.operands`."""
        return self.integers.input(x), self.integers.weight(self.weight)

    def extra_repr(self) -> str:
        """CastLinear's own text and the format."""
        return f"{super().extra_repr()}, rounded to {self.integers.name}"


class IntegerTrainedEmbedding(CastEmbedding):
    """Rows of the rounded table. Each row has its own scales, so only those that are looked up are rounded."""

    integers: IntegerCompute = COMPUTE_FORMATS["int8"]
    """Set by `convert`."""

    def rows(self, rows: Tensor) -> Tensor:
        """See `CastEmbedding.rows`."""
        return self.integers.weight(rows.flatten(0, -2)).view(rows.shape)

    def extra_repr(self) -> str:
        """The embedding's own text and the format."""
        return f"{super().extra_repr()}, rounded to {self.integers.name}"
