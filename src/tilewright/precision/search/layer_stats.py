"""The layers whose matmuls can be switched, in units that are switched together, and what one pass shows of them.

Rows, who reads one input, and the underflow of each operand in FP8 tiles.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from tilewright.formats.quant_error import measure as quantization_error
from tilewright.formats.tiled import OperandFormat, WithCopies
from tilewright.precision.float8.linear import Float8Linear, float8_layers
from tilewright.precision.policy.gemm_formats import TILES


@dataclass(frozen=True)
class SearchUnit:
    """Layers that the search switches together: one layer, or the like layers of all experts of a block.

    Args:
        name: the layer's name, with "*" for the number of an expert.
        layers: names of the layers.
        in_features: K of each.
        out_features: M of each.
        tokens: rows that all of them together multiply in one batch.
        reads: units with the same number here read one input, which is quantised once for them.
        underflow: share of the non-zero elements that FP8 tiles turn into zero, for x, weight and dy.
    """

    name: str
    layers: tuple[str, ...]
    in_features: int
    out_features: int
    tokens: int = 0
    reads: int = 0
    underflow: Mapping[str, float] = field(default_factory=dict)


def group_layers(model: nn.Module) -> list[SearchUnit]:
    """Group layers into units of a model for the search, in its order."""
    units: dict[str, SearchUnit] = {}
    for name, layer in float8_layers(model).items():
        key = re.sub(r"(?<=experts\.)\d+(?=\.)", "*", name)
        same = units.get(key)
        layers = (*same.layers, name) if same else (name,)
        units[key] = SearchUnit(key, layers, layer.in_features, layer.out_features)
    return list(units.values())


class _Facts:
    """Watches one pass: rows, readers of the same input, and underflow of the operands, by layer."""

    def __init__(self, layers: Mapping[str, Float8Linear]) -> None:
        self.rows: dict[str, int] = {}
        self.reads: dict[str, int] = {}
        self.underflow: dict[str, dict[str, float]] = {}
        self._input: Tensor | None = None
        self._num_inputs = 0
        self._handles = []
        for name, layer in layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._before(name)))
            self._handles.append(layer.register_forward_hook(self._after(name)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._input = None

    def _before(self, name: str):
        def hook(layer: Float8Linear, args) -> None:
            x = args[0].value if isinstance(args[0], WithCopies) else args[0]
            if x is not self._input:
                self._input, self._num_inputs = x, self._num_inputs + 1
            self.rows[name] = x.numel() // x.shape[-1]
            self.reads[name] = self._num_inputs
            lost = self.underflow.setdefault(name, {})
            lost["x"] = _underflow(layer, x.detach(), TILES.input)
            lost["weight"] = _underflow(layer, layer.weight.detach(), TILES.weight)

        return hook

    def _after(self, name: str):
        def hook(layer: Float8Linear, args, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(lambda dy: self.underflow[name].update(dy=_underflow(layer, dy, TILES.gradient)))

        return hook


def _underflow(layer: Float8Linear, tensor: Tensor, form: OperandFormat) -> float:
    flat = tensor.reshape(-1, tensor.shape[-1])
    assert layer.kernels is not None, "convert gives each Float8Linear its kernels"
    tiled = layer.kernels.quantize(flat, form.relaxed(power_of_two=layer.power_of_two))
    return quantization_error(flat, tiled).underflow


def facts(
    layers: Mapping[str, Float8Linear], units: Sequence[SearchUnit], run: Callable[[], object]
) -> list[SearchUnit]:
    """Observe the layers of the units in one pass. A layer that the pass does not reach has no rows.

    Args:
        layers: by name.
        units: of these layers.
        run: makes a forward and backward pass.
    """
    watch = _Facts(layers)
    try:
        run()
    finally:
        watch.close()
    found = []
    for unit in units:
        seen = [name for name in unit.layers if name in watch.rows]
        lost = {
            operand: sum(values) / len(values)
            for operand in ("x", "weight", "dy")
            if (values := [watch.underflow[name][operand] for name in seen if operand in watch.underflow[name]])
        }
        tokens, reads = sum(watch.rows[name] for name in seen), watch.reads[seen[0]] if seen else 0
        found.append(SearchUnit(unit.name, unit.layers, unit.in_features, unit.out_features, tokens, reads, lost))
    return found
