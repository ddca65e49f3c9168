"""Weights of a part of a model: what they are stored in, what trains, what a rank holds of them where they are sharded;
and those that Muon updates.

Found on the meta device. A sharded tensor is cut along its first dim into parts of equal rows (`parallel.shard`); the
last ranks have fewer rows, or none, where they do not come out even. Of experts that are spread each rank has some, in
parts over the ranks that have the same ones; redundant ones besides.

Legend: E matrices of a stack  R rows  C columns  S the smaller of R and C, L the larger.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from tilewright.formats.quadratic_map import scale_shape
from tilewright.ops.base.tensor_parts import rows_of
from tilewright.planner.model.gemms import BYTES
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear

ITERATIONS = 5
_WIDE = 4
"""Bytes of FP32."""
_NARROW = 2
_ALONE = 1, Fraction(0), 1, 1


@dataclass(frozen=True)
class Matrices:
    """The trained matrices of a part of a model: how many there are of each shape, [R, C] or [E, R, C]."""

    shapes: Mapping[tuple[int, ...], int] = field(default_factory=dict)

    def __add__(self, other: "Matrices") -> "Matrices":
        keys = {**self.shapes, **other.shapes}
        return Matrices({shape: self.shapes.get(shape, 0) + other.shapes.get(shape, 0) for shape in keys})

    def __rmul__(self, number: int) -> "Matrices":
        return Matrices({shape: number * count for shape, count in self.shapes.items()})

    @cached_property
    def elements(self) -> int:
        """Elements of all matrices among a part's weights."""
        return sum(count * prod(shape) for shape, count in self.shapes.items())

    @cached_property
    def blocks(self) -> int:
        """Scales of a momentum in 8 bits of a part's matrices."""
        return sum(count * prod(scale_shape(shape)) for shape, count in self.shapes.items())

    def newton_schulz_s(self, matmul_s: Callable[[float, float], float]) -> float:
        """Seconds of the Newton-Schulz iterations of one update of a part's matrices, of `matmul_s(width, FLOPs)` for
        one GEMM.

        Each iteration multiplies [S, L] by its transpose, [S, S] by itself, and [S, S] by [S, L].
        """
        total = 0.0
        for shape, count in self.shapes.items():
            (short, long), stacked = sorted(shape[-2:]), prod(shape[:-2])
            wide = matmul_s((short * long) ** 0.5, 2.0 * stacked * short**2 * long)
            total += count * ITERATIONS * (2 * wide + matmul_s(short, 2.0 * stacked * short**3))
        return total

    def update_bytes(self, moments: str, master: str, shards: int = 1, multiplied: int = _NARROW) -> float:
        """Most bytes that a Muon update of one of a part's matrices takes beyond weights, gradient and states
        (`optim.muon_update`).

        In turn: the next momentum in FP32 and in BF16; two matrices and two products [S, S], of `multiplied` bytes an
        element; the direction in BF16 and FP32. With all of it, what is to be stored where that is rounded.

        Of shards the same: a rank begins and ends its part of as many matrices as there are ranks, and runs
        Newton-Schulz on one whole one, which it has besides in BF16, sent and received (`optim.muon_shards`). Of a
        stack it holds whole matrices, some of them.
        """
        most = 0.0
        for shape in self.shapes:
            one = part_shape(shape, shards) if len(shape) > 2 else shape
            number, grams = prod(one), prod(one[:-2]) * min(one[-2:]) ** 2
            iteration = 2 * multiplied * (number + grams)
            iteration += 2 * _NARROW * number if shards > 1 and len(shape) == 2 else 0
            stored = {"fp32": 0, "bf16": 2, "8bit": 1}[moments] * number
            after = {"fp32": 0, "split24": 3, "stochastic": 2}[master] * number
            most = max(most, stored + max((_WIDE + _NARROW) * number, iteration, _WIDE * number + after))
        return most


def part_shape(shape: tuple[int, ...], shards: int, rank: int = 0) -> tuple[int, ...]:
    """Shape of the part of a weight that a rank has; the first rank's is the largest.

    Example:
        >>> [part_shape((5, 8), 4, rank) for rank in range(4)]
        [(2, 8), (2, 8), (1, 8), (0, 8)]
    """
    rows, *rest = shape or (1,)
    return (len(rows_of(rows, shards, rank)), *rest)


