"""A model on one machine, as a search over meshes asks for it: layers of a stage, weights of a rank, seconds.

Matmuls and activations of tensor parallelism are those of one rank, divided (sequence parallelism: norms too); ends of
the model are cut by vocabulary. Experts that are spread do as much work on each rank: routing is taken for even.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

from tilewright.core.config.edit import changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.memory_plan import Activations, LayerMemory
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.planner.cost.choices import GlobalConfig, Links
from tilewright.planner.cost.layer_cost import GemmCost, LayerParts
from tilewright.planner.cost.shards import Shards
from tilewright.planner.cost.teacher import head_parts_s
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.classes import ShapeFinder
from tilewright.planner.model.shape import LayerClass, ModelShape
from tilewright.planner.model.weights import Tensors, Weights
from tilewright.planner.simulate.mesh.setting import MeshSetting

NO_LINKS = Links(None, None)


class PassSeconds(NamedTuple):
    """Of one micro-batch. Recomputation is before `dgrad`."""

    forward: float = 0.0
    recompute: float = 0.0
    dgrad: float = 0.0
    wgrad: float = 0.0
    traffic: float = 0.0
    """Of these, what is communication that nothing hides: a part of all three passes."""

    def plus(self, other: "PassSeconds") -> "PassSeconds":
        """One after the other."""
        return PassSeconds(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def times(self, factor: float) -> "PassSeconds":
        """So many times."""
        return PassSeconds(*(factor * mine for mine in self))

    @property
    def backward(self) -> float:
        """Until both gradients are there."""
        return self.recompute + self.dgrad + self.wgrad

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageLayers:
    """What is in a stage, or in all stages of a rank: layers by class, and the ends of the model."""

    counts: tuple[int, ...]
    """Of each class of the model."""
    first: bool
    last: bool

    def plus(self, other: "StageLayers") -> "StageLayers":
        """Both on one rank."""
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
        self.passes = cache(self._passes)
        self.part = cache(self._part)
        self.recipe_with = cache(self._recipe_with)
        self.head = cache(self._head)
        self.experts = recipe.model.num_experts
        """Routed ones of a layer; 0: dense."""

    def _recipe_with(self, master: str) -> Recipe:
        """The recipe with another storage of weights, and one process."""
        alone = {"parallel.pp": 1, "parallel.dp_shard": 1, "parallel.dp_replicate": 1}
        alone |= {"parallel.tp": 1, "parallel.ep": 1}
        return changed(self.recipe, alone | {"optim.master_weights": master})

    def _marked(self, master: str) -> ModelShape:
        """Each expert on a rank of its own, so that its tensors are known by that."""
        recipe = self.recipe_with(master)
        if self.experts > 1:
            recipe = changed(recipe, {"parallel.ep": self.experts, "parallel.dp_shard": self.experts})
        return self._finder.find(recipe).known()

    def _shape(self, master: str, ep: int) -> ModelShape:
        """With experts spread over so many ranks."""
        shape = self.marked(master)
        classes = tuple(replace(found, weights=_spread_over(found.weights, ep)) for found in shape.classes)
        return replace(shape, classes=classes)

    def config(self, setting: MeshSetting) -> GlobalConfig:
        """Of a rank, as the planner of one process has it."""
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
            shards=Shards(
                sizes.data,
                sizes.dp_shard,
                reshard=alone
                and recipe.parallel.reshard_after_forward,  # torch keeps a stage's parameters for the step
                reduce_each=alone and setting.reduce_each,
            ),
        )

    def layers_of(self, ranges: Sequence[range], stages: Sequence[int]) -> StageLayers:
        """What some stages hold.

        Args:
            ranges: layers of each stage.
            stages: which of them.
        """
        classes = self.shape("fp32", 1).classes
        held = {layer for stage in stages for layer in ranges[stage]}
        counts = tuple(len(held.intersection(found.indices)) for found in classes)
        return StageLayers(counts, 0 in stages, len(ranges) - 1 in stages)

    def _passes(self, place: int, rows: int, kind: Activations, master: str, ep: int) -> PassSeconds:
        """Of one layer of the class at this place, without communication."""
        found = _local(self.marked(master).classes[place], ep)
        parts = self._parts(found, rows, kind, master, ep)
        backward, wgrad = parts.backward(), parts.matmul_s("wgrad") + parts.weights_s()
        again = backward.pop("recompute")
        return PassSeconds(parts.forward_s(), again, sum(backward.values()) - wgrad, wgrad)

    def _parts(self, found: LayerClass, rows: int, kind: Activations, master: str, ep: int) -> LayerParts:
        shape = self.shape(master, ep)
        alone = MeshSetting(MeshSizes(), Pipeline(1), rows, 1, kind, "fp32", master)
        setting = self.config(alone)
        matmuls = GemmCost(found, rows, shape, self.rates)
        recipe = self.recipe_with(master)
        return LayerParts(found, LayerMemory(activations=kind), setting, shape, recipe, self.rates, NO_LINKS, matmuls)

    def _head(self, rows: int) -> PassSeconds:
        """Head and loss, with what is around the layers."""
        shape = self.shape(self.recipe.optim.master_weights, 1)
        found = self._parts(shape.rest, rows, "keep", self.recipe.optim.master_weights, 1)
        forward, backward = found.forward_s(), sum(found.backward().values())
        if not shape.plain_head:
            return PassSeconds(forward, 0.0, backward, 0.0)
        setting = self.config(MeshSetting(MeshSizes(), Pipeline(1), rows, 1, "keep", "fp32", "fp32"))
        head = head_parts_s(shape, setting, self.rates)
        third, loss = head["head"] / 3, head["loss"]
        return PassSeconds(forward + third + loss / 2, 0.0, backward + third + loss / 2, third)

    def update_s(self, weights: Weights, moments: str, master: str, shards: int) -> float:
        """Of the optimizer, for a rank's part of some weights."""
        found = LayerClass("rank", (-1,), weights, weights.count)
        shape, recipe = self.shape(master, 1), self.recipe_with(master)
        config = self.config(MeshSetting(MeshSizes(dp_shard=shards), Pipeline(1), 1, 1, "keep", moments, master))
        matmuls = GemmCost(found, 1, shape, self.rates)
        parts = LayerParts(found, LayerMemory(), config, shape, recipe, self.rates, NO_LINKS, matmuls)
        return sum(parts.update().values())

    def _part(self, held: StageLayers, master: str, ep: int, shards: int) -> Weights:
        """Of what a rank holds, its part."""
        return self.weights(held, master, ep).part(shards)

    def weights(self, held: StageLayers, master: str, ep: int) -> Weights:
        """Whole, of what a rank holds."""
        shape = self.shape(master, ep)
        of_layers = zip(held.counts, shape.classes, strict=True)
        found = sum((one.weights.times(count) for count, one in of_layers if count), Weights())
        return found + (shape.embedding if held.first else Weights()) + (shape.head if held.last else Weights())

    def flops(self) -> float:
        """Of a token of a step, forward and backward, what is computed again left out: as MFU counts them."""
        shape = self.shape("fp32", 1)
        layers = sum(found.count * (found.matmul_flops + found.attention_flops) for found in shape.classes)
        return 3 * layers / shape.seq_len + 6.0 * shape.dim * shape.vocab_size


def _spread_over(weights: Weights, ep: int) -> Weights:
    kinds = weights.tensors.kinds.items()
    return replace(weights, tensors=Tensors({kind._replace(spread=min(kind.spread, ep)): n for kind, n in kinds}))


def _local(found: LayerClass, ep: int) -> LayerClass:
    """With a rank's experts alone where passes cast weights and add to their gradients."""
    if ep == 1:
        return found
    kinds = found.weights.tensors.kinds.items()
    away = sum(n * (1 - 1 / ep) * prod(kind.shape) for kind, n in kinds if kind.spread > 1)
    trained = found.weights.trained
    weights = replace(found.weights, trained=max(0, trained - int(away)))
    return replace(
        found,
        weights=weights,
        cast=max(0, found.cast - int(away)),
        called_experts=max(1, found.called_experts // ep) if found.called_experts else 0,
    )
