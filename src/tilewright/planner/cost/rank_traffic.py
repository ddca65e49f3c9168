"""Traffic between the ranks of a run in a step: bytes by collective, and the seconds of that.

    gather    all-gather of a sharded model's parameters, in each micro-batch: before forward, and of layers that are
              resharded once more before backward
    scatter   reduce-scatter of gradients, once a step, or in each micro-batch with `parallel.reduce_each`
    reduce    all-reduce of gradients over copies, once a step: of a rank's part, or of all where nothing is cut
    exchange  all-to-all of tokens' rows to the ranks that hold their experts, results back, and gradients of both ways

Bytes are of the whole tensor that a collective makes or takes (of an exchange: of what a rank has for all ranks, with
as many tokens for each expert), of gradients as `parallel.grad_sync` sends them, of parameters as
`parallel.param_gather` does (scales, 1/16,384 of a byte per weight, are not counted), of rows on their way to experts
as `parallel.dispatch` does. Nothing overlaps with computation: on a CPU both take the same cores. What is agreed on
between steps is a few bytes, and not counted.

Ranks with other parts of matrices (`parallel.tp`), by pass of a layer:

    slices of the stream    attention and MLP gather what they read, and are added up in slices (`sequence_parallel`);
                            backward the other way round. What reads codes alone gathers codes, one byte per element,
                            and the other copy of them for gradients of weights
    all of it on each       outputs of attention and MLP are added up forward, gradients of what they read backward
    computed again          what is read is gathered again, and attention's output added up again; the last one is not
                            needed (of shards, whose layers are computed again to their end, it is)
    ends                    the embedding's rows are added up, and the gradient of what the head reads; in slices these
                            are gathered once each way

Three numbers per token of the loss, and gradients of norms, are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import get_args

from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.parallel import WireName
from tilewright.models.decoder.activation_bytes import role
from tilewright.parallel.communicate.wire_messages import TILE, row_bytes
from tilewright.parallel.inside.tensor.matrix_cuts import cuts_vocabulary
from tilewright.planner.cost.operations import Operation
from tilewright.planner.cost.rank_share import FP32, Shards
from tilewright.planner.model.model_shape import LayerClass, ModelShape

WIRE_SHARE: dict[WireName, float] = {name: row_bytes(TILE, name) / (FP32 * TILE) for name in get_args(WireName)}
"""Bytes of a gradient that is sent, in those of FP32."""

_READERS = (
    ("q_proj", "q_a_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj", "shared_experts.gate_proj", "shared_experts.up_proj"),
)
"""The linear layers that read the input of attention, and of an MLP, by role."""
_CODE = 1 + FP32 / TILE
"""Bytes of a code with its scale."""


@dataclass(frozen=True)
class RankSpeed:
    """Bytes a second of the whole tensor that ranks gather, reduce into parts (`scatter`), reduce whole, exchange."""

    gather: float
    scatter: float
    reduce: float
    exchange: float


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that one rank exchanges with others in a step, by collective."""

    gather: float = 0.0
    scatter: float = 0.0
    reduce: float = 0.0
    exchange: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, shards: Shards, num_micro: int) -> "RankTraffic":
        """Traffic of a rank for of the parameters and gradients of a model that several ranks share.

        Args:
            shape: of the model.
            shards: who shares it.
            num_micro: micro-batches of a step.
        """
        copies = shards.ranks // shards.count
        part = shape.weights.part(shards.count)
        sent = WIRE_SHARE[shards.wire]
        reduced = sent * FP32 * part.trained if copies > 1 else 0.0
        if not shards.cut:
            return cls(reduce=reduced)
        rest = (shape.embedding + shape.head).tensors.cut(shards.count)
        of_layers = ((found.count, found.weights.tensors.cut(shards.count)) for found in shape.classes)
        layers = float(sum(count * tensors.travels(shards.count) for count, tensors in of_layers))
        passes = (2 if shards.reshard else 1) * layers + rest.travels(shards.count)
        times = num_micro if shards.reduce_each else 1
        scattered = sent * shape.weights.tensors.cut(shards.count).gradients(shards.count)
        copied = shape.weights.tensors.copied(shards.count) * shards.ep / max(1, shards.ep - 1)  # to others all of it
        return cls(num_micro * passes, times * scattered, reduced, copied)

    def plus(self, other: "RankTraffic") -> "RankTraffic":
        """This traffic of a rank plus another, in bytes."""
        return RankTraffic(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def times(self, number: float) -> "RankTraffic":
        """This traffic of a rank, multiplied."""
        return RankTraffic(*(number * getattr(self, one.name) for one in fields(self)))

    @property
    def total(self) -> float:
        """Bytes of all collectives of a rank's traffic in a step."""
        return sum(getattr(self, one.name) for one in fields(self))

    def sent(self, shards: Shards) -> dict[str, float]:
        """Bytes that one rank sends to others, by operation as a run counts it (`parallel.communicate.traffic`).

        Args:
            shards: of the run.

        Example:
            >>> RankTraffic(gather=8.0, scatter=4.0).sent(Shards(ranks=4, count=4, wire="bf16"))
            {'all_gather': 6.0, 'reduce_scatter': 3.0}
        """
        copies = shards.ranks // shards.count
        found = {
            "all_gather": self.gather * (shards.count - 1) / shards.count,
            "reduce_scatter": self.scatter * (shards.count - 1) / shards.count,
            "all_reduce": self.reduce * 2 * (copies - 1) / copies,
            "all_to_all": self.exchange * (shards.ep - 1) / shards.ep,
        }
        return {name: size for name, size in found.items() if size}

    def operations(self, speed: RankSpeed) -> Iterator[Operation]:
        """The exchanges of a rank's traffic that a step waits for, by collective."""
        for group in (one.name for one in fields(self)):
            size = getattr(self, group)
            yield Operation("communication", "communication", "ranks", size / getattr(speed, group), size, group)


def communication(
    shape: ModelShape, shards: Shards, num_micro: int, speed: RankSpeed | None, cut: RankTraffic
) -> tuple[Operation, ...]:
    """Traffic between ranks as operations of a step: none for one process, or if no speed is known.

    Args:
        shape: of the model.
        shards: who shares it.
        num_micro: micro-batches of a step.
        speed: between the ranks.
        cut: what ranks with other parts of layers exchange (`cost.cut_traffic`).
    """
    if speed is None or shards.processes == 1:
        return ()
    return tuple(RankTraffic.of(shape, shards, num_micro).plus(cut).operations(speed))


@dataclass(frozen=True)
class CutPasses:
    """Bytes of the whole tensors that ranks exchange which cut a layer, for one micro-batch."""

    forward: RankTraffic = RankTraffic()
    again: RankTraffic = RankTraffic()
    """Where the layer is computed again."""
    backward: RankTraffic = RankTraffic()

    def plus(self, other: "CutPasses") -> "CutPasses":
        """This traffic of cut layers plus another, in bytes."""
        return CutPasses(*(getattr(self, one.name).plus(getattr(other, one.name)) for one in fields(self)))


def routed_layer(found: LayerClass, recipe: Recipe, rows: int, ep: int) -> CutPasses:
    """Traffic of one layer whose experts are on several ranks, in bytes.

    Args:
        found: the layer.
        recipe: what rows of tokens travel as.
        rows: of a micro-batch.
        ep: ranks that hold other experts.
    """
    routed = found.routed
    if ep == 1 or not routed.values:
        return CutPasses()
    values = rows * routed.values
    there, back = RankTraffic(exchange=values * routed.read_bytes), RankTraffic(exchange=values * routed.made_bytes)
    sent = RankTraffic(exchange=values * FP32 * WIRE_SHARE["fp8"]) if recipe.parallel.dispatch == "fp8" else there
    return CutPasses(sent.plus(back), sent.plus(back), there.plus(back))


def cut_layer(found: LayerClass, shape: ModelShape, recipe: Recipe, rows: int, tp: int, shards: int) -> CutPasses:
    """Traffic of one layer whose matrices are cut over ranks, in bytes.

    Args:
        found: the layer.
        shape: of the model.
        recipe: whether the stream is in slices.
        rows: of a micro-batch.
        tp: ranks that hold other parts.
        shards: parts of what is left on a rank.
    """
    if tp == 1:
        return CutPasses()
    last = 0 if shards > 1 else 1  # sums that are not made again
    tokens, sliced = rows * shape.seq_len, _in_slices(recipe)
    whole = float(tokens * shape.dim)
    stream = whole * shape.matmul_bytes
    readers = [[one for one in found.matmuls if role(one.fqn) in names] for names in _READERS]
    if not sliced:
        sums = sum(map(bool, readers))
        routed = stream if found.routes else 0.0  # ranks send other tokens through experts, and gather what comes out
        again = RankTraffic(routed, 0.0, max(sums - last, 0) * stream)
        return CutPasses(RankTraffic(routed, 0.0, sums * stream), again, RankTraffic(routed, 0.0, sums * stream))
    aligned = (shape.seq_len % (tp * TILE) == 0, tokens // tp % TILE == 0)
    reads = codes = 0.0
    parts = 0
    for of_one, whole_tiles in zip(readers, aligned, strict=True):
        if not of_one:
            continue
        parts += 1
        coded = whole_tiles and all(one.gemms.fprop.scaled for one in of_one)
        reads += _CODE * whole if coded else stream
        codes += _CODE * whole if coded else 0.0
    again = RankTraffic(reads, max(parts - last, 0) * stream)
    return CutPasses(RankTraffic(reads, parts * stream), again, RankTraffic(parts * stream + codes, parts * stream))


def cut_ends(shape: ModelShape, recipe: Recipe, rows: int, tp: int, shards: int) -> CutPasses:
    """Traffic of the embedding and the head where ranks cut them, in bytes.

    Args:
        shape, recipe, rows, tp, shards: see `cut_layer`.
    """
    if tp == 1:
        return CutPasses()
    stream = float(rows * shape.seq_len * shape.dim * shape.matmul_bytes)
    gathered = stream if _in_slices(recipe) else 0.0
    summed = stream if cuts_vocabulary(shape.vocab_size, tp, shards) else 0.0
    one = RankTraffic(gathered, 0.0, summed)
    return CutPasses(one, RankTraffic(), one)


def _in_slices(recipe: Recipe) -> bool:
    """True if each rank has some positions of the stream, which its traffic follows."""
    return recipe.parallel.sequence_parallel and recipe.model.kind != "hf"


def cut_traffic(
    shape: ModelShape, recipe: Recipe, rows: int, num_micro: int, recomputed: Mapping[str, int]
) -> RankTraffic:
    """Traffic of a step between ranks that hold other parts of matrices, or other experts.

    Args:
        shape: of the model.
        recipe: of the run, with its mesh.
        rows: of a micro-batch.
        num_micro: micro-batches of a step.
        recomputed: layers of each class that are computed again, by its name.
    """
    tp, ep, shards = recipe.parallel.tp, recipe.parallel.ep, max(1, recipe.parallel.dp_shard)
    ends = cut_ends(shape, recipe, rows, tp, shards)
    total = ends.forward.plus(ends.backward)
    for found in shape.classes:
        one, again = cut_layer(found, shape, recipe, rows, tp, shards), recomputed.get(found.name, 0)
        one = one.plus(routed_layer(found, recipe, rows, ep))
        total = total.plus(one.forward.plus(one.backward).times(found.count)).plus(one.again.times(again))
    return total.times(num_micro)
