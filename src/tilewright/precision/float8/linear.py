"""A linear layer whose three matmuls have formats of their own, 8-bit tiles among them, changed without recompiling.

What it keeps for backward is one byte per element, the column-wise copy of its input that the weight's gradient reads;
or the input itself, where the weight's gradient is in 16 or 32 bit or may be moved there at run time.
An input is quantised once for the layers that share it. A weight is quantised when it has changed where `weight_cache`
manages it, else in each pass; the input's gradient reads the same FP8 data transposed.
Read `Float8Linear` first, then `gemm_ops`.

See: DeepSeek-V3 report, section 3.3 (fine-grained quantisation; FP8 copies of inputs cached for backward).

Legend: N tokens  K input features  M output features. TiledTensors carry their own shapes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError, HardwareError
from tilewright.core.hardware import Machine
from tilewright.formats.tiled import TiledTensor, WithCopies
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue, queue_now
from tilewright.ops.kernels import Kernels
from tilewright.precision.float8.gemm.gemm_ops import RuntimeFormats, StaticConfig, matmuls
from tilewright.precision.float8.gemm.input_cache import InputCopies, InputShare
from tilewright.precision.float8.gemm.operands import quantize_copies
from tilewright.precision.float8.gemm.weight_store import new_store, weight_operand
from tilewright.precision.mixed.cast_layers import Cast
from tilewright.precision.policy.gemm_formats import (
    FORMATS,
    GEMM_NAMES,
    SCALED_FORMATS,
    TILES,
    GemmFormat,
    Gemms,
    Operands,
    of_text,
    to_text,
    why_emulated,
)


def operands_of(gemms: Gemms, *, power_of_two: bool = True) -> Operands:
    """Formats of an FP8 linear layer's operands; without one, those it may be moved to at run time."""
    return (gemms.operands or TILES).relaxed(power_of_two=power_of_two)


