"""A model as the planner sees it: classes of equal layers, and what is around them.

`planner.model.layer_classes` finds shapes; everything in a plan is computed from one. Bytes are straight lines in the
rows of a micro-batch.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import UnknownFitError
from tilewright.core.hardware import Machine
from tilewright.planner.model.constraints import Constraints
from tilewright.planner.model.gemms import LinearGemm
from tilewright.planner.model.operand_bytes import OperandBytes
from tilewright.planner.model.part_weights import Weights
from tilewright.planner.trace.byte_counter import GemmKind
from tilewright.planner.trace.routed_rows import RoutedRows


@dataclass(frozen=True)
class Line:
    """A quantity of `rows` rows: fixed + per_row * rows, or that of `other` where it is more."""

    fixed: float = 0.0
    per_row: float = 0.0
    other: "Line | None" = None

    def __call__(self, rows: float) -> float:
        mine = self.fixed + self.per_row * rows
        return mine if self.other is None else max(mine, self.other(rows))

    def __add__(self, more: "Line") -> "Line":
        return Line(self.fixed + more.fixed, self.per_row + more.per_row)

    def times(self, factor: float) -> "Line":
        """A quantity of a model's shape per row, multiplied."""
        return Line(factor * self.fixed, factor * self.per_row)

    def covering(self, other: "Line") -> "Line":
        """The larger of two quantities of a model's shape at any number of rows."""
        return replace(self, other=other)

    @classmethod
    def through(cls, one: float, two: float) -> "Line":
        """A quantity of a model's shape as the line through its values at one and at two rows."""
        return cls(max(0.0, 2 * one - two), min(two - one, one))


@dataclass(frozen=True)
class Coding:
    """Bytes moved to make 8-bit operands of a layer's matmuls and to decode them; see `operand_bytes.OperandBytes`."""

    forward: Line = Line()
    backward: Line = Line()
    step: float = 0.0

    @classmethod
    def of(cls, matmuls: Sequence[LinearGemm], seq_len: int, machine: Machine, kept: bool) -> "Coding":
        """Bytes of the codes of a layer with these matmuls, for rows of `seq_len` tokens. `kept`: codes of weights stay
        between steps."""
        one, two = (OperandBytes.of(matmuls, rows * seq_len, machine, kept) for rows in (1, 2))
        return cls(Line.through(one.forward, two.forward), Line.through(one.backward, two.backward), one.step)


@dataclass(frozen=True)
class LayerClass:
    """Layers of one structure, or what is around the layers. Bytes are `Line`s in the rows of a micro-batch, FLOPs
    are of one row's forward pass."""

    name: str
    indices: tuple[int, ...]
    weights: Weights
    """Of one layer."""
    active_parameters: float
    """Of them those that a token passes."""
    kept: Line = Line()
    """From forward to backward with everything kept, the input among it."""
    kept_selective: Line = Line()
    kept_matmuls: Line = Line()
    kept_attention: Line = Line()
    """The same with results of matmuls and attention kept, of matmuls alone, and of attention alone."""
    input: Line = Line()
    """The layer's input: all that a recomputed layer keeps."""
    routes: bool = False
    """Whether a router reads the input, which a layer that is recomputed then keeps as it is."""
    routed: RoutedRows = field(default_factory=RoutedRows)
    """What ranks exchange where experts are spread over them."""
    work: Line = Line()
    """What backward needs beyond `kept`, gradients of weights left out."""
    moved: Line = Line()
    """Read and written, forward and backward, by what is neither matmul nor attention."""
    fused: bool = False
    """Whether that is compiled into loops."""
    mlp_kept: Line = Line()
    mlp_work: Line = Line()
    mask: float = 0.0
    """Bytes per row of what attention holds for all pairs of positions (a mask); in `kept` too."""
    matmuls: tuple[LinearGemm, ...] = ()
    """Linear layers and the formats of their matmuls."""
    matmul_flops: float = 0.0
    last_flops: float = 0.0
    """Of them those of matmuls at the end that a recomputed layer need not run again."""
    mlp_flops: float = 0.0
    attention_flops: float = 0.0
    """Pairs that a causal mask leaves, where there is one."""
    largest_weight: int = 0
    """Elements; what a matmul's copy of it takes is in `work` on a CPU, and so this is 0 there."""
    cast: int = 0
    """Weights that each micro-batch casts to 16 bits; 0 where `moved` has that already."""
    called_experts: int = 0
    """Experts that are called one by one, each a compiled piece where layers are compiled."""
    others: Mapping[GemmKind, tuple[int, float]] = field(default_factory=dict)
    """Calls and FLOPs of matmuls of no linear layer (experts in one tensor, convolutions)."""
    operations: int = 0
    """Calls of operations, forward and backward, of layers that are not ours."""
    buffers: float = 0.0
    """Bytes of 8-bit codes of its weights, where these stay on the device, and of a router's biases."""
    coding: Coding = Coding()

    @property
    def num_parameters(self) -> int:
        """Elements of the weights of one layer of a class of the model's shape."""
        return self.weights.count

    @property
    def count(self) -> int:
        """Number of layers of a class of the model's shape."""
        return len(self.indices)

    def covering(self, other: "LayerClass") -> "LayerClass":
        """This class of layers with the bytes of another precision mode where that takes more."""
        lines = {name: getattr(self, name).covering(getattr(other, name)) for name in _BYTES}
        return replace(self, **lines, mask=max(self.mask, other.mask), buffers=max(self.buffers, other.buffers))


