"""`Int8Linear`: a linear layer for inference on CPUs, weight in INT8 per channel, activations in INT8 per token.

Legend: N out features  K in features.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import NumericsError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.formats.integer import INT8, IntegerTensor, quantize_integer
from tilewright.ops.int8_linear import CHANNEL, Int8Weight, int8_linear


class Int8Linear(nn.Module):
    """out = x @ weight.T + bias with integer matmuls; see `ops.int8_linear`. No gradient.

    Scales and bias are read in each call. What a kernel prepares of the codes is made at the first use, compared with
    the codes' bytes in each call, and made again where they differ, whatever wrote them; compiled code makes it in each
    call then, until the layer is called uncompiled. Copies and pickles start without it.

    Args:
        weight: symmetric INT8, a scale per out feature.
        bias_N: [N] or None.
        machine: facts about this machine; None reads them.
        kernel: a candidate of `ops.int8_linear`, or "auto".

    Example:
        >>> layer = nn.Linear(16, 4)
        >>> fast = Int8Linear.from_linear(layer)
        >>> x = torch.ones(1, 1, 16)
        >>> bool((fast(x) - layer(x)).abs().max() < 0.05)
        True
    """

    def __init__(
        self, weight: IntegerTensor, bias_N: Tensor | None = None, machine: Machine | None = None, kernel: str = "auto"
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.machine, self.kernel = machine or detect_machine("cpu"), kernel
        self.qdata: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("qdata", weight.codes)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("bias", None if bias_N is None else bias_N.detach().to(torch.float32))
        self._prepared: Int8Weight | None = None
        self.prepared()

    @classmethod
    def from_linear(cls, layer: nn.Linear, machine: Machine | None = None, kernel: str = "auto") -> "Int8Linear":
        """The layer's weight rounded to nearest.

        Raises:
            NumericsError: the weight is not finite.
        """
        weight = quantize_integer(layer.weight.detach(), INT8, CHANNEL)
        if bool(weight.scale.isnan().any()):
            raise NumericsError(
                "Linear layer with a weight that is not finite cannot be quantised",
                got=f"{int(weight.scale.isnan().sum())} of {weight.shape[0]} rows with infinite or NaN values",
                need="finite weights",
                try_="an earlier checkpoint of the run",
                where="weight",
            )
        return cls(weight, layer.bias, machine, kernel)

    def prepared(self) -> Int8Weight:
        """The weight as its kernel reads it, and which kernel that is (`chosen`)."""
        made = self._prepared
        if made is None or not made.is_packed_of(self.qdata) or made.scale_N.shape != self.scale.shape[:1]:
            weight = IntegerTensor(self.qdata, self.scale, None, CHANNEL, INT8)
            made = self._prepared = Int8Weight.of(weight, self.machine, self.kernel)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] of any float dtype -> [..., N] of the same."""
        if torch.compiler.is_compiling() and self._prepared is not None:
            made, made_from = self._prepared, self._prepared.made_from  # compared in the kernel
        else:
            made, made_from = self.prepared(), None
        weight = replace(made, qdata_NK=self.qdata, scale_N=self.scale[:, 0], made_from=made_from)
        return int8_linear(x, weight, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_prepared": None}

    def extra_repr(self) -> str:
        """Sizes and kernel."""
        return f"{self.in_features} -> {self.out_features}, int8, kernel {self.prepared().chosen.candidate.name}"
