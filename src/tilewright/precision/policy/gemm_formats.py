"""The three matmuls of a linear layer and the format of each.

fprop: y = x W^T, summed over features. dgrad: dx = dy W, summed over outputs. wgrad: dW = dy^T x, summed over tokens.
Decisions come from `policy`; `linear` carries them out. A format is an object: who has one that is not in `FORMATS`
hands it to a layer, and needs no entry here; an entry gives it a name in recipes.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tilewright.core.errors import ConfigError
from tilewright.core.hardware import Machine, fp8_choice
from tilewright.formats.scaling import TENSORWISE, ScaleSpec, Tile
from tilewright.formats.spec import E4M3, E5M2, SPECS, FloatSpec
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, NVFP4, NVFP4_BLOCK, OperandFormat, fp8_format
from tilewright.precision.policy.gemm_names import GEMM_NAMES


@dataclass(frozen=True)
class Operands:
    """Formats to which the operands of a layer's matmuls are quantised.

    Args:
        input: of the layer, along its features, and transposed along its tokens.
        weight: along its input features, and transposed along its output features; from one copy where tiles are
            square.
        gradient: of the layer's output, likewise both ways from its values.
    """

    input: OperandFormat
    weight: OperandFormat
    gradient: OperandFormat

    def of(self, gemm: str) -> tuple[OperandFormat, OperandFormat]:
        """Both operands of a GEMM format, as `ops.gemm` multiplies them."""
        return {
            "fprop": (self.input, self.weight),
            "dgrad": (self.gradient, self.weight),
            "wgrad": (self.gradient, self.input),
        }[gemm]

    def relaxed(self, *, power_of_two: bool) -> "Operands":
        """This format of operands; unless `power_of_two`, with exact scales in place of powers of two; see
        `ScaleSpec.relaxed`."""
        forms = (self.input, self.weight, self.gradient)
        return Operands(*(form.relaxed(power_of_two=power_of_two) for form in forms))


@dataclass(frozen=True)
class GemmFormat:
    """Formats of a matmul's operands.

    Args:
        name: in rules, reports, the audit and checkpoints. Without `operands` one of `formats.spec.SPECS`.
        operands: what they are quantised to; None: values of 16 or 32 bits.
        reason: the part of a mode's line of explanation that says what it is.
    """

    name: str
    operands: Operands | None = None
    reason: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def scaled(self) -> bool:
        """True where operands of a GEMM's format are codes with scales."""
        return self.operands is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a GEMM's operands that are not scaled."""
        return SPECS[self.name].dtype

    def relaxed(self, *, power_of_two: bool) -> "GemmFormat":
        """This format of a GEMM; unless `power_of_two`, with exact scales in place of powers of two; see
        `ScaleSpec.relaxed`."""
        operands = None if self.operands is None else self.operands.relaxed(power_of_two=power_of_two)
        return replace(self, operands=operands)


_WIDE = "FP32 accumulation and master weights"
TILES = Operands(FP8_ROW, FP8_BLOCK, FP8_ROW)
FP8_TILE = GemmFormat("fp8_tile", TILES, f"E4M3 in 1x128 tiles, weights 128x128, {_WIDE}")
FP8_HYBRID = GemmFormat(
    "fp8_hybrid",
    Operands(FP8_ROW, FP8_BLOCK, fp8_format(E5M2, FP8_ROW.tile)),
    f"E4M3, gradients E5M2, in 1x128 tiles, weights 128x128, {_WIDE}",
)
_WHOLE = fp8_format(E4M3, TENSORWISE)
FP8_TENSORWISE = GemmFormat(
    "fp8_tensorwise",
    Operands(_WHOLE, _WHOLE, fp8_format(E5M2, TENSORWISE)),
    f"E4M3, gradients E5M2, one scale per tensor, {_WIDE}",
)
_DECODED = f"emulated: operands are decoded before each matmul, {_WIDE}"
FORMATS = (
    FP8_TILE,
    FP8_HYBRID,
    FP8_TENSORWISE,
    GemmFormat("mxfp8", Operands(MXFP8, MXFP8, MXFP8), f"E4M3, an E8M0 scale per 1x32 along the sum, {_DECODED}"),
    GemmFormat("mxfp4", Operands(MXFP4, MXFP4, MXFP4), f"E2M1, an E8M0 scale per 1x32 along the sum, {_DECODED}"),
    GemmFormat(
        "nvfp4",
        Operands(NVFP4, NVFP4_BLOCK, NVFP4),
        f"E2M1, an E4M3 scale per 1x16, weights 16x16, under an FP32 scale per tensor, {_DECODED}",
    ),
    GemmFormat("bf16"),
    GemmFormat("fp32"),
)
"""Formats that recipes name."""
SCALED_FORMATS = tuple(each.name for each in FORMATS if each.scaled)
GEMM_FORMATS = tuple(each.name for each in FORMATS)


def why_emulated(form: GemmFormat, machine: Machine) -> str:
    """Explain why a GEMM's format is emulated: no unit of the machine multiplies its operands as they are. Empty if one
    does, or if they have no scales."""
    choice = fp8_choice(machine)
    if form.operands is None or form.name not in SCALED_FORMATS or form.name in choice.native:
        return ""
    if form.operands.input.is_fp8:
        return choice.reason
    return f"no kernel multiplies {form.name}: its operands are decoded, exactly, before each matmul"