def distinct(classes: Iterable[LayerClass]) -> tuple[LayerClass, ...]:
    """Name the layer classes of a model: those that would share a name are numbered.

    Example:
        >>> names = ("dense", "experts", "dense")
        >>> made = [LayerClass(name, (place,), Weights(), 0) for place, name in enumerate(names)]
        >>> [found.name for found in distinct(made)]
        ['dense-0', 'experts', 'dense-2']
    """
    made = tuple(classes)
    names = [found.name for found in made]
    return tuple(
        replace(found, name=f"{found.name}-{place}") if names.count(found.name) > 1 else found
        for place, found in enumerate(made)
    )


_BYTES = ("kept", "kept_selective", "kept_matmuls", "kept_attention", "input", "work", "mlp_kept", "mlp_work")


@dataclass(frozen=True)
class ModelShape:
    """A model as the planner sees it."""

    family: str
    classes: tuple[LayerClass, ...]
    """Empty for a model without a list of layers: all of it is `rest`."""
    rest: LayerClass
    """What is kept, needed and computed around the layers, without weights; the matmuls and the loss of a `plain_head`
    are formulas (`phases.FixedBytes`)."""
    embedding: Weights
    """Everything before the layers."""
    head: Weights
    """Everything behind them; nothing for a head that is tied to the embedding."""
    tied: bool
    """Whether the head reads the embedding's matrix."""
    plain_head: bool
    """Whether logits are one matmul of hidden states, so that the loss runs in chunks (`ops.loss`)."""
    seq_len: int
    """Tokens of a row; 1 for an image."""
    dim: int
    vocab_size: int
    stream_bytes: int
    matmul_bytes: int
    matmul_format: str
    logit_bytes: int
    compiled: bool
    loss_compiled: bool
    process_bytes: float
    """Of a process on a CPU, in addition to the model; the code for one way of treating each class of layers
    included."""
    kind_bytes: float = 0.0
    """That code, in the standard executor (`overhead.KIND_BYTES`)."""
    expert_rows: float = 1.0
    """Rows that an expert multiplies over rows that it was given (`roofline.expert_rows`)."""
    keeps_freed: bool = False
    """Whether what was freed stays with the process (a CPU's allocator): what lives one after the other adds up."""
    gaps: float = 0.0
    """Free pages between what layers keep, as a share of it (`overhead.Pages`)."""
    spread: float = 0.0
    """The same share of gradients and of what the head needs: eager steps leave free pages between all that they make,
    and these stay with the process (`overhead.free_pages`)."""
    rebuilt: float = 1.0
    """Of what a layer makes again, what counts in addition to its work (there too)."""
    graph: Mapping[str, float] = field(default_factory=dict)
    """Bytes that are no tensors of a layer's graph, by what it keeps (`overhead.GRAPH_BYTES`); empty where they are in
    no memory of the device, or few."""
    backward: Line = Line()
    """Of a model without a list of layers: most bytes in backward of a first micro-batch, all gradients included."""
    direction_format: str = "bf16"
    """That Muon multiplies in (`ops.newton_schulz`)."""
    teacher: "TeacherShape | None" = None
    """That it learns from."""
    attention_share: float | None = None
    """Of the pairs of positions in full rows, how many the data's documents have; None: it has full rows, or is not
    known."""
    notes: tuple[str, ...] = ()
    unknown: str = ""
    """Why nothing but the weights is known; empty where all is."""

    @property
    def weights(self) -> Weights:
        """Weights of the whole model's shape."""
        return sum((found.weights.times(found.count) for found in self.classes), self.embedding + self.head)

    @property
    def num_parameters(self) -> int:
        """The number of all parameters of the model's shape."""
        return self.weights.count

    @property
    def foreign(self) -> bool:
        """True if the layers of the model's shape are not ours, and run operation by operation."""
        return any(found.operations for found in (*self.classes, self.rest))

    def known(self) -> "ModelShape":
        """The model's shape itself, of which all is known.

        Raises:
            UnknownFitError: it is not.
        """
        if not self.unknown:
            return self
        raise UnknownFitError(
            "Memory of this model cannot be predicted",
            got=f"{self.family}: {self.unknown}",
            need="a forward pass whose shapes do not depend on the values of tensors",
            try_='describe the model as a decoder of the same shape (model.kind = "decoder", model.dim, '
            "model.num_layers, model.num_experts, ...): its costs are known by formula",
            where="model.path",
        )

    def covering(self, other: "ModelShape") -> "ModelShape":
        """This model's shape with the bytes of another precision mode where that takes more; seconds stay."""
        return replace(
            self,
            classes=tuple(mine.covering(theirs) for mine, theirs in zip(self.classes, other.classes, strict=True)),
            rest=self.rest.covering(other.rest),
            stream_bytes=max(self.stream_bytes, other.stream_bytes),
            logit_bytes=max(self.logit_bytes, other.logit_bytes),
            gaps=max(self.gaps, other.gaps),
            spread=max(self.spread, other.spread),
            rebuilt=max(self.rebuilt, other.rebuilt),
            backward=self.backward.covering(other.backward),
            unknown=self.unknown or other.unknown,
        )

    @property
    def num_layers(self) -> int:
        """The number of all layers of the model's shape."""
        return sum(found.count for found in self.classes)

    @property
    def layer_costs(self) -> tuple[int, ...]:
        """FLOPs of a row in each layer, forward, by which layers are divided among stages. Linear attention counts by
        its time; all are 0 where nothing is known."""
        share = 1.0 if self.attention_share is None else self.attention_share
        found = {
            layer: round(one.matmul_flops + share * one.attention_flops)
            for one in self.classes
            for layer in one.indices
        }
        return tuple(cost for _, cost in sorted(found.items()))

    @property
    def end_costs(self) -> tuple[int, int]:
        """FLOPs of a row, forward, in the embedding, which multiplies nothing, and in the head."""
        head = 2.0 * self.seq_len * self.dim * self.vocab_size if self.plain_head else 0.0
        return 0, round(self.rest.matmul_flops + head)

    def resized(self, num_layers: int) -> "ModelShape":
        """This model's shape with another number of layers, the most frequent class taking the difference."""
        if num_layers == self.num_layers:
            return self
        most = max(self.classes, key=lambda found: found.count)
        extra = num_layers - self.num_layers
        kept = sorted(most.indices)[: max(1, most.count + extra)]
        more = tuple(range(self.num_layers, self.num_layers + max(0, extra)))
        classes = tuple(replace(found, indices=(*kept, *more)) if found is most else found for found in self.classes)
        return replace(self, classes=classes)

    def holding(self, layers: Collection[int]) -> "ModelShape":
        """This model's shape with some of its layers, numbered from 0 in their order."""
        places = {layer: place for place, layer in enumerate(sorted(layers))}
        held = [
            replace(found, indices=tuple(places[index] for index in sorted(found.indices) if index in places))
            for found in self.classes
        ]
        return replace(self, classes=tuple(found for found in held if found.indices))

    def split(self, fixed: Constraints) -> "ModelShape":
        """This model's shape with a separate class for layers of one structure that differ in what is fixed."""
        classes: list[LayerClass] = []
        for found in self.classes:
            parts: dict[Constraints, list[int]] = {}
            for index in found.indices:
                parts.setdefault(fixed.layers[index], []).append(index)
            for number, indices in enumerate(parts.values()):
                name = found.name if len(parts) == 1 else f"{found.name}, part {number + 1}"
                classes.append(replace(found, name=name, indices=tuple(indices)))
        return replace(self, classes=tuple(classes))

    def class_of(self, layer: int) -> LayerClass:
        """The class of one layer of the model's shape, by its number."""
        return next(found for found in self.classes if layer in found.indices)


