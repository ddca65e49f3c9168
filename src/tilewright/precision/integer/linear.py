"""`Int8Linear`: a linear layer for inference on CPUs, weight in INT8 per channel, activations in INT8 per token.

Legend: N out features  K in features.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import NumericsError
from tilewright.core.hardware import Machine, detect_machine
from tilewright.formats.integer import INT8, IntegerTensor, quantize_integer
from tilewright.ops.base.code_modules import HoldsCodes
from tilewright.ops.base.fingerprint import is_held_elsewhere
from tilewright.ops.int8_linear import CHANNEL, Int8Weight, int8_linear


class Int8Linear(HoldsCodes):
    """out = x @ weight.T + bias with integer matmuls; see `ops.int8_linear`. No gradient.

    Codes `qdata` and `scale` are entries of `state_dict`, neither parameters nor buffers; `bias` is a buffer. All are
    read in each call. What a kernel prepares of the codes is made at the first use, and made again where the codes'
    bytes have changed. They are compared in each call as long as anyone else may write them: from the moment when
    somebody reads or sets `qdata`, or saves, loads or moves the layer, and until nobody but the layer holds their
    memory any more. A layer that nobody looks into compares nothing. So every write has its effect at the next call,
    by `copy_`, `.data`, NumPy, another tensor, `set_`, `assign=True` or another process; but for one to a bare address
    (`data_ptr`) that is kept when its tensor is gone. Compiled code compares, and prepares in each call where they
    differ, until the layer is called uncompiled. Copies and pickles start without it.

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
        self._looked_into = True
        """Somebody else may hold the codes' memory, or has written it since they were compared."""
        self.out_features, self.in_features = weight.shape
        self.machine, self.kernel = machine or detect_machine("cpu"), kernel
        self._qdata, self.scale = weight.codes, weight.scale
        self.bias: Tensor | None
        self.register_buffer("bias", None if bias_N is None else bias_N.detach().to(torch.float32))
        self._prepared: Int8Weight | None = None
        self._up_to_date()

    @classmethod
    def from_linear(cls, layer: nn.Linear, machine: Machine | None = None, kernel: str = "auto") -> "Int8Linear":
        """Make an INT8 linear layer of a linear one: the weight rounded to nearest.

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

    code_attributes = MappingProxyType({"qdata": "_qdata", "scale": "scale"})

    @property
    def qdata(self) -> Tensor:
        """Codes of an INT8 linear layer, int8 [N, K]. Whoever reads this may write into it."""
        self._looked_into = True
        return self._qdata

    @qdata.setter
    def qdata(self, codes: Tensor) -> None:
        self._looked_into = True
        self._qdata = codes

    @contextmanager
    def _as_buffers(self) -> Iterator[None]:
        self._looked_into = True
        with super()._as_buffers():
            yield

    def prepared(self) -> Int8Weight:
        """The prepared weight of an INT8 linear layer as its kernel reads it, and which kernel that is (`chosen`)."""
        return replace(self._up_to_date(), qdata_NK=self.qdata, scale_N=self.scale[:, 0])

    def _up_to_date(self) -> Int8Weight:
        """Operands of an INT8 linear layer, up to date: prepared of the codes that are there now; it does not hold
        them."""
        looked_into, self._looked_into = self._looked_into, False  # first: what is written from here on counts again
        made = self._prepared
        fits = made is not None and made.scale_N.shape == self.scale.shape[:1]
        if made is None or not fits or (looked_into and not made.is_packed_of(self._qdata)):
            made = self._prepare()
        if looked_into and is_held_elsewhere(vars(self), "_qdata"):
            self._looked_into = True
        return made

    def _prepare(self) -> Int8Weight:
        weight = IntegerTensor(self._qdata, self.scale, None, CHANNEL, INT8)
        made = Int8Weight.of(weight, self.machine, self.kernel)
        self._prepared = replace(made, qdata_NK=self._qdata.new_empty(0))
        return self._prepared

    def forward(self, x: Tensor) -> Tensor:
        """Run an INT8 linear layer: x [..., K] of any float dtype -> [..., N] of the same."""
        if torch.compiler.is_compiling() and self._prepared is not None:
            made = self._prepared
            made_from = made.made_from if self._looked_into else None  # compared in the kernel
        else:
            made, made_from = self._up_to_date(), None
        weight = replace(made, qdata_NK=self._qdata, scale_N=self.scale[:, 0], made_from=made_from)
        return int8_linear(x, weight, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_prepared": None, "_looked_into": True}

    def extra_repr(self) -> str:
        """Describe an INT8 linear layer for print: sizes and kernel."""
        return f"{self.in_features} -> {self.out_features}, int8, kernel {self._up_to_date().chosen.candidate.name}"
