"""The quantisation of a model: bits, groups, method, and what happens to embedding, head and activations."""

from dataclasses import dataclass
from typing import Literal

from tilewright.core.errors import ConfigError
from tilewright.formats.integer import INT8, IntSpec
from tilewright.formats.scaling import Tile

Method = Literal["rtn", "gptq", "awq"]
Activations = Literal["none", "dynamic", "static"]


@dataclass(frozen=True)
class QuantSpec:
    """Formats of one quantised model.

    Args:
        bits: of linear layers' weights, 2 to 8.
        group: elements of a row that share a scale; 0: the whole row (per channel). Where it does not divide a row, the
            last group is shorter, nothing is padded; consumers that need whole groups reject such a weight themselves.
        method: rtn (round to nearest), gptq (error of a column carried to those after it), awq (input channels scaled,
            the inverse folded into the norm before).
        symmetric: no zero points.
        activations: of linear layers' inputs, INT8: none, dynamic (a scale per token), static (one affine scale per
            layer, from the calibration batches).
        embedding_bits, head_bits: 0 leaves them as they are; 8 has a scale per row; 4 as `group`. Always rounded to
            nearest. Where both are one tied parameter they must be equal.
        half_scales: scales of linear layers' weights are numbers of FP16, for formats that store them so, and are
            searched for the least squared error of each group (see `least_error`); symmetric only.
        negative_scales: with `half_scales`, scales may be negative, for formats that take them.

    Raises:
        ConfigError: numbers that make no format.

    Example:
        >>> QuantSpec(bits=4, group=32, method="gptq").tile
        Tile(rows=1, cols=32)
    """

    bits: int = 8
    group: int = 0
    method: Method = "rtn"
    symmetric: bool = True
    activations: Activations = "none"
    embedding_bits: int = 8
    head_bits: int = 8
    half_scales: bool = False
    negative_scales: bool = False

    def __post_init__(self) -> None:
        checks = {
            "bits": (self.bits in range(2, 9), "2 to 8"),
            "group": (self.group >= 0, "0 for whole rows, or elements per scale"),
            "method": (self.method in ("rtn", "gptq", "awq"), "rtn, gptq or awq"),
            "activations": (self.activations in ("none", "dynamic", "static"), "none, dynamic or static"),
            "embedding_bits": (self.embedding_bits in (0, 4, 8), "0, 4 or 8"),
            "head_bits": (self.head_bits in (0, 4, 8), "0, 4 or 8"),
            "half_scales": (self.symmetric or not self.half_scales, "symmetric = True beside it"),
            "negative_scales": (self.half_scales or not self.negative_scales, "half_scales = True beside it"),
        }
        for name, (right, need) in checks.items():
            if not right:
                raise ConfigError(
                    f"Quantisation with {name} = {getattr(self, name)!r} is not known",
                    got=f"{name} = {getattr(self, name)!r}",
                    need=need,
                    try_=f"{name} = {getattr(type(self), name)!r}",
                    where=name,
                )

    @property
    def tile(self) -> Tile:
        """The tile of a quantisation: which elements of a linear layer's weight share a scale."""
        return Tile(1, self.group)

    @property
    def format(self) -> IntSpec:
        """The integer format of a quantisation's spec, for a linear layer's weight."""
        return int_format(self.bits, self.symmetric)

    @property
    def needs_batches(self) -> bool:
        """True if the quantisation that the spec describes needs text to go through the model."""
        return self.method != "rtn" or self.activations == "static"


def int_format(bits: int, symmetric: bool = True) -> IntSpec:
    """The integer format of a quantisation: symmetric INT8 is -127..127, other formats use all codes."""
    return INT8 if bits == 8 and symmetric else IntSpec(bits)
