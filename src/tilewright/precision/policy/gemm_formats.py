"""The three matmuls of a linear layer and the format of each, in plain words and without torch.

fprop: y = x W^T, summed over features. dgrad: dx = dy W, summed over outputs. wgrad: dW = dy^T x, summed over tokens.
Decisions come from `policy`; `linear` carries them out.
"""

from dataclasses import dataclass, replace

from tilewright.core.errors import ConfigError

FP8_FORMATS = ("fp8_tile", "fp8_hybrid", "fp8_tensorwise")
GEMM_FORMATS = (*FP8_FORMATS, "bf16", "fp32")
"""fp8_tile: E4M3 in 1x128 tiles (weights 128x128). fp8_hybrid: the same with gradients in E5M2. fp8_tensorwise: one
scale per tensor, gradients in E5M2. bf16, fp32: operands in that format."""
GEMM_NAMES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Gemms:
    """Formats of the operands of a linear layer's matmuls, each one of `GEMM_FORMATS`.

    Example:
        >>> str(Gemms.all("fp8_tile")), str(Gemms("fp8_tile", "bf16", "bf16"))
        ('fp8_tile', 'fp8_tile/bf16/bf16')
    """

    fprop: str
    dgrad: str
    wgrad: str

    @classmethod
    def all(cls, name: str) -> "Gemms":
        """One format for all three."""
        return cls(name, name, name)

    def __str__(self) -> str:
        return self.fprop if self.uniform else "/".join(self.formats)

    def __post_init__(self) -> None:
        scalings = {name == "fp8_tensorwise" for name in (self.fprop, self.dgrad, self.wgrad) if name in FP8_FORMATS}
        if len(scalings) > 1:
            raise ConfigError(
                "Matmuls of one layer need the same kind of scale",
                got=f"fprop {self.fprop}, dgrad {self.dgrad}, wgrad {self.wgrad}",
                need="tiles in all of them, or fp8_tensorwise in all of them",
                try_='"fp8_tile", or "bf16" for the odd one',
                where="precision.rules",
            )

    @property
    def formats(self) -> tuple[str, str, str]:
        """Of each matmul, in the order of `GEMM_NAMES`."""
        return self.fprop, self.dgrad, self.wgrad

    @property
    def tensorwise(self) -> bool:
        """True where 8-bit operands have one scale for the whole tensor."""
        return "fp8_tensorwise" in self.formats

    @property
    def any_fp8(self) -> bool:
        """True where at least one matmul has 8-bit operands."""
        return any(name in FP8_FORMATS for name in self.formats)

    @property
    def uniform(self) -> bool:
        """True where all three have one format."""
        return self.fprop == self.dgrad == self.wgrad

    def changed(self, changes: dict[str, str]) -> "Gemms":
        """With some formats replaced, by product name."""
        return replace(self, **changes)


BF16_FLOPS, FP8_FLOPS, BANDWIDTH = 790e12, 1500e12, 4.3e12
"""Rates of an H200 that the estimate of `expected_gain` assumes: FLOP/s and bytes/s."""


def expected_gain(in_features: int, out_features: int) -> float:
    """Time of a linear layer's three matmuls in BF16 over that in FP8 with its quantisation, for many tokens.

    A token's input and output gradient are read in BF16 and written twice in FP8 (row-wise and column-wise). An
    estimate from the rates above, good enough to leave small layers alone; nothing was measured for it.

    Example:
        >>> round(expected_gain(256, 256), 2), round(expected_gain(4096, 16384), 2)
        (0.67, 1.77)
    """
    flops = 6.0 * in_features * out_features
    quantise_bytes = 4.0 * (in_features + out_features)
    return (flops / BF16_FLOPS) / (flops / FP8_FLOPS + quantise_bytes / BANDWIDTH)
