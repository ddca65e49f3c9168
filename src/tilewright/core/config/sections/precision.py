"""The recipe's precision section: modes, rules, and the controller's settings."""

from typing import Literal

from pydantic import Field

from tilewright.core.config.section import EVERY, Count, Section

ScaledFormat = Literal["fp8_tile", "fp8_hybrid", "fp8_tensorwise", "mxfp8", "mxfp4", "nvfp4"]
"""Names of formats whose operands have scales, as `precision.policy.gemm_formats` defines them."""
Mode = Literal["fp32", "tf32", "bf16_mixed", "pure_fp16", "hybrid", ScaledFormat]
ComputeFormat = Literal["", "fp32", "tf32", "bf16", "fp16", ScaledFormat, "int8", "int4", "int4_a8"]
GemmFormatName = Literal["", ScaledFormat, "bf16", "fp32"]


class PrecisionRule(Section):
    match: str = "*"
    """Glob on the module's fully qualified name."""
    op: str = "*"
    """Kind of module: linear, conv, embedding, norm, batch_norm, attention, head, experts, router, or `*`."""
    compute: ComputeFormat = ""
    """Format that the matched modules compute in. Later rules win. Empty: as it is without this rule. int8, int4 and
    int4_a8 are for quantisation-aware training: weights (an embedding's too) are rounded to integers and back, inputs
    to INT8 per token with int8 and int4_a8, and the matmul runs in the mode's format."""
    fprop: GemmFormatName = ""
    """Format of a linear layer's forward matmul alone. Empty: as `compute` says."""
    dgrad: GemmFormatName = ""
    """Format of the matmul that gives a linear layer's input gradient."""
    wgrad: GemmFormatName = ""
    """Format of the matmul that gives a linear layer's weight gradient."""
    kind: Literal["", "linear", "head", "router"] = ""
    """Kind of the matched modules, where their structure does not show it. Empty: as found."""


class ControllerSection(Section):
    changes_numbers = EVERY

    enabled: bool = False
    """Move each matmul of the FP8 layers to BF16 or FP32 and back on evidence, and retry bad steps (fp8_tile only)."""
    granularity: Literal["per_gemm", "three_level"] = "per_gemm"
    """Unit of a move: each matmul by itself, or attention, forward and gradient matmuls as three groups."""
    budget: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the linear layers' FLOPs above 8 bits, including what `rules` and `bf16_grad_layers` keep there.
    A budget that these exceed ends the start with exit code 3."""
    interval: Count = Field(default=100, ge=1)
    """Steps between samples of evidence. A sample is a pass over one row, with its matmuls in both formats."""
    cooldown: Count = Field(default=200, ge=1)
    """Steps between two moves of one matmul."""
    patience: Count = Field(default=3, ge=1)
    """Good samples in a row before a matmul moves back to fewer bits."""
    recalibrate_interval: Count = Field(default=1000, ge=1)
    """Steps between larger samples (all rows of the step), after which a good matmul moves back without waiting."""
    retry_steps: bool = True
    """Compute a step again in BF16 where its loss or gradient is not finite or is an outlier; skip it if that does not
    help. False: only a step that is not finite is skipped."""
    spike_factor: float = Field(default=8.0, gt=0)
    """A loss is an outlier this many deviations (1.48 times the median absolute deviation) above the recent median."""


class PrecisionSection(Section):
    changes_numbers = EVERY
    keeps_numbers = ("strict", "eval_fp32")

    enabled: bool = True
    """False: everything in FP32, whatever `mode` says (`DEEPSEEK_AMP_ENABLED=0`)."""
    mode: Mode = "bf16_mixed"
    """fp32 | tf32 | bf16_mixed (BF16 matmuls and residual stream) | hybrid (16-bit matmuls, FP32 residual stream,
    norms, softmax and loss) | pure_fp16 (FP16 weights and activations too) | fp8_tile (bf16_mixed with linear layers in
    E4M3, scaled by tiles of 1x128 and 128x128) | fp8_hybrid (the same, gradients in E5M2) | fp8_tensorwise (one scale
    per tensor, for comparison) | mxfp8, mxfp4, nvfp4 (bf16_mixed with linear layers in these formats, emulated on any
    machine: the numbers are theirs, and nothing gets faster)."""
    start_mode: Mode | None = None
    """Mode for the first `start_fraction` of the steps, for example tf32 before bf16_mixed."""
    start_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share of the steps that run in `start_mode`, where that is set."""
    rules: tuple[PrecisionRule, ...] = ()
    """Per-layer and per-op exceptions to the mode, later ones win."""
    fp32_ops: tuple[str, ...] = ()
    """Operations kept in FP32 in addition to those of the mode: layer_norm, softmax, ... (`DEEPSEEK_FP32_OPS`)."""
    loss_scale: Literal["auto", "off"] | float = "auto"
    """`auto`: dynamic where gradients are FP16, first value from the parameter count. A number: dynamic from there."""
    loss_scale_window: Count = Field(default=2000, ge=1)
    """Clean steps before the scale doubles (`DEEPSEEK_LOSS_SCALE_WINDOW`)."""
    loss_scale_min: float = Field(default=1.0, gt=0)
    """The run stops (exit 4) when an overflow would push the scale below this."""
    loss_scale_max: float = Field(default=2.0**24, gt=0)
    """The scale does not double beyond this."""
    fp8_scale: Literal["power_of_two", "fp32"] = "power_of_two"
    """Scales of 8-bit operands. Powers of two keep them exact in BF16: every machine multiplies the same bits."""
    fp8_min_gain: float = Field(default=1.0, ge=0)
    """On a GPU, the FP8 modes leave linear layers in BF16 whose expected speed-up is below this. 0: none."""
    bf16_grad_layers: tuple[str, ...] = ("*.o_proj", "*.out_proj", "*attn.c_proj", "*attention.output.dense")
    """Globs of linear layers whose gradients the FP8 modes compute in BF16: attention output projections."""
    fp8_from: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Shares of the steps after which the forward matmul, the weight's gradient and the input's gradient may have 8
    bits; BF16 before. [0, 0.1, 0.2] is the articles' progressive start: weights, then activations, then gradients."""
    fp8_until: float = Field(default=1.0, gt=0, le=1)
    """Share of the steps after which 8 bits give way to BF16. 1: never."""
    fp8_after: Literal["all", "fprop"] = "all"
    """Matmuls that take BF16 after `fp8_until`: all, or the forward one alone."""
    controller: ControllerSection = ControllerSection()
    lr_noise_damping: float = Field(default=0.0, ge=0)
    """Multiply the learning rate by 1 / (1 + lr_noise_damping * noise), where noise is the mean noise over signal of
    the matmuls in the controller's last sample (E4M3: 0.03). 0: off."""
    strict: bool = False
    """Stop where something would run in another way than asked: 8-bit matmuls on a machine without a unit for them,
    TF32 by rounding, a layer that cannot compute in its format."""
    eval_fp32: bool = True
    """Evaluate in FP32."""

    @property
    def moves_matmuls(self) -> bool:
        """True if by the precision section single matmuls change their format during the run, on evidence or by a
        schedule."""
        scheduled = self.fp8_from != (0.0, 0.0, 0.0) or self.fp8_until < 1
        return self.enabled and (self.controller.enabled or scheduled)

    @property
    def names_fp16(self) -> bool:
        """True if a mode or a rule of the precision section is one of FP16; `hybrid` is it on a GPU."""
        fp16 = {self.mode, self.start_mode} & {"hybrid", "pure_fp16"} or {"fp16"} & {r.compute for r in self.rules}
        return self.enabled and bool(fp16)
