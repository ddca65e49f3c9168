"""A model as the planner sees it: classes of equal layers, and what stands around them.

`plan.classes` finds shapes; everything in a joint plan is reckoned from one. Bytes are straight lines in the rows of a
micro-batch.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.core.config import Recipe
from tilewright.core.hardware import Machine
from tilewright.plan.fixed import Fixed
from tilewright.plan.operands import OperandBytes
from tilewright.plan.workload import Product


@dataclass(frozen=True)
class Line:
    """A quantity of `rows` rows: fixed + per_row * rows."""

    fixed: float = 0.0
    per_row: float = 0.0

    def __call__(self, rows: float) -> float:
        return self.fixed + self.per_row * rows

    def times(self, factor: float) -> "Line":
        """The same quantity so many times."""
        return Line(factor * self.fixed, factor * self.per_row)

    @classmethod
    def through(cls, one: float, two: float) -> "Line":
        """The line through the values at one and at two rows."""
        return cls(max(0.0, 2 * one - two), min(two - one, one))


@dataclass(frozen=True)
class Coding:
    """Bytes moved to make 8-bit operands of a layer's products and to decode them; see `operands.OperandBytes`."""

    forward: Line = Line()
    backward: Line = Line()
    step: float = 0.0

    @classmethod
    def of(cls, products: Sequence[Product], seq_len: int, machine: Machine) -> "Coding":
        """Of a layer with these products, for rows of `seq_len` tokens."""
        one, two = (OperandBytes.of(products, rows * seq_len, machine) for rows in (1, 2))
        return cls(Line.through(one.forward, two.forward), Line.through(one.backward, two.backward), one.step)


@dataclass(frozen=True)
class LayerClass:
    """Layers of one structure. Bytes are `Line`s in the rows of a micro-batch, FLOPs are of one row's forward pass."""

    name: str
    indices: tuple[int, ...]
    num_parameters: int
    active_parameters: float
    """Of them those that a token passes."""
    kept: Line
    """From forward to backward with everything kept, the input among it."""
    kept_selective: Line
    kept_products: Line
    kept_attention: Line
    """The same with results of products and attention kept, of products alone, and of attention alone."""
    input: Line
    """The layer's input: all that a recomputed layer keeps."""
    work: Line
    """What backward needs beyond `kept`, gradients of weights left out."""
    moved: Line
    """Read and written, forward and backward, by what is neither product nor attention."""
    fused: bool
    """Whether that is compiled into loops."""
    mlp_kept: Line
    mlp_work: Line
    mask: float
    """Bytes a row of what attention holds for all pairs of positions (a mask); in `kept` too."""
    products: tuple[Product, ...]
    """Linear layers and the formats of their products."""
    product_flops: float
    last_flops: float
    """Of them those of products at the end that a recomputed layer need not run again."""
    mlp_flops: float
    attention_flops: float
    """Pairs that a causal mask leaves."""
    largest_weight: int
    """Elements; what a product's copy of it takes is in `work` on a CPU, and so this is 0 there."""
    called_experts: int = 0
    """Experts that are called one by one, each a compiled piece where layers are compiled."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Of the products' FLOPs those of no linear layer (experts in one tensor), by the format that they run in."""
    operations: int = 0
    """Calls of operations, forward and backward, of layers that are not ours."""
    codes: float = 0.0
    """Bytes of the 8-bit codes of its weights, where these stay on the device."""
    coding: Coding = Coding()

    @property
    def count(self) -> int:
        """Layers of the class."""
        return len(self.indices)


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it."""

    family: str
    classes: tuple[LayerClass, ...]
    seq_len: int
    dim: int
    vocab_size: int
    embedding_parameters: int
    """Everything before the layers."""
    head_parameters: int
    """Everything behind them; 0 for a head that is tied to the embedding."""
    stored_bytes: float
    """Mean bytes of a parameter as stored."""
    stream_bytes: int
    product_bytes: int
    product_format: str
    logit_bytes: int
    compiled: bool
    loss_compiled: bool
    process_bytes: float
    """Of a process on a CPU, besides the model; the code for one way of treating each class of layers included."""
    kind_bytes: float = 0.0
    """That code, in the standard executor (`footprint.KIND_BYTES`)."""
    expert_rows: float = 1.0
    """Rows that an expert multiplies over rows that it was given (`roofline.expert_rows`)."""
    gaps: float = 0.0
    """Free pages between what layers keep, as a share of it (`footprint.Pages`)."""
    rebuilt: float = 1.0
    """Of what a layer makes again, what counts besides its work (there too)."""
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        layers = sum(found.count * found.num_parameters for found in self.classes)
        return layers + self.embedding_parameters + self.head_parameters

    @property
    def tied(self) -> bool:
        """Whether the head reads the embedding's matrix."""
        return self.head_parameters < self.vocab_size * self.dim

    @property
    def foreign(self) -> bool:
        """Whether its layers are not ours, and run operation by operation."""
        return any(found.operations for found in self.classes)

    @property
    def cast_share(self) -> float:
        """Share of the weights that is stored wider than products read it, and cast in each micro-batch."""
        if self.product_bytes == 4:
            return 0.0
        return max(0.0, self.stored_bytes - self.product_bytes) / (4 - self.product_bytes)

    @property
    def num_layers(self) -> int:
        """All layers."""
        return sum(found.count for found in self.classes)

    def resized(self, num_layers: int) -> "ModelShape":
        """The same shape with another number of layers, the most frequent class taking the difference."""
        if num_layers == self.num_layers:
            return self
        most = max(self.classes, key=lambda found: found.count)
        extra = num_layers - self.num_layers
        kept = sorted(most.indices)[: max(1, most.count + extra)]
        more = tuple(range(self.num_layers, self.num_layers + max(0, extra)))
        classes = tuple(replace(found, indices=(*kept, *more)) if found is most else found for found in self.classes)
        return replace(self, classes=classes)

    def split(self, fixed: Fixed) -> "ModelShape":
        """The same shape with a class of its own for layers of one structure that differ in what is fixed."""
        classes: list[LayerClass] = []
        for found in self.classes:
            parts: dict[Fixed, list[int]] = {}
            for index in found.indices:
                parts.setdefault(fixed.layers[index], []).append(index)
            for number, indices in enumerate(parts.values()):
                name = found.name if len(parts) == 1 else f"{found.name}, part {number + 1}"
                classes.append(replace(found, name=name, indices=tuple(indices)))
        return replace(self, classes=tuple(classes))

    def class_of(self, layer: int) -> LayerClass:
        """The class of a layer by its number."""
        return next(found for found in self.classes if layer in found.indices)


def ranges(indices: Sequence[int]) -> str:
    """Layer numbers as people write them.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def largest_weight(sizes: Iterable[int], machine: Machine) -> int:
    """Elements of the largest weight on a GPU."""
    return 0 if machine.device == "cpu" else max(sizes, default=0)


def rule_notes(recipe: Recipe) -> tuple[str, ...]:
    """What a plan by classes does not see of the recipe's precision rules."""
    single = [rule.match for rule in recipe.precision.rules if re.search(r"layers?\.\d", rule.match)]
    if not single:
        return ()
    return (f"precision rules of single layers count for the first of their class: {', '.join(single)}",)
