"""A model on one machine, as a search over meshes asks for it: layers of a stage, weights of a rank, seconds.

Under tensor parallelism a rank has the shape that a plan of one device gives it (`parallel.inside.tensor.matrix_cuts`):
fewer heads, narrower layers, a part of the vocabulary, other tokens for experts. Experts that are spread do as much
work on each rank: routing is taken for even.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import Activations, LayerMemory
from tilewright.models.build import decoder_config, spec_of
from tilewright.parallel.inside.tensor.matrix_cuts import cuts_vocabulary
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.cost.layer_choices import GlobalConfig, Links
from tilewright.planner.cost.layer_cost import GemmCost, LayerParts
from tilewright.planner.cost.rank_share import Shards
from tilewright.planner.cost.teacher_cost import head_parts_s
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.model.model_shape import Coding, LayerClass, ModelShape
from tilewright.planner.model.part_weights import Tensors, Weights
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting

NO_LINKS = Links(None, None)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class ShapeKey(NamedTuple):
    """The numbers that decide the shape of a rank's part of a model."""

    master: str
    """Storage of weights."""
    ep: int = 1
    tp: int = 1
    shards: int = 1
    """Ranks of `dp_shard`: 1, or the first number of those that leave the same shape (`MeshModel.key`)."""
    staged: bool = False
    """Whether shards are of stages, which are gathered as they are stored."""


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch's passes. Recomputation is before `dgrad`."""

    forward: float = 0.0
    recompute: float = 0.0
    dgrad: float = 0.0
    wgrad: float = 0.0
    traffic: float = 0.0
    """Of these, what is communication that nothing hides: a part of all three passes."""

    def plus(self, other: "PassSeconds") -> "PassSeconds":
        """Seconds of two passes of a mesh's layers, one after the other."""
        return PassSeconds(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, factor: float) -> "PassSeconds":
        """Seconds of passes of a mesh's layers, multiplied."""
        return PassSeconds(*(factor * mine for mine in self))

    @property
    def backward(self) -> float:
        """Seconds of a pass until both gradients are there, in a mesh's model."""
        return self.recompute + self.dgrad + self.wgrad

    @property
    def total(self) -> float:
        """Seconds of a pass forward and backward, in a mesh's model."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageLayers:
    """The content of a stage, or of all stages of a rank: layers by class, and the ends of the model."""

    counts: tuple[int, ...]
    """Of each class of the model."""
    first: bool
    last: bool

    def plus(self, other: "StageLayers") -> "StageLayers":
        """The layers of two stages of a mesh's model on one rank."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return StageLayers(counts, self.first or other.first, self.last or other.last)