class TensorKind(NamedTuple):
    """The facts of a tensor that decide its bytes, its gradient's and its states'."""

    shape: tuple[int, ...]
    size: int
    """Bytes of an element."""
    scales: int
    """Bytes of scales that belong to it."""
    trained: bool
    is_parameter: bool
    """Else every rank holds it whole: codes of a frozen 8-bit layer."""
    hidden: bool
    """A matrix of a hidden layer, which Muon would update."""
    gathered: int
    """Bytes of an element where the parts of ranks are put together."""
    spread: int = 1
    """Ranks that each hold other ones of these (experts, `parallel.ep`); each is in parts over the others."""
    redundant: Fraction = Fraction(0)
    """How many of these a rank holds besides, copies of what others hold, as a share of all (`redundant_experts`)."""
    times: int = 1
    """How many times as many ranks share these as share the rest (experts where matrices are cut, `parallel.tp`)."""
    coded: bool = False
    """Ranks send its parts as codes of one byte, with a scale per 128x128 (`parallel.param_gather`)."""

    def on_rank(self, shards: int) -> tuple[int, int]:
        """The number of parts that a weight is in, and the number of ranks of which this one holds their share."""
        ranks = shards * self.times
        spread = self.spread if ranks % self.spread == 0 else 1
        return ranks // spread, spread

    def held(self, count: int, shards: int) -> int:
        """How many of `count` such weights this rank has, or parts of."""
        return count // self.on_rank(shards)[1] + self.copies(count, shards)

    def copies(self, count: int, shards: int) -> int:
        """The number of redundant weights among those that this rank has."""
        return int(count * self.redundant) if self.on_rank(shards)[1] > 1 else 0


@dataclass(frozen=True)
class Tensors:
    """How many tensors there are of each kind."""

    kinds: Mapping[TensorKind, int] = field(default_factory=dict)

    def __add__(self, other: "Tensors") -> "Tensors":
        keys = {**self.kinds, **other.kinds}
        return Tensors({kind: self.kinds.get(kind, 0) + other.kinds.get(kind, 0) for kind in keys})

    def __rmul__(self, number: int) -> "Tensors":
        return Tensors({kind: number * count for kind, count in self.kinds.items()})

    def gathered(self, shards: int, *, wide: bool = False) -> int:
        """Bytes of weights put together from the parts of all ranks, each part as long as the first; `wide`: as they
        are stored, else as layers read them."""
        return self._padded(shards, lambda kind: (kind.size if wide else kind.gathered) if kind.is_parameter else 0)

    def travels(self, shards: int) -> int:
        """Bytes of gathered weights as ranks send them to each other."""
        return self._padded(
            shards, lambda kind: (1 if kind.coded and shards > 1 else kind.gathered) if kind.is_parameter else 0
        )

    def gradients(self, shards: int) -> int:
        """Bytes of the FP32 gradients of weights put together from all ranks' parts."""
        return self._padded(shards, lambda kind: _WIDE if kind.trained else 0)

    def copied(self, shards: int) -> int:
        """Bytes of the FP32 gradients of weights that a rank sends to those that hold the same experts: two ranks hold
        each redundant one."""
        found = ((kind, kind.copies(count, shards)) for kind, count in self.kinds.items() if kind.trained)
        parts = ((part_shape(kind.shape, kind.on_rank(shards)[0]), count) for kind, count in found)
        return 2 * _WIDE * sum(prod(shape) * count for shape, count in parts)

    def cut(self, shards: int) -> "Tensors":
        """The weights that are cut over several ranks, which gather them; not experts that one rank alone has."""
        return Tensors({kind: count for kind, count in self.kinds.items() if kind.on_rank(shards)[0] > 1})

    def cast(self, shards: int) -> int:
        """Bytes of what backward keeps of weights that layers read in 16 bits, where these are cast and not gathered:
        of experts that one rank alone has."""
        alone = (
            (kind, kind.held(count, shards))
            for kind, count in self.kinds.items()
            if kind.spread > 1 and kind.on_rank(shards) == (1, kind.spread) and kind.gathered < kind.size
        )
        return sum(prod(kind.shape) * kind.gathered * count for kind, count in alone)

    def whole_gradients(self, shards: int) -> int:
        """Bytes of the FP32 gradients of the weights that a rank computes with, as backward makes them."""
        found = ((prod(kind.shape), kind.held(count, shards), kind.trained) for kind, count in self.kinds.items())
        return _WIDE * sum(number * count for number, count, trained in found if trained)

    def _padded(self, shards: int, size: Callable[[TensorKind], int]) -> int:
        total = 0
        for kind, count in self.kinds.items():
            parts, _ = kind.on_rank(shards)
            total += parts * prod(part_shape(kind.shape, parts)) * size(kind) * kind.held(count, shards)
        return total


