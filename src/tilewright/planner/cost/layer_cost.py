"""The cost of a layer under a choice: bytes at every phase, operations of a step (`cost.operations`).

With the next layer fetched ahead, the link works while the layer before computes. Rates come from `ceilings` (measured)
or `gpu_specs` (guessed shares).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal

from tilewright.core.config.recipe import Recipe, Tier
from tilewright.core.memory_plan import LayerMemory
from tilewright.models.decoder.activation_bytes import FP32, TILE
from tilewright.planner.cost.layer_choices import GlobalConfig, Links, opaque, state_bytes, update_bytes
from tilewright.planner.cost.operations import Holding, Operation, computed, total_s
from tilewright.planner.cost.rank_share import layer_backward, layer_forward
from tilewright.planner.cost.solve_layers import Cost
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.constraints import SELECTED
from tilewright.planner.model.gemms import multiplied_in
from tilewright.planner.model.model_shape import LayerClass, ModelShape
from tilewright.planner.model.part_weights import Weights
from tilewright.planner.model.roofline import (
    CALL_SHARE,
    CAST_BYTES,
    CLIP_BYTES,
    FORMAT_OF,
    FORWARD_SHARE,
    GRADIENT_BYTES,
    calls_s,
    remade_share,
)

BLOCKED_ATTENTION = 1.05
"""Attention by blocks of query rows takes this many times as long (guess)."""

MUON_BYTES = {"fp32": 70, "bf16": 700, "8bit": 2000}
"""Read and written per weight of a matrix by what an update of Muon does beside Newton-Schulz: counted in FP32; where
the momentum is rounded, its time on a CPU times the bandwidth (measured there; a guess for GPUs)."""

Pass = Literal["fprop", "dgrad", "wgrad"]


class GemmCost:
    """Seconds of the matmuls of a layer in one micro-batch, by pass; no choice changes them.

    Args:
        found: the layer.
        rows: of a micro-batch.
        shape: of the model.
        rates: of the machine.
    """

    def __init__(self, found: LayerClass, rows: int, shape: ModelShape, rates: Ceilings) -> None:
        self.seconds = cache(self._seconds)
        self._of = found, rows, shape, rates

    def _seconds(self, which: Pass) -> float:
        """Seconds of the layer's matmuls outside of linear layers (experts in one tensor), which count as they run."""
        found, rows, shape, rates = self._of
        total = 0.0
        for matmul in found.matmuls:
            if which == "wgrad" and matmul.frozen:
                continue
            flops = 2.0 * rows * shape.seq_len * matmul.share * matmul.num_weights
            name = multiplied_in(matmul.gemms[which], rates.matmul)
            padded = flops * (shape.expert_rows if matmul.share < 1 else 1.0)
            total += rates.matmul_s(name, matmul.num_weights**0.5, padded, compiled=shape.compiled)
        for kind, (calls, flops) in found.others.items():
            each, number = rows * flops / (calls * kind.groups), calls * kind.groups
            total += number * rates.matmul_s(FORMAT_OF.get(kind.dtype, "fp32"), kind.width, each)
        return total


def layer_cost(
    found: LayerClass,
    choice: LayerMemory,
    setting: GlobalConfig,
    shape: ModelShape,
    recipe: Recipe,
    rates: Ceilings,
    links: Links,
    matmuls: GemmCost | None = None,
) -> Cost:
    """Cost of a layer under a choice (`LayerMemory`): bytes and seconds. `matmuls`: of this layer and setting, if
    known."""
    matmuls = matmuls or GemmCost(found, setting.micro_batch_size, shape, rates)
    return LayerParts(found, choice, setting, shape, recipe, rates, links, matmuls).cost()


def layer_operations(
    found: LayerClass,
    choice: LayerMemory,
    setting: GlobalConfig,
    shape: ModelShape,
    recipe: Recipe,
    rates: Ceilings,
    links: Links,
) -> tuple[Operation, ...]:
    """The operations of a step on one layer under a choice; the seconds of `layer_cost` are those of its visits."""
    matmuls = GemmCost(found, setting.micro_batch_size, shape, rates)
    return tuple(LayerParts(found, choice, setting, shape, recipe, rates, links, matmuls).operations())


def forward_s(
    found: LayerClass,
    choice: LayerMemory,
    setting: GlobalConfig,
    shape: ModelShape,
    recipe: Recipe,
    rates: Ceilings,
    links: Links,
) -> float:
    """Predict the seconds of one micro-batch forward through a layer, casts of weights left out."""
    matmuls = GemmCost(found, setting.micro_batch_size, shape, rates)
    return LayerParts(found, choice, setting, shape, recipe, rates, links, matmuls).forward_s()