def named_format(name: str) -> GemmFormat:
    """The GEMM format of a name in rules, or of 16 or 32 bits."""
    return next((each for each in FORMATS if each.name == name), GemmFormat(name))


@dataclass(frozen=True)
class Gemms:
    """Formats of the operands of a linear layer's matmuls.

    Raises:
        ConfigError: two of them quantise the input or the weight to different formats, of which a layer has one copy.

    Example:
        >>> str(Gemms.all("fp8_tile")), str(Gemms.of("fp8_tile", "bf16", "bf16"))
        ('fp8_tile', 'fp8_tile/bf16/bf16')
    """

    fprop: GemmFormat
    dgrad: GemmFormat
    wgrad: GemmFormat

    @classmethod
    def of(cls, fprop: str, dgrad: str, wgrad: str) -> "Gemms":
        """Formats of the three GEMMs by their names in rules."""
        return cls(*map(named_format, (fprop, dgrad, wgrad)))

    @classmethod
    def all(cls, form: str | GemmFormat) -> "Gemms":
        """One format for all three GEMMs."""
        each = named_format(form) if isinstance(form, str) else form
        return cls(each, each, each)

    def __str__(self) -> str:
        return self.fprop.name if self.uniform else "/".join(self.names)

    def __post_init__(self) -> None:
        copies = {(each.operands.input, each.operands.weight) for each in self.formats if each.operands is not None}
        if len(copies) > 1:
            raise ConfigError(
                "Matmuls of one layer need the same kind of scale",
                got=", ".join(f"{gemm} {name}" for gemm, name in zip(GEMM_NAMES, self.names, strict=True)),
                need="one of the 8- or 4-bit formats in all of them (fp8_tile and fp8_hybrid may be mixed)",
                try_='"fp8_tile" in all of them, or "bf16" for the odd one',
                where="precision.rules",
            )

    @property
    def formats(self) -> tuple[GemmFormat, GemmFormat, GemmFormat]:
        """The format of each GEMM, in the order of `GEMM_NAMES`."""
        return self.fprop, self.dgrad, self.wgrad

    @property
    def names(self) -> tuple[str, str, str]:
        """The names of the formats of the three GEMMs."""
        return self.fprop.name, self.dgrad.name, self.wgrad.name

    def __getitem__(self, gemm: str) -> GemmFormat:
        """The format of a GEMM, by its name."""
        return self.formats[GEMM_NAMES.index(gemm)]

    @property
    def operands(self) -> Operands | None:
        """The operands of the first GEMM that is scaled; input and weight are those of all that are."""
        return next((each.operands for each in self.formats if each.scaled), None)

    @property
    def any_scaled(self) -> bool:
        """True where at least one GEMM has operands with scales."""
        return self.operands is not None

    @property
    def all_scaled(self) -> bool:
        """True where all GEMMs have operands with scales."""
        return all(each.scaled for each in self.formats)

    @property
    def uniform(self) -> bool:
        """True where all three GEMMs have one format."""
        return self.fprop == self.dgrad == self.wgrad

    def changed(self, changes: dict[str, str]) -> "Gemms":
        """These formats of GEMMs with some replaced, by their names."""
        return replace(self, **{gemm: named_format(name) for gemm, name in changes.items()})


def to_text(formats: Sequence[GemmFormat]) -> str:
    """GEMM formats as text, for operators of torch, which take no Python objects. See `of_text`."""
    return json.dumps([asdict(each) for each in formats], default=lambda dtype: str(dtype).removeprefix("torch."))


@functools.lru_cache(maxsize=256)
def of_text(text: str) -> tuple[GemmFormat, ...]:
    """The GEMM formats of `to_text`.

    Example:
        >>> of_text(to_text(FORMATS)) == FORMATS
        True
    """
    return tuple(GemmFormat(row["name"], _operands(row["operands"]), row["reason"]) for row in json.loads(text))


def _operands(found: dict[str, Any] | None) -> Operands | None:
    return None if found is None else Operands(*(_operand(found[name]) for name in ("input", "weight", "gradient")))


def _operand(found: dict[str, Any]) -> OperandFormat:
    element, scale = dict(found["element"]), dict(found["scale"])
    for part in (element, scale):
        part["dtype"] = getattr(torch, part["dtype"])
    scale["tile"] = Tile(**scale["tile"])
    return OperandFormat(FloatSpec(**element), ScaleSpec(**scale))


BF16_FLOPS, FP8_FLOPS, BANDWIDTH = 790e12, 1500e12, 4.3e12
"""Rates of an H200 that the estimate of `expected_gain` assumes: FLOP/s and bytes/s."""


def expected_gain(in_features: int, out_features: int) -> float:
    """Estimate the gain of FP8 GEMMs: time of a linear layer's three in BF16 over that in FP8 with its quantisation,
    for many tokens.

    A token's input and output gradient are read in BF16 and written twice in FP8 (row-wise and column-wise). An
    estimate from the rates above, good enough to leave small layers alone; nothing was measured for it.

    Example:
        >>> round(expected_gain(256, 256), 2), round(expected_gain(4096, 16384), 2)
        (0.67, 1.77)
    """
    flops = 6.0 * in_features * out_features
    quantise_bytes = 4.0 * (in_features + out_features)
    return (flops / BF16_FLOPS) / (flops / FP8_FLOPS + quantise_bytes / BANDWIDTH)