@dataclass(frozen=True)
class Weights:
    """Parameters of a part of a model, in elements; `stored` in bytes."""

    count: int = 0
    """All, those of frozen 8-bit layers included."""
    trained: int = 0
    """Those that have gradients and optimizer states."""
    narrow: int = 0
    """Those that are stored in 16 bits."""
    narrow_trained: int = 0
    blocks: int = 0
    """Scales of one moment in 8 bits."""
    stored: float = 0.0
    matrices: Matrices = field(default_factory=Matrices)
    """Trained ones of hidden layers, which Muon would update."""
    tensors: Tensors = field(default_factory=Tensors)
    """All of these, one by one."""

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, number: int) -> "Weights":
        """Weights of `number` equal parts of a model."""
        return Weights(*(number * getattr(self, f.name) for f in fields(self)))

    def part(self, shards: int, rank: int = 0) -> "Weights":
        """The part of these weights that a rank holds; the first one holds most."""
        if shards == 1 and all(kind.times == 1 for kind in self.tensors.kinds):
            return self
        total = Weights()
        for kind, count in self.tensors.kinds.items():
            parts, spread = kind.on_rank(shards)
            shape = part_shape(kind.shape, parts, rank * kind.times // spread) if kind.is_parameter else kind.shape
            total += Weights.of_kind(kind._replace(shape=shape)).times(kind.held(count, shards))
        return total

    @classmethod
    def of_kind(cls, kind: TensorKind) -> "Weights":
        """The weights of one tensor of a kind."""
        number, narrow = prod(kind.shape), kind.size == 2 and kind.is_parameter
        return cls(
            count=number,
            trained=number * kind.trained,
            narrow=number * narrow,
            narrow_trained=number * (narrow and kind.trained),
            blocks=prod(scale_shape(kind.shape)) * kind.trained,
            stored=number * kind.size + kind.scales,
            matrices=Matrices({kind.shape: 1}) if kind.hidden else Matrices(),
            tensors=Tensors({kind: 1}),
        )

    @classmethod
    def of(
        cls,
        modules: Iterable[nn.Module],
        storage: Mapping[nn.Parameter, str],
        seen: set[int],
        matrices: Collection[Tensor] = (),
        narrow: Collection[nn.Module] = (),
        spread: Mapping[nn.Module, tuple[int, Fraction, int, int]] = MappingProxyType({}),
        coded: Collection[nn.Module] = (),
    ) -> "Weights":
        """The weights of some modules, a part of a model, each counted once.

        Args:
            modules: every level of the tree among them.
            storage: format by parameter, from `ConversionPlan.storage`; FP32 for all others.
            seen: identities of tensors that were counted already; grows.
            matrices: of the model's hidden layers.
            narrow: linear layers whose weight is gathered in 16 bits (`precision.assign.gather_dtype`).
            spread: of modules in experts how many ranks hold other ones, which share of all each holds besides, how
                many times as many share them, and how many are in one tensor.
            coded: linear layers whose weight ranks send as codes.
        """
        total = cls()
        for module in modules:
            for tensor, each in _tensors(module, storage):
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                scales = module.weight_scale_inv.nbytes if isinstance(module, FrozenFloat8Linear) and each == 1 else 0
                trained, parameter = tensor.requires_grad, isinstance(tensor, nn.Parameter)
                hidden = trained and tensor in matrices
                gathered = _NARROW if module in narrow and tensor is module.weight else each
                (*ranks, many), codes = spread.get(module, _ALONE), module in coded and tensor is module.weight
                shape = tuple(tensor.shape[1:] if many > 1 else tensor.shape)
                kind = TensorKind(shape, each, scales, trained, parameter, hidden, gathered, *ranks, codes)
                total += cls.of_kind(kind).times(many)
        return total


def _tensors(module: nn.Module, storage: Mapping[nn.Parameter, str]) -> Iterator[tuple[Tensor, int]]:
    """The weights of a module itself, and the bytes per element of each."""
    for parameter in module.parameters(recurse=False):
        yield parameter, BYTES.get(storage.get(parameter, "fp32"), _WIDE)
    if isinstance(module, FrozenFloat8Linear):
        yield module.weight, 1