class MeshModel:
    """A recipe's model on a machine.

    Args:
        recipe: its own mesh does not matter.
        vocab_size: of the tokenizer.
        machine: of a rank.
        rates: of the machine.
        finder: of shapes, where another planner has one.
    """

    def __init__(
        self, recipe: Recipe, vocab_size: int, machine: Machine, rates: Ceilings, finder: ShapeFinder | None = None
    ) -> None:
        self.recipe, self.machine, self.rates = recipe, machine, rates
        self._finder = finder or ShapeFinder(vocab_size, machine)
        self.shape = cache(self._shape)
        self.marked = cache(self._marked)
        self.key = cache(self._key)
        self.passes = cache(self._passes)
        self.part = cache(self._part)
        self.recipe_with = cache(self._recipe_with)
        self.head = cache(self._head)
        section = recipe.model
        known = spec_of(section.kind).formulas is not None
        self.decoder = decoder_config(section, vocab_size) if known else None
        """Its shape; None of a model that is not tilewright's own."""
        self._alike: dict[tuple[int, bool, bool], int] = {}

    @property
    def experts(self) -> int:
        """Count the experts of a layer that the mesh may place on other ranks; 0: none."""
        return self.decoder.num_experts if self.decoder else 0

    @property
    def chosen(self) -> int:
        """Count the experts of a layer that a token passes in the mesh's model; 0: none."""
        return self.decoder.num_experts_per_token if self.decoder else 0

    @cached_property
    def whole(self) -> ModelShape:
        """The shape of the whole model before a mesh cuts it: on one rank, weights in FP32."""
        return self.shape(ShapeKey("fp32"))

    def _key(self, master: str, sizes: MeshSizes) -> ShapeKey:
        """The cache key of the model on a rank of a mesh: it depends on whether there are shards, and whether the
        vocabulary is cut too."""
        shards, tp = sizes.dp_shard, sizes.tp
        kind = (tp, shards > 1, tp > 1 and cuts_vocabulary(self._finder.vocab_size, tp, shards))
        return ShapeKey(master, sizes.ep, tp, self._alike.setdefault(kind, shards), shards > 1 and sizes.pp > 1)

    def _recipe_with(self, master: str) -> Recipe:
        """The recipe of the mesh's model with another storage of weights, and one process."""
        alone = {"parallel.pp": 1, "parallel.dp_shard": 1, "parallel.dp_replicate": 1}
        alone |= {"parallel.tp": 1, "parallel.ep": 1}
        return changed(self.recipe, alone | {"optim.master_weights": master})

    def _marked(self, master: str, tp: int, shards: int, spread: int, staged: bool) -> ModelShape:
        """The mesh's model with experts spread over so many ranks, so that their tensors are known by that."""
        cut = {"parallel.tp": tp, "parallel.dp_shard": shards, "parallel.ep": spread}
        cut |= {"parallel.pp": 2 if staged else 1}
        return self._finder.find(changed(self.recipe_with(master), cut)).known()

    def _spread(self, ep: int) -> int:
        """The ranks over which the mesh's model spreads experts in its traced shape: one per expert, if their number is
        known, so that one shape serves all meshes."""
        return 1 if ep == 1 else self.experts or ep

    def _shape(self, key: ShapeKey) -> ModelShape:
        """The shape of the mesh's model with experts spread over so many ranks."""
        shape = self.marked(key.master, key.tp, key.shards, self._spread(key.ep), key.staged)
        classes = tuple(replace(found, weights=_spread_over(found.weights, key.ep)) for found in shape.classes)
        return replace(shape, classes=classes)

    def config(self, setting: MeshSetting) -> GlobalConfig:
        """The planner's configuration of a rank of a mesh, as one process has it."""
        recipe, sizes = self.recipe, setting.sizes
        alone = sizes.pp == 1
        return GlobalConfig(
            executor="standard",
            micro_batch_size=setting.rows,
            num_micro=setting.count,
            moments=setting.moments,
            master=setting.master,
            loss_chunk_bytes=recipe.memory.loss_chunk_bytes,
            passes=1,
            optimizer=recipe.optim.kind,
            shards=replace(
                self.shards(sizes),
                reshard=alone and recipe.parallel.reshard_after_forward,  # torch keeps a stage's parameters for a step
                reduce_each=alone and setting.reduce_each,
                staged=not alone,
                wire=setting.wire,
            ),
        )

    def shards(self, sizes: MeshSizes) -> Shards:
        """The shards of the mesh's model: which ranks share it."""
        apart = sizes.tp > 1 and self.experts > 0
        return Shards(sizes.data, sizes.dp_shard, tp=sizes.tp, ep=sizes.ep, experts_apart=apart)

    def layers_of(self, ranges: Sequence[range], stages: Sequence[int]) -> StageLayers:
        """The layers of the mesh's model that some stages hold.

        Args:
            ranges: layers of each stage.
            stages: which of them.
        """
        classes = self.whole.classes
        held = {layer for stage in stages for layer in ranges[stage]}
        counts = tuple(len(held.intersection(found.indices)) for found in classes)
        return StageLayers(counts, 0 in stages, len(ranges) - 1 in stages)

    def _passes(self, place: int, rows: int, kind: Activations, key: ShapeKey) -> PassSeconds:
        """Seconds of passes of one layer of the mesh's model of the class at this place, without communication."""
        parts = self.layer_parts(place, rows, kind, key)
        backward, wgrad = parts.backward(), parts.matmul_s("wgrad") + parts.weights_s()
        again = backward.pop("recompute")
        return PassSeconds(parts.forward_s(), again, sum(backward.values()) - wgrad, wgrad)

    def layer_parts(self, place: int, rows: int, kind: Activations, key: ShapeKey) -> LayerParts:
        """The parts of a layer's seconds as a rank of the mesh runs it.

        Args:
            place: of its class.
            rows: of a micro-batch.
            kind: what it keeps.
            key: of the rank's part of the model.
        """
        found = self._local(
            self.marked(key.master, key.tp, key.shards, self._spread(key.ep), key.staged).classes[place], key
        )
        return self._parts(found, rows, kind, key)

    def _local(self, found: LayerClass, key: ShapeKey) -> LayerClass:
        """A layer of the mesh's model with a rank's experts alone where passes cast weights, make codes of them, and
        add to their gradients."""
        if key.ep == 1:
            return found
        kinds = found.weights.tensors.kinds.items()
        away = sum(n * (1 - 1 / key.ep - kind.redundant) * prod(kind.shape) for kind, n in kinds if kind.spread > 1)
        trained = found.weights.trained
        weights = replace(found.weights, trained=max(0, trained - int(away)))
        return replace(
            found,
            weights=weights,
            cast=max(0, found.cast - int(away)),
            called_experts=max(1, found.called_experts // key.ep) if found.called_experts else 0,
            coding=self._coding(found, key.ep),
        )

    def _coding(self, found: LayerClass, ep: int) -> Coding:
        """The bytes of codes of a rank's experts in the mesh's model: as many tokens go through fewer experts."""
        mine = []
        for one in found.matmuls:
            number = _EXPERT.search(one.fqn)
            if number is None or not found.routes:
                mine.append(one)
            elif int(number[1]) < self.experts // ep:
                mine.append(replace(one, share=ep * one.share))
        return Coding.of(mine, self.whole.seq_len, self.machine, found.coding.step > 0)

    def _parts(self, found: LayerClass, rows: int, kind: Activations, key: ShapeKey) -> LayerParts:
        shape = self.shape(key)
        alone = MeshSetting(MeshSizes(), Pipeline(1), rows, 1, kind, "fp32", key.master)
        setting = self.config(alone)
        matmuls = GemmCost(found, rows, shape, self.rates)
        recipe = self.recipe_with(key.master)
        return LayerParts(found, LayerMemory(activations=kind), setting, shape, recipe, self.rates, NO_LINKS, matmuls)

    def _head(self, rows: int, key: ShapeKey) -> PassSeconds:
        """Head and loss of the mesh's model, with what is around the layers."""
        shape = self.shape(key)
        found = self._parts(shape.rest, rows, "keep", key)
        forward, backward = found.forward_s(), sum(found.backward().values())
        if not shape.plain_head:
            return PassSeconds(forward, 0.0, backward, 0.0)
        setting = self.config(MeshSetting(MeshSizes(), Pipeline(1), rows, 1, "keep", "fp32", "fp32"))
        head = head_parts_s(shape, setting, self.rates)
        third, loss = head["head"] / 3, head["loss"]
        return PassSeconds(forward + third + loss / 2, 0.0, backward + third + loss / 2, third)

    def update_s(self, weights: Weights, moments: str, key: ShapeKey, shards: int) -> float:
        """Seconds of the optimizer for a mesh rank's part of some weights."""
        found = LayerClass("rank", (-1,), weights, weights.count)
        shape, recipe = self.shape(key), self.recipe_with(key.master)
        config = self.config(MeshSetting(MeshSizes(dp_shard=shards), Pipeline(1), 1, 1, "keep", moments, key.master))
        matmuls = GemmCost(found, 1, shape, self.rates)
        parts = LayerParts(found, LayerMemory(), config, shape, recipe, self.rates, NO_LINKS, matmuls)
        return sum(parts.update().values())

    def _part(self, held: StageLayers, key: ShapeKey, shards: int) -> Weights:
        """A rank's part of what it holds of the mesh's model."""
        return self.weights(held, key).part(shards)

    def weights(self, held: StageLayers, key: ShapeKey) -> Weights:
        """Whole weights of what a mesh rank holds; a head that reads the embedding's matrix has a copy of it."""
        shape = part_of(self.shape(key), held)
        of_layers = (found.weights.times(found.count) for found in shape.classes)
        return sum(of_layers, Weights()) + shape.embedding + shape.head

    def flops(self) -> float:
        """FLOPs of a token of a step of the mesh's model, forward and backward, what is computed again left out: as MFU
        counts them."""
        shape = self.whole
        layers = sum(found.count * (found.matmul_flops + found.attention_flops) for found in shape.classes)
        return 3 * layers / shape.seq_len + 6.0 * shape.dim * shape.vocab_size


def _spread_over(weights: Weights, ep: int) -> Weights:
    """Kinds of weights of the mesh's model that are one when experts are spread (a shared expert's matrices beside
    those of others), counted together."""
    kinds = weights.tensors.kinds.items()
    found = (Tensors({kind._replace(spread=min(kind.spread, ep)): number}) for kind, number in kinds)
    return replace(weights, tensors=sum(found, Tensors()))


def part_of(shape: ModelShape, held: StageLayers) -> ModelShape:
    """The part of a model that a rank of the mesh has: some of its layers, with its ends or without."""
    pairs = zip(shape.classes, held.counts, strict=True)
    classes = tuple(replace(found, indices=found.indices[:count]) for found, count in pairs if count)
    rest = shape.rest if held.last else LayerClass("rest", (-1,), Weights(), 0)
    none = Weights()
    head = shape.head if held.last else none
    if held.last and shape.tied and not held.first:  # the head's own copy of the embedding's matrix
        head = head + shape.embedding
    embedding = shape.embedding if held.first else none
    return replace(
        shape, classes=classes, rest=rest, embedding=embedding, head=head, plain_head=shape.plain_head and held.last
    )