@dataclass(frozen=True)
class LayerParts:
    """The cost of one layer under a choice, in its parts."""

    found: LayerClass
    choice: LayerMemory
    setting: GlobalConfig
    shape: ModelShape
    recipe: Recipe
    rates: Ceilings
    links: Links
    matmuls: GemmCost

    def cost(self) -> Cost:
        """The cost of the layer under its choice: seconds of a step and bytes held."""
        return Cost.of(total_s(self.operations()), self.holdings())

    def holdings(self) -> list[Holding]:
        """The bytes that a layer holds under its choice, as a part of its cost."""
        return list(self._standard() if self.setting.can.one_micro_batch else self._layer_major())

    def operations(self) -> Iterator[Operation]:
        """Cost of a layer as operations of a step, under its choice."""
        if self.setting.can.one_micro_batch:
            return self._at_once()
        return self._in_visits()

    def _at_once(self) -> Iterator[Operation]:
        yield from computed("step", self.forward(), self.setting.num_micro)
        yield from computed("step", self.backward(), self.setting.num_micro)
        yield from computed("step", self.update())

    def _in_visits(self) -> Iterator[Operation]:
        """List a layer's operations by visit: forward, backward for a norm to clip by, backward with the update."""
        choice, micro, inputs = self.choice, self.setting.num_micro, self.waiting
        yield from computed("forward", self.forward(), micro)
        yield self._fetched("forward", choice.parameters, self.parameters)
        yield self._stored("forward", choice.inputs, inputs)
        for visit in ("backward for the norm",) * (self.setting.passes - 1) + ("backward",):
            yield from computed(visit, self.backward(), micro)
            yield self._fetched(visit, choice.parameters, self.parameters)
            yield self._fetched(visit, choice.inputs, inputs)
        if choice.activations == "keep" and self.setting.passes > 1:  # what the first pass let go is rebuilt
            yield Operation("forward again", "recompute", "compute", micro * self.forward_s())
        yield from computed("backward", self.update())
        yield self._fetched("backward", choice.states, self.states)
        yield self._stored("backward", choice.states, self.states)
        yield self._stored("backward", choice.parameters, self.parameters)

    @property
    def rows(self) -> int:
        return self.setting.micro_batch_size

    @cached_property
    def part(self) -> Weights:
        """The part of the layer's weights that this rank holds, as its cost counts it."""
        return self.found.weights.part(self.setting.shards.count)

    @property
    def parameters(self) -> float:
        return self.part.stored

    @property
    def states(self) -> float:
        return state_bytes(self.part, self.setting)

    @property
    def input(self) -> float:
        """Bytes of a layer's kept input of one micro-batch."""
        exact, dim = self.found.input(self.rows), self.shape.dim
        routed = self.found.routes and self.setting.can.whole_model
        if self.recipe.train.checkpoint_inputs == "exact" or routed or not dim:
            return exact
        tokens = exact / self.shape.stream_bytes / dim
        return tokens * (dim + FP32 * -(-dim // TILE))

    def _standard(self) -> Iterator[Holding]:
        found, kind = self.found, self.choice.activations
        kept, mlp, mlp_work = found.kept(self.rows), 0.0, 0.0
        kept += found.weights.tensors.cast(self.setting.shards.count)
        if self.choice.mlp_chunks > 1:  # the token-wise part keeps its input and is computed again, tile by tile
            mlp = found.mlp_kept(self.rows) - found.mlp_kept(self.rows) / self.choice.mlp_chunks
            mlp_work = found.mlp_work(self.rows) - found.mlp_work(self.rows) / self.choice.mlp_chunks
        lines = {"keep": kept - mlp, "recompute": self.input}
        lines |= {"selective": found.kept_selective(self.rows), "matmuls": found.kept_matmuls(self.rows)}
        lines |= {"attention": found.kept_attention(self.rows)}
        rebuilt = max(0.0, kept - mlp - lines[kind])
        counted = self.shape.rebuilt * rebuilt
        shards, gradient = self.setting.shards, 4.0 * self.part.trained
        place = self._place("host" if shards.offload else "device")  # of parts, their gradients too
        work = counted + found.work(self.rows) - mlp_work + self.shape.matmul_bytes * found.largest_weight
        yield from self._stored_at(place, place)
        yield Holding("activations", "kept", lines[kind] + self.shape.graph.get(kind, 0.0))
        yield Holding("work", "kept", lines[kind] * self.shape.gaps)
        yield Holding("gradients", "gradients", gradient, place)
        yield Holding("work", "gradients", gradient * self.shape.spread, place)
        yield Holding("work", "forward", rebuilt + layer_forward(found, shards))
        around, made = layer_backward(found, shards)
        if self.shape.keeps_freed:
            work += made
        else:  # gradients come as the layer's activations go
            work = max(work, made - lines[kind])
        yield Holding("work", "backward", work + around)
        yield Holding("process", "once", self.shape.kind_bytes if found.matmuls else 0.0)  # ends have no code

    def _layer_major(self) -> Iterator[Holding]:
        """Costs of a layer in a layer-major step; what lives while it runs is of all layers of its group."""
        found, choice, micro, group = self.found, self.choice, self.setting.num_micro, self.group
        inputs = self.waiting
        waits = choice.inputs
        kept = micro * found.kept(self.rows) if choice.activations == "keep" else inputs
        copies = group * (1 + self.setting.prefetch)
        staged = copies * self.parameters if choice.parameters != "device" else 0.0
        states = copies * self.states if choice.states != "device" else 0.0
        copied = group * self.shape.matmul_bytes * found.weights.count
        need = group * (found.work(self.rows) if choice.activations == "keep" else self.rebuilt())
        need = max(need, update_bytes(found.weights, self.setting, self.shape))  # the update comes when that is freed
        yield from self._stored_at(choice.parameters, choice.states)
        if waits == "device":
            yield Holding("activations", "kept", kept)
        else:
            yield Holding("activations", "always", inputs, self._place(waits))
            yield Holding("work", "backward", (1 + self.setting.prefetch) * self.input)
        for life in ("forward", "backward"):
            yield Holding("parameters", life, staged)
            yield Holding("optimizer", life, states)
        yield Holding("work", "forward", group * found.kept(self.rows))
        yield Holding("gradients", "backward", group * 4.0 * found.weights.trained)
        yield Holding("work", "backward", copied + need)

    def _stored_at(self, parameters: Tier, states: Tier) -> Iterator[Holding]:
        """Bytes of a layer's weights where they are stored, and of what is between steps."""
        yield Holding("parameters", "always", self.parameters, self._place(parameters))
        yield Holding("optimizer", "always", self.states, self._place(states))
        if parameters == "device" or self.setting.can.one_micro_batch:
            yield Holding("buffers", "always", self.found.buffers)

    def _place(self, tier: Tier) -> Tier:
        """The place of a layer's bytes of a tier: the host's are on the device if that is a CPU."""
        return "device" if tier == "host" and self.links.host is None else tier

    @property
    def group(self) -> int:
        """Number of layers that run as one group, as the layer's cost counts it; an end of the model is alone."""
        return min(self.setting.group, self.shape.num_layers) if self.found.indices != (-1,) else 1

    @property
    def waiting(self) -> float:
        """Bytes of a layer's inputs that wait for backward: one input for each group of layers."""
        layers = self.shape.num_layers
        return self.setting.num_micro * self.input * (-(-layers // self.group) / layers)

    def rebuilt(self) -> float:
        """Device bytes while a layer is recomputed and its backward runs, in tiles where asked for.

        The token-wise part is rebuilt a tile at a time, and let go before attention's backward begins.
        """
        found, choice = self.found, self.choice
        mask = found.mask * self.rows
        cut = 1 - choice.attention_block / self.shape.seq_len if choice.attention_block else 0.0
        rest = found.kept(self.rows) - found.mlp_kept(self.rows) - cut * mask
        whole = found.kept(self.rows) + found.work(self.rows) - cut * mask
        if choice.mlp_chunks == 1:
            return whole
        mlp = (found.mlp_kept(self.rows) + found.mlp_work(self.rows)) / choice.mlp_chunks
        others = max(0.0, found.work(self.rows) - found.mlp_work(self.rows))
        return rest + max(mlp, others + self.input)

    def _fetched(self, visit: str, tier: Tier, size: float) -> Operation:
        """Bytes of a layer fetched from a tier to the device."""
        speed = {"device": None, "host": self.links.host, "disk": self.links.disk}[tier]
        return Operation(visit, "link", "fetch", size / speed if speed else 0.0, size if speed else 0.0)

    def _stored(self, visit: str, tier: Tier, size: float) -> Operation:
        """Bytes of a layer stored from the device to a tier."""
        found = self._fetched(visit, tier, size)._replace(stream="store")
        written = self.links.disk_write
        return found._replace(seconds=size / written) if tier == "disk" and written else found

    def forward(self) -> dict[str, float]:
        """The cost in seconds of one micro-batch forward through a layer, by part."""
        return {
            "matmuls": self.matmul_s("fprop"),
            "attention": self.attention_s(),
            "elementwise": FORWARD_SHARE * self.elementwise_s(),
            "quantize": self.quantize_s("forward"),
            "calls": FORWARD_SHARE * self.calls_s(),
        }

    def forward_s(self) -> float:
        """The cost in seconds of one micro-batch forward through a layer."""
        return sum(self.forward().values())

    def backward(self) -> dict[str, float]:
        """The cost in seconds of one micro-batch backward through a layer, by part."""
        return {
            "matmuls": self.matmul_s("dgrad") + self.matmul_s("wgrad"),
            "attention": 2.5 * self.attention_s(),
            "elementwise": (1 - FORWARD_SHARE) * self.elementwise_s(),
            "quantize": self.quantize_s("backward"),
            "calls": (1 - FORWARD_SHARE) * self.calls_s(),
            "recompute": self.again_s() + self.tiles_s(),
            "weights": self.weights_s(),
        }

    def update(self) -> dict[str, float]:
        """Seconds of a layer after backward, by part: codes that are made of weights once, and the optimizer's."""
        return {"quantize": self.found.coding.step / self.rates.bandwidth, "optimizer": self.optimizer_s()}

    def again_s(self) -> float:
        """The cost in seconds of recomputing a layer for one micro-batch."""
        kind = self.choice.activations
        if kind == "keep":
            return 0.0
        if kind in SELECTED and opaque(self.found, self.shape):
            return self.forward_s()
        if kind in ("selective", "matmuls"):
            share = FORWARD_SHARE * remade_share(self.found.fused, self.shape.matmul_bytes)
            return share * self.elementwise_s() + (self.attention_s() if kind == "matmuls" else 0.0)
        again = self.forward_s() - (self.attention_s() if kind == "attention" else 0.0)
        if self.setting.can.activation_checkpoint and self.found.matmul_flops:
            again -= self.matmul_s("fprop") * self.found.last_flops / self.found.matmul_flops
        return again

    def tiles_s(self) -> float:
        """Seconds of a layer's tiled token-wise part, which is computed once more inside its backward."""
        if self.choice.mlp_chunks == 1 or not self.found.matmul_flops:
            return 0.0
        return self.matmul_s("fprop") * self.found.mlp_flops / self.found.matmul_flops

    def matmul_s(self, which: Pass) -> float:
        """The cost in seconds of a layer's matmuls in one micro-batch."""
        return self.matmuls.seconds(which)

    def attention_s(self) -> float:
        """Seconds of a layer's attention (scores and values) in one micro-batch, forward."""
        slower = BLOCKED_ATTENTION if self.choice.attention_block else 1.0
        share = 1.0 if self.shape.attention_share is None else self.shape.attention_share
        flops = share * self.rows * self.found.attention_flops
        return slower * flops / self.rates.attention[self.shape.matmul_format]

    def elementwise_s(self) -> float:
        """Seconds of a layer's norms, activations and residuals in one micro-batch, forward and backward."""
        rate = self.rates.bandwidth if self.found.fused else self.rates.elementwise[self.shape.matmul_format]
        return self.found.moved(self.rows) / rate

    def quantize_s(self, which: Literal["forward", "backward"]) -> float:
        """A layer's seconds to make 8-bit operands of one micro-batch, and to decode them."""
        return getattr(self.found.coding, which)(self.rows) / self.rates.bandwidth

    def calls_s(self) -> float:
        """A layer's seconds to enter compiled pieces, or to call operations of third-party layers."""
        if self.found.operations:
            return CALL_SHARE * self.found.operations * self.rates.call_s(self.shape.matmul_format)
        if not self.shape.compiled or not self.found.matmuls:
            return 0.0
        return calls_s(self.found.called_experts, self.rates)

    def weights_s(self) -> float:
        """A layer's seconds to cast weights and to accumulate their gradients in one micro-batch."""
        return (CAST_BYTES * self.found.cast + GRADIENT_BYTES * self.found.weights.trained) / self.rates.bandwidth

    def optimizer_s(self) -> float:
        """Seconds of a layer's optimizer work: norm, clipping and update."""
        trained, matrices = self.part.trained, self.part.matrices
        of_adam, of_muon = trained, 0.0
        if self.setting.optimizer == "muon" and matrices.elements:
            of_adam -= matrices.elements
            whole = self.found.weights.matrices  # each on one rank
            of_muon = whole.newton_schulz_s(partial(self.rates.matmul_s, self.shape.direction_format))
            of_muon /= self.setting.shards.count
            of_muon += MUON_BYTES[self.setting.moments] * matrices.elements / self.rates.bandwidth
        return of_adam / self.rates.adam[self.setting.moments] + of_muon + CLIP_BYTES * trained / self.rates.bandwidth


def end_class(name: str, weights: Weights, shape: ModelShape) -> LayerClass:
    """Make a layer class of one layer for the embedding or head: parameters and states. Its activations are in the
    phases' base."""
    largest = weights.count if any(found.largest_weight for found in shape.classes) else 0
    cast = weights.count - weights.narrow if shape.matmul_bytes < FP32 and not shape.foreign else 0
    return LayerClass(name, (-1,), weights, weights.count, largest_weight=largest, cast=cast)