class Float8Linear(Cast, nn.Linear):
    """x W^T + b with the formats of `gemms`. x [..., K] any float dtype -> [..., M] `output_dtype`.

    Made from an `nn.Linear` by `convert`, in place; parameters stay what they were. `convert` settles what compiled
    code depends on (`configure`); `set_gemms` moves matmuls between formats at run time and compiles nothing again.
    """

    gemms: Gemms = Gemms.all("bf16")
    """Present formats. Written by `configure` and `set_gemms` alone, as `formats` says the same to the matmuls."""
    formats: Tensor
    """int64 [3] on the host; see `gemm_ops.RuntimeFormats`. No buffer: it does not move with the model."""
    counts: Tensor
    """int64 [3, known] on the host: what has run."""
    known: str
    """The formats that these two count in, as text."""
    keep_value: bool = False
    """Backward keeps the input itself, not its column-wise codes: the weight's gradient may have any format."""
    row_copy: bool = True
    """The input is quantised row-wise ahead of the forward matmul; else there, should it need that."""
    operand_formats: Operands = operands_of(Gemms.all("bf16"))
    """Format of all operands but gradients, which differ between matmuls. Set by `configure`."""
    power_of_two: bool = True
    """Kind of scale, where scales are FP32."""
    strict: bool = False
    """`set_gemms` refuses a format that this machine only emulates."""
    kernels: Kernels | None = None
    share: InputShare | None = None
    """Where layers side by side find each other's copies of the input. Set by `convert`."""
    weight_queue: WeightGradientQueue | None = None
    """Where weight gradients may wait. Set by `mixed.gradient_queues.attach`."""
    keeps_weight: bool = False
    """FP8 data of the weight are kept between passes, where that is worth it; see `keep_weight`."""
    weight_store: Tensor | None = None
    """These data, see `weight_store.new_store`; None: the weight is quantised in each pass. No buffer: whoever walks
    through the buffers of two models (an average of weights, DDP) finds the same ones in a copy, which has none."""

    def configure(self, gemms: Gemms, *, power_of_two: bool, keep: str = "qdata", strict: bool = False) -> None:
        """Set the formats of an FP8 linear layer, and the values that compiled code and producers of its input depend
        on.

        Args:
            gemms: formats of the matmuls.
            power_of_two: kind of scale.
            keep: "qdata" keeps the input in 8 bits where wgrad has them; "value" keeps the input itself.
            strict: see `strict`.
        """
        before, self.operand_formats = self.operand_formats, operands_of(gemms, power_of_two=power_of_two)
        self.power_of_two = power_of_two
        if before.weight != self.operand_formats.weight:
            self.keep_weight(self.keeps_weight)  # a store belongs to one format
        self.keep_value = keep == "value" or not gemms.wgrad.scaled
        self.row_copy = keep == "value" or gemms.fprop.scaled
        self.strict = strict
        switch = new_switch(gemms, power_of_two=power_of_two)
        if "formats" in vars(self):
            switch = switch.after(self.switch)
        self.known, self.formats, self.counts = switch.known, switch.formats, switch.counts
        self._write(gemms)

    def set_gemms(self, gemms: Gemms, *, power_of_two: bool | None = None) -> None:
        """Set the formats of an FP8 linear layer's matmuls, from their next call on. Compiled code stays valid.

        Args:
            gemms: formats of the matmuls.
            power_of_two: kind of scale; None, or the same as before: it is settled at conversion.

        Raises:
            ConfigError: the weight's gradient cannot leave 8 bits, because backward keeps 8-bit codes; another kind
                of scale; or a format that neither a recipe names nor `configure` was given.
            HardwareError: the policy is strict, and this machine only emulates the format.
        """
        # Each check is of what conversion has settled: what backward keeps, the kind of scale, the neighbours'
        # copies.
        if not self.keep_value and not gemms.wgrad.scaled:
            raise ConfigError(
                "Weight gradient of this layer must stay in FP8 during a run",
                got=f"wgrad {gemms.wgrad}; backward keeps the input as 8-bit codes",
                need=f"wgrad one of {', '.join(SCALED_FORMATS)}",
                try_='Policy(..., keep="value") at conversion, which keeps the input itself (2 bytes per element)',
                where="precision",
            )
        powers = self.power_of_two if power_of_two is None else power_of_two
        wanted = operands_of(gemms, power_of_two=self.power_of_two)
        copies = (self.operand_formats.input, self.operand_formats.weight)
        known = {each.name for each in of_text(self.known)}
        if (
            powers != self.power_of_two
            or not known.issuperset(gemms.names)
            or (gemms.any_scaled and (wanted.input, wanted.weight) != copies)
        ):
            kind = "inputs in {}, weights in {}".format(*copies)
            raise ConfigError(
                "Scale kind cannot change after conversion",
                got=f"{gemms}, power_of_two {powers}",
                need=f"{kind}, power_of_two {self.power_of_two}",
                try_="tilewright.set_mode(model, policy), which prepares the layers' neighbours too",
                where="precision",
            )
        # Strict runs refuse a format that would be emulated here.
        if self.strict and self.kernels is not None:
            _check_not_emulated(gemms, self.kernels.machine)
        self._write(gemms)

    def _write(self, gemms: Gemms) -> None:
        self.gemms = gemms
        self.formats.copy_(_indices(gemms, self.known))

    @property
    def switch(self) -> RuntimeFormats:
        """The switch that the matmuls of an FP8 linear layer read: formats, kernels and counters."""
        return RuntimeFormats(self.known, self.formats, self.counts)

    def executed(self) -> dict[str, dict[str, int]]:
        """Count the calls of an FP8 linear layer's matmuls: matmul -> format -> calls since `reset_executed`, for
        formats that ran."""
        return RuntimeFormats(self.known, self.formats, self.counts).executed()

    def note_executed(self, *names: str) -> None:
        """Note executed matmuls of an FP8 linear layer, which ran elsewhere (see `experts`) in their present
        formats."""
        for name in names:
            gemm = GEMM_NAMES.index(name)
            self.counts[gemm, self.formats[gemm]] += 1

    def reset_executed(self) -> None:
        """Reset the executed calls of an FP8 linear layer: count from zero."""
        self.counts.zero_()

    def keep_weight(self, keep: bool) -> None:
        """Keep FP8 data of a linear layer's weight from one pass to the next, 1 byte per element, or forget them.

        They are checked against the weight in each use (`weight_store`). A copy of the layer starts without.
        """
        self.keeps_weight = keep
        self.weight_store = new_store(self.weight, self.operand_formats.weight) if keep else None

    def __getstate__(self) -> dict[str, Any]:
        """State of an FP8 linear layer for copies and pickles, which are other models and quantise their weights in
        each pass."""
        return {**vars(self), "keeps_weight": False, "weight_store": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        super()._apply(fn, recurse)
        if self.keeps_weight:
            self.keep_weight(True)  # the weight may be elsewhere now
        return self

    def forward(self, x: Tensor | WithCopies) -> Tensor:
        if isinstance(x, WithCopies):
            return self._no_autocast(self._run, x.value, InputCopies(x.row, x.column, x.arrive))
        return self._no_autocast(self._run, x, None)

    def _run(self, x: Tensor, copies: InputCopies | None) -> Tensor:
        kernels = self._kernels()
        x_NK = x.reshape(-1, x.shape[-1])
        # Inside of a torch.func transform only the operators may read values: they quantise the input, which is kept.
        transformed = in_func_transform()
        keep_value = self.keep_value or transformed
        column = not keep_value and self.weight.requires_grad and torch.is_grad_enabled()
        form = self.operand_formats.input

        def make() -> InputCopies:
            return InputCopies(*quantize_copies(x_NK.detach(), form, kernels, row=self.row_copy, column=column))

        if transformed:
            copies = InputCopies(None, None)
        elif copies is None:
            key = (form, self.row_copy, column)
            copies = make() if self.share is None else self.share.copies_of(x, key, make)
        fixed = StaticConfig(keep_value, kernels.spec, self.output_dtype)
        out_NM = matmuls(x_NK, self.weight, self.bias, copies, self.weight_store, self.switch, fixed, queue_now(self))
        return out_NM.view(*x.shape[:-1], out_NM.shape[-1])

    def _kernels(self) -> Kernels:
        if self.kernels is None:
            raise AssertionError("convert gives each Float8Linear its kernels")
        return self.kernels

    def quantized_weight(self, weight_MK: Tensor | None = None, *, transposed: bool = False) -> TiledTensor:
        """The quantised weight of an FP8 linear layer (or another in its place, as a backward has saved it) as the
        GEMMs read it, see `weight_operand`.

        Where the layer keeps FP8 data, these, checked: the next call may write to them.
        """
        weight_MK, form = (self.weight if weight_MK is None else weight_MK).detach(), self.operand_formats.weight
        return weight_operand(self.weight_store, weight_MK, self._kernels(), form, transposed=transposed)

    def extra_repr(self) -> str:
        """Describe an FP8 linear layer for print: nn.Linear's own text and the formats."""
        return f"{nn.Linear.extra_repr(self)}, gemms={self.gemms}"


def float8_layers(model: nn.Module) -> dict[str, Float8Linear]:
    """FP8 linear layers of a model, whose matmuls have formats of their own, by name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def new_switch(gemms: Gemms, *, power_of_two: bool = True) -> RuntimeFormats:
    """Make the switch of an FP8 linear layer: formats as given and counts of zero. They are ordinary tensors on the
    host, whatever context they are made in."""
    known = _known(gemms.formats, power_of_two)
    with torch.inference_mode(False):
        formats = _indices(gemms, known)
        counts = torch.zeros(len(GEMM_NAMES), len(of_text(known)), dtype=torch.int64, device="cpu")
        return RuntimeFormats(known, formats, counts)


@functools.lru_cache(maxsize=256)
def _known(formats: tuple[GemmFormat, ...], power_of_two: bool) -> str:
    """The formats of an FP8 linear layer in the order of the counts: those that recipes name and these. Of one name,
    the given format."""
    every = (each.relaxed(power_of_two=power_of_two) for each in (*FORMATS, *formats) if each in FORMATS or each.scaled)
    return to_text(tuple({each.name: each for each in every}.values()))


def _indices(gemms: Gemms, known: str) -> Tensor:
    names = [each.name for each in of_text(known)]
    return torch.tensor([names.index(name) for name in gemms.names], dtype=torch.int64, device="cpu")


def _check_not_emulated(gemms: Gemms, machine: Machine) -> None:
    lost = [(each.name, reason) for each in gemms.formats if (reason := why_emulated(each, machine))]
    if lost:
        raise HardwareError(
            f"Matmul in {lost[0][0]} would be emulated, and precision.strict is set",
            got=lost[0][1],
            need="a machine or a format in which it runs as it says",
            try_="precision.strict = false, or another format",
            where="precision",
        )