@dataclass(frozen=True)
class TeacherShape:
    """The teacher of `[distill]`, which runs forward on each micro-batch before the student does."""

    model: ModelShape
    """Eager, and without what precision modes of 8 bits do."""
    weights: float
    """Bytes on the device of each process: whole and in FP32, with buffers."""
    hidden: float
    """Bytes that it hands on, per token of a step."""
    divergence: str = "forward_kl"
    """What its student's loss compares distributions by."""
    temperature: float = 1.0
    top_k: int = 0
    """Tokens of each position that it hands on, with `distill.cache`; 0: its hidden values."""
    runs: bool = True
    """Whether it is on the device and runs at all: not where each row of the run is in the cache."""
    learned: float = 0.0
    """Bytes of projections to its hidden values, with gradients and states."""
    apart: float = 0.0
    """Bytes that losses of hidden values keep for backward, per token of a micro-batch."""


def largest_weight(sizes: Iterable[int], machine: Machine) -> int:
    """Elements of the largest weight of a model's shape on a GPU."""
    return 0 if machine.device == "cpu" else max(sizes, default=0)


def rule_notes(recipe: Recipe) -> tuple[str, ...]:
    """Notes on the recipe's precision rules that a plan by the model's layer classes does not see."""
    single = [rule.match for rule in recipe.precision.rules if re.search(r"layers?\.\d", rule.match)]
    if not single:
        return ()
    return (f"precision rules of single layers count for the first of their class: {', '.join(single)}",)
