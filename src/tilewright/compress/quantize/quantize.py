"""A trained model to integers: `quantize(model, QuantSpec(...), batches) -> QuantizedModel`.

Layer by layer: what a layer's linear layers read is measured with all layers before already rounded. Works for our
decoder and for Hugging Face models, by structure. Linear layers are quantised; embedding and head as the spec says;
routers and whatever multiplies in a way of its own (stacks of experts in one parameter) stay, listed in `left`.

The head's input goes past its forward (loss and head are one operation), so the head is rounded to nearest, and its
input is not rounded in `QuantizedModel.model`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compress.quantize.awq import best_scale, fold
from tilewright.compress.quantize.calibrate import Batch, InputStats, observe, run_in_turn
from tilewright.compress.quantize.gptq import gptq
from tilewright.compress.quantize.least_error import round_to_least_error
from tilewright.compress.quantize.spec import QuantSpec, int_format
from tilewright.core.errors import ConfigError, NumericsError, Problem
from tilewright.formats.integer import IntegerTensor, IntSpec, quantize_integer, scale_of_range
from tilewright.formats.quant_error import sqnr_db
from tilewright.formats.scaling import Tile
from tilewright.models.base.output_layers import find_heads
from tilewright.models.base.routers import find_routers
from tilewright.precision.quantizers.integers import IntegerQuantizer

FOLD_TOLERANCE = 1e-6
"""Relative change of the loss that folding powers of two into a norm may make: they change no rounding of FP32."""


@dataclass(frozen=True)
class WeightReport:
    """Report on one quantised weight: format, method, signal to noise of its values in dB, bytes before and after."""

    name: str
    format: str
    method: str
    sqnr_db: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizedModel:
    """The result, which exporters read.

    Args:
        model: a copy that computes with the rounded values in its own dtype: for measuring what was lost. Weights that
            were scaled (AWQ) have the norms to match, so parameters that are not in `weights` are read from here.
        spec: what was asked for.
        weights: by the parameter's name; a tied embedding and head are one, under the embedding's name.
        activations: static INT8 scale and zero point of each linear layer's input, by the layer's name.
        report: a row per weight.
        left: reason by name of the parameter, for matrices that stay as they were.
        notes: what could not be done as asked.
    """

    model: Any
    spec: QuantSpec
    weights: dict[str, IntegerTensor]
    activations: dict[str, tuple[float, int]]
    report: list[WeightReport]
    left: dict[str, str]
    notes: list[str]

    @property
    def nbytes(self) -> int:
        """Sum the bytes of a quantised model's weights: quantised ones packed, the others as they are, tied ones
        once."""
        names = {name: parameter for name, parameter in self.model.named_parameters()}
        rest = sum(parameter.nbytes for name, parameter in names.items() if name not in self.weights)
        return rest + sum(weight.nbytes for weight in self.weights.values())


@torch.no_grad()
def quantize(model: Any, spec: QuantSpec, batches: Sequence[Batch] = ()) -> QuantizedModel:
    """Quantise a copy of a trained model.

    Args:
        model: `models.base.protocols.Model`, plain FP32 on a CPU (as `reopen` gives it).
        spec: formats and method.
        batches: calibration text, of the kind that the model was trained on; for gptq, awq and static activations.

    Raises:
        ConfigError: batches are needed and there are none; tied weights with two widths.
        NumericsError: weights or activations that are not finite.
    """
    if spec.needs_batches and not batches:
        raise ConfigError(
            f"Quantisation by {spec.method} with {spec.activations} activations needs calibration text",
            got="no batches",
            need="some batches of the run's own data",
            try_='method = "rtn", activations = "dynamic"',
            where="batches",
        )
    work = copy.deepcopy(model)
    _check_finite(work)
    result = QuantizedModel(work, spec, {}, {}, [], {}, [])
    outer = _outer(result)
    names = {module: name for name, module in work.named_modules()}
    skipped = {*outer.values(), *find_routers(work), *find_heads(work)}
    stages = [*work.layers] or [work]
    in_turn = spec.needs_batches and run_in_turn(work, stages, batches[0])
    done: set[nn.Module] = set()
    # The model itself last: linear layers outside of its layers.
    for stage, following in zip([*stages, work], [*stages[1:], None, None], strict=True):
        here = [part for part in stage.modules() if isinstance(part, nn.Linear) and part not in skipped | done]
        done |= set(here)
        if here:
            _stage(result, {names[layer]: layer for layer in here}, batches, following if in_turn else None)
    for name, module in outer.items():
        bits = spec.head_bits if isinstance(module, nn.Linear) else spec.embedding_bits
        if bits:
            tile = Tile(1, 0) if bits == 8 else spec.tile
            form = int_format(bits)
            _keep(result, f"{name}.weight", module.weight, quantize_integer(module.weight, form, tile), "rtn")
        else:
            result.left[f"{name}.weight"] = "the spec leaves embedding or head as they are"
    if spec.activations != "none":
        _round_inputs(result, [names[layer] for layer in work.modules() if layer in done])
    seen = {*result.weights, *result.left}
    rest = {name: p for name, p in work.named_parameters() if p.ndim > 1 and name not in seen}
    result.left.update(dict.fromkeys(rest, "no plain linear layer: a router, convolution or weight of its own kind"))
    return result


def _stage(
    result: QuantizedModel, layers: dict[str, nn.Linear], batches: Sequence[Batch], stop_before: nn.Module | None
) -> None:
    spec, stats = result.spec, {}
    if spec.needs_batches:
        stats = observe(result.model, layers, batches, stop_before=stop_before)
    scaled = _scale_channels(result, layers, stats, batches[0]) if spec.method == "awq" else set()
    for name, layer in layers.items():
        method = spec.method if spec.method != "awq" or name in scaled else "rtn"
        if method == "gptq" and stats[name].num_tokens:
            kinds = {"half_scales": spec.half_scales, "negative_scales": spec.negative_scales}
            hessian_KK = stats[name].hessian_KK
            found = gptq(layer.weight, hessian_KK, spec.format, spec.tile, symmetric=spec.symmetric, **kinds)
        else:
            method = "rtn" if method == "gptq" else method
            found = round_weight(layer.weight, spec)
        if spec.activations == "static":
            result.activations[name] = _static_scale(stats[name])
        _keep(result, f"{name}.weight", layer.weight, found, method)


def round_weight(weight_NK: Tensor, spec: QuantSpec) -> IntegerTensor:
    """Quantise a linear layer's weight by the spec's rule: by its range, or with scales of least error."""
    if spec.half_scales:
        return round_to_least_error(weight_NK, spec.format, spec.tile, half=True, negative=spec.negative_scales)
    return quantize_integer(weight_NK, spec.format, spec.tile, symmetric=spec.symmetric)


def _scale_channels(
    result: QuantizedModel, layers: Mapping[str, nn.Linear], stats: Mapping[str, InputStats], batch: Batch
) -> set[str]:
    """Scale channels by AWQ before layers are quantised, folded into the norms that they read; returns the names of the
    scaled layers."""
    spec, model, scaled = result.spec, result.model, set()
    readers: dict[nn.Module, list[str]] = {}
    for name in layers:
        if (norm := stats[name].norm) is not None:
            readers.setdefault(norm, []).append(name)
    for norm, names in readers.items():
        first, read = stats[names[0]], [layers[name] for name in names]
        if not _is_read_by(norm, read, model, batch):
            result.notes.append(f"{', '.join(names)}: not scaled, the norm before is read by something else too")
            continue
        weights = [layer.weight for layer in read]
        scale = best_scale(weights, first.mean_K, first.hessian_KK, lambda weight: round_weight(weight, spec))
        fold(norm, read, scale)
        scaled |= set(names)
    return scaled


def _is_read_by(norm: nn.Module, layers: Sequence[nn.Linear], model: Any, batch: Batch) -> bool:
    """True if these layers alone read the norm, so that AWQ may move factors from the norm to them. Factors of 4 and
    1/4 in turn show any other reader; those of AWQ may be too near to 1 to change a loss."""
    parameters = [*norm.parameters(), *(layer.weight for layer in layers)]
    kept = [parameter.clone() for parameter in parameters]
    before = float(model.loss(batch).loss_sum)
    fold(norm, layers, 4.0 ** torch.tensor([1.0, -1.0]).repeat(layers[0].in_features)[: layers[0].in_features])
    after = float(model.loss(batch).loss_sum)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    return abs(after - before) <= FOLD_TOLERANCE * abs(before)


def _keep(result: QuantizedModel, name: str, weight: Tensor, found: IntegerTensor, method: str) -> None:
    rounded = found.dequantize(weight.dtype).view(weight.shape)
    quality = sqnr_db(weight.detach(), rounded)
    form = f"{found.spec.name} {found.tile}" + ("" if found.zero_point is None else " affine")
    result.report.append(WeightReport(name, form, method, quality, weight.nbytes, found.nbytes))
    result.weights[name] = found
    weight.copy_(rounded)


def _outer(result: QuantizedModel) -> dict[str, Any]:
    """Embeddings and heads of a model to quantise, by name, each parameter once.

    Raises:
        ConfigError: tied, with two widths.
    """
    work, spec = result.model, result.spec
    embeddings = [module for module in work.modules() if isinstance(module, nn.Embedding)]
    tied = {embedding.weight for embedding in embeddings} & {head.weight for head in find_heads(work)}
    if tied and spec.embedding_bits != spec.head_bits:
        raise ConfigError(
            "Tied embedding and head cannot have two widths",
            got=f"embedding_bits = {spec.embedding_bits}, head_bits = {spec.head_bits}",
            need="one number: they are one parameter",
            try_=f"head_bits = {spec.embedding_bits}",
            where="head_bits",
        )
    names = {module: name for name, module in work.named_modules()}
    heads = [head for head in find_heads(work) if head.weight not in tied]
    return {names[module]: module for module in [*embeddings, *heads]}


def _static_scale(stats: InputStats) -> tuple[float, int]:
    low, high = torch.tensor([[stats.low]]), torch.tensor([[stats.high]])
    scale, point = scale_of_range(low, high, IntSpec(8), symmetric=False)
    return float(scale), 0 if point is None else int(point)


def _round_inputs(result: QuantizedModel, names: list[str]) -> None:
    """Hooks of a quantised model that round the inputs of linear layers to INT8."""
    for name in names:
        if result.spec.activations == "dynamic":
            quantizer = IntegerQuantizer(granularity="token")
        else:
            quantizer = IntegerQuantizer(*result.activations[name], symmetric=False)
        result.model.get_submodule(name).register_forward_pre_hook(_Rounder(quantizer))


@dataclass(frozen=True)
class _Rounder:
    quantizer: IntegerQuantizer

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.quantizer(args[0]), *args[1:])


def _check_finite(model: nn.Module) -> None:
    problems = list(_not_finite(model))
    if problems:
        raise NumericsError.from_problems(problems)


def _not_finite(model: nn.Module) -> Iterator[Problem]:
    for name, parameter in model.named_parameters():
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            yield Problem(
                "Model with weights that are not finite cannot be quantised",
                f"{bad} of {parameter.numel()} values infinite or NaN",
                "finite weights",
                "an earlier checkpoint of the run",
                name,
            )


def total_bytes(model: nn.Module) -> int:
    """Bytes of the parameters of a model, as before it is quantised, tied ones once."""
    tensors: list[Tensor] = list(model.parameters())
    return sum(tensor.nbytes for tensor in tensors)
