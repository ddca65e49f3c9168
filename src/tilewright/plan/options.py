"""What may be done with a layer, and what it costs: bytes at every phase, seconds of a step.

A plan has one `Setting` for the whole model and a `Choice` for each layer. Seconds of a layer are those of its
computation, or of what crosses the link while it runs where that takes longer: with the next layer fetched ahead, the
link works while the layer before computes. Rates come from `ceilings` (measured) or `published` (guessed shares).

Executors. `standard`: one micro-batch after the other through the whole model; everything stays on the device; all
gradients live until the update. `layer_major`: all micro-batches through a layer, then the next; parameters, states and
layer inputs may lie elsewhere; one layer's gradients live at a time.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tilewright.core.config import Recipe
from tilewright.core.placement import KIND_OF
from tilewright.formats.squares import num_blocks
from tilewright.models.activation_bytes import FP32, TILE
from tilewright.plan.ceilings import Ceilings
from tilewright.plan.fixed import BLOCK_ROWS, INPUTS_OF, SELECTED, Activations, Fixed, Place
from tilewright.plan.roofline import CALL_SHARE, FORWARD_SHARE, calls_s, remade_share
from tilewright.plan.shape import LayerClass, ModelShape
from tilewright.plan.solve import Cost
from tilewright.precision.gemms import FP8_FORMATS

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}
MASTER_BYTES = {"fp32": 4, "split24": 1, "stochastic": 0}
BLOCKED_ATTENTION = 1.05
"""Attention by blocks of query rows takes this many times as long (guess)."""
HIDDEN_SHARE = 0.02
"""Of the time of a transfer that is hidden behind computation, what it costs all the same (guess): of plans that are
equally fast on paper, the one that moves less."""


NOTHING_FIXED = Fixed()


@dataclass(frozen=True)
class Links:
    """Bytes/s, one direction. None: there is no such place. `guessed`: what of it nobody measured."""

    host: float | None
    disk: float | None
    guessed: str = ""
    disk_write: float | None = None
    """Of the disk; None: as it reads."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all layers."""

    executor: Literal["standard", "layer_major"]
    micro_batch: int
    num_micro: int
    moments: str
    master: str
    loss_tile: int
    passes: int
    """Backward passes of a step: two where clipping by the exact norm comes before the first update."""
    prefetch: int = 1

    @classmethod
    def of(cls, recipe: Recipe) -> "Setting":
        """What a recipe says."""
        train, optim, micro = recipe.train, recipe.optim, min(recipe.train.micro_batch, recipe.train.batch_size)
        return cls(
            executor=recipe.memory.executor,
            micro_batch=micro,
            num_micro=-(-train.batch_size // micro),
            moments=optim.moments,
            master=optim.master,
            loss_tile=recipe.memory.loss_tile,
            passes=2 if optim.clip == "exact" and optim.clip_norm > 0 else 1,
            prefetch=recipe.memory.prefetch,
        )


@dataclass(frozen=True)
class Choice:
    """What is done with one layer. `offload`, `spill`: recompute, and keep the layer's input on the host, on disk."""

    parameters: Place = "device"
    states: Place = "device"
    activations: Activations = "keep"
    mlp_tiles: int = 1
    attention_block: int = 0

    @property
    def kept_words(self) -> str:
        """What backward finds."""
        return {"offload": "recompute, inputs on host", "spill": "recompute, inputs on disk"}.get(
            self.activations, self.activations
        )

    def __str__(self) -> str:
        words = [f"parameters {self.parameters}", f"states {self.states}", self.kept_words]
        words += [f"MLP in {self.mlp_tiles} tiles"] if self.mlp_tiles > 1 else []
        words += [f"attention by {self.attention_block} rows"] if self.attention_block else []
        return ", ".join(words)


def state_bytes(num_parameters: int, setting: Setting, stored: float) -> float:
    """Optimizer states of some parameters, and what lies beside parameters that are stored in 16 bit."""
    scales = 4 * num_blocks(num_parameters) if setting.moments == "8bit" else 0
    beside = MASTER_BYTES[setting.master] if stored < 4 else 0
    return 2 * (MOMENT_BYTES[setting.moments] * num_parameters + scales) + beside * num_parameters


def opaque(found: LayerClass, shape: ModelShape) -> bool:
    """Whether nothing can be selected in a layer: experts are compiled pieces into which nobody sees."""
    return shape.compiled and found.called_experts > 0


def choices(
    found: LayerClass, setting: Setting, shape: ModelShape, recipe: Recipe, links: Links, fixed: Fixed = NOTHING_FIXED
) -> Iterator[Choice]:
    """Everything that may be done with a layer of this class. Parameters of a layer that keeps all stay, too."""
    exact = recipe.train.checkpoint_inputs == "exact"  # else a layer that is recomputed differs from one that is kept
    if setting.executor == "standard":
        tiles, block = fixed.mlp_tiles or 1, fixed.attention_block or 0
        there: tuple[Activations, ...] = tuple(KIND_OF.values()) if exact else ("recompute",)
        allowed: list[Activations] = fixed.kinds(there)
        if opaque(found, shape):  # what is asked for stays, and recomputes the layer whole
            allowed = [kind for kind in allowed if kind not in SELECTED] or allowed
        for kind in allowed:
            yield Choice(activations=kind, mlp_tiles=tiles, attention_block=block)
        return
    places: list[Place] = ["device"]
    if links.host:
        places.append("host")
    if links.disk:
        places.append("disk")
    kinds: list[Activations] = ["keep", "recompute"] if exact else ["recompute"]
    if links.host or fixed.inputs == "host":
        kinds.append("offload")
    if (links.disk and not links.host) or fixed.inputs == "disk":
        kinds.append("spill")
    whole = found.active_parameters == found.num_parameters  # experts stay whole
    slices = fixed.slices(whole and bool(found.mlp_kept(1)), bool(found.mask) and shape.seq_len > BLOCK_ROWS)
    homes = itertools.product(fixed.places("parameters", places), fixed.places("states", places), fixed.kinds(kinds))
    for parameters, states, kind in homes:
        for tiles, block in slices:
            if kind != "keep" or (parameters == "device" and (tiles, block) == slices[0]):
                yield Choice(parameters, states, kind, tiles, block)


def layer_cost(
    found: LayerClass,
    choice: Choice,
    setting: Setting,
    shape: ModelShape,
    recipe: Recipe,
    rates: Ceilings,
    links: Links,
) -> Cost:
    """Bytes and seconds of one layer under a choice."""
    return _Layer(found, choice, setting, shape, recipe, rates, links).cost()


@dataclass(frozen=True)
class _Layer:
    found: LayerClass
    choice: Choice
    setting: Setting
    shape: ModelShape
    recipe: Recipe
    rates: Ceilings
    links: Links

    def cost(self) -> Cost:
        """All of it."""
        if self.setting.executor == "standard":
            return self._standard()
        return self._layer_major()

    @property
    def rows(self) -> int:
        return self.setting.micro_batch

    @property
    def parameters(self) -> float:
        return self.shape.stored_bytes * self.found.num_parameters

    @property
    def states(self) -> float:
        return state_bytes(self.found.num_parameters, self.setting, self.shape.stored_bytes)

    @property
    def input(self) -> float:
        """A layer's kept input of one micro-batch."""
        exact = self.found.input(self.rows)
        if self.recipe.train.checkpoint_inputs == "exact":
            return exact
        elements = exact / self.shape.stream_bytes
        return elements * (1 + FP32 / TILE)

    def _standard(self) -> Cost:
        found, kind = self.found, self.choice.activations
        kept, mlp, mlp_work = found.kept(self.rows), 0.0, 0.0
        if self.choice.mlp_tiles > 1:  # the token-wise part keeps its input and is computed again, tile by tile
            mlp = found.mlp_kept(self.rows) - found.mlp_kept(self.rows) / self.choice.mlp_tiles
            mlp_work = found.mlp_work(self.rows) - found.mlp_work(self.rows) / self.choice.mlp_tiles
        lines = {"keep": kept - mlp, "recompute": self.input}
        lines |= {"selective": found.kept_selective(self.rows), "products": found.kept_products(self.rows)}
        lines |= {"attention": found.kept_attention(self.rows)}
        rebuilt = max(0.0, kept - mlp - lines[kind])
        counted = self.shape.rebuilt * rebuilt
        micro_batch = self.forward_s() + self.backward_s() + self.again_s() + self.tiles_s() + self.weights_s()
        return Cost(
            seconds=self.setting.num_micro * micro_batch + self.update_s(),
            held=self.parameters + self.states + found.codes,
            kept=lines[kind] * (1 + self.shape.gaps),
            gradient=4.0 * found.num_parameters,
            forward=rebuilt,
            backward=counted + found.work(self.rows) - mlp_work + self.shape.product_bytes * found.largest_weight,
            once=self.shape.kind_bytes if found.products else 0.0,  # embedding and head have none
        )

    def _layer_major(self) -> Cost:
        found, choice, micro = self.found, self.choice, self.setting.num_micro
        inputs = micro * self.input
        waits = INPUTS_OF[choice.activations]
        kept = micro * found.kept(self.rows) if choice.activations == "keep" else inputs
        copies = 1 + self.setting.prefetch
        staged = copies * self.parameters if choice.parameters != "device" else 0.0
        states = copies * self.states if choice.states != "device" else 0.0
        gradients = (4.0 + self.shape.product_bytes) * found.num_parameters
        need = found.work(self.rows) if choice.activations == "keep" else self.rebuilt()
        at = {"device": 0.0, "host": 0.0, "disk": 0.0}
        at[choice.parameters] += self.parameters
        at["device"] += found.codes if choice.parameters == "device" else 0.0
        at[choice.states] += self.states
        if waits != "device":
            at[waits] += inputs
        if self.links.host is None:  # a CPU's host is its device
            at["device"] += at.pop("host")
        return Cost(
            seconds=self._forward_visit(inputs) + self._backward_visits(inputs),
            held=at["device"],
            kept=kept if waits == "device" else 0.0,
            host=at.get("host", 0.0),
            disk=at["disk"],
            forward=staged + states + found.kept(self.rows),
            backward=staged + states + gradients + need + (copies * self.input if waits != "device" else 0.0),
        )

    def rebuilt(self) -> float:
        """Device bytes while a layer is recomputed and its backward runs, in tiles where asked for.

        The token-wise part is rebuilt a tile at a time, and let go before attention's backward begins.
        """
        found, choice = self.found, self.choice
        mask = found.mask * self.rows
        cut = 1 - choice.attention_block / self.shape.seq_len if choice.attention_block else 0.0
        rest = found.kept(self.rows) - found.mlp_kept(self.rows) - cut * mask
        whole = found.kept(self.rows) + found.work(self.rows) - cut * mask
        if choice.mlp_tiles == 1:
            return whole
        mlp = (found.mlp_kept(self.rows) + found.mlp_work(self.rows)) / choice.mlp_tiles
        others = max(0.0, found.work(self.rows) - found.mlp_work(self.rows))
        return rest + max(mlp, others + self.input)

    def _forward_visit(self, inputs: float) -> float:
        down = self.store_s(INPUTS_OF[self.choice.activations], inputs)
        fetched = self.fetch_s(self.choice.parameters, self.parameters)
        return _overlapped(self.setting.num_micro * self.forward_s(), fetched, down)

    def _backward_visits(self, inputs: float) -> float:
        """The pass that updates, and before it one that finds the norm where clipping needs it."""
        choice = self.choice
        micro_batch = self.backward_s() + self.again_s() + self.tiles_s() + self.weights_s()
        compute = self.setting.num_micro * micro_batch
        fetched = self.fetch_s(choice.parameters, self.parameters)
        fetched += self.fetch_s(INPUTS_OF[choice.activations], inputs)
        first = _overlapped(compute, fetched) * (self.setting.passes - 1)
        if choice.activations == "keep" and self.setting.passes > 1:
            first += self.setting.num_micro * self.forward_s()  # what the first pass let go is rebuilt
        up = fetched + self.fetch_s(choice.states, self.states)
        down = self.store_s(choice.states, self.states) + self.store_s(choice.parameters, self.parameters)
        return first + _overlapped(compute + self.update_s(), up, down)

    def fetch_s(self, place: Place, size: float) -> float:
        """Seconds to move bytes from a place to the device."""
        speed = {"device": None, "host": self.links.host, "disk": self.links.disk}[place]
        return size / speed if speed else 0.0

    def store_s(self, place: Place, size: float) -> float:
        """Seconds to move bytes from the device to a place."""
        written = self.links.disk_write
        return size / written if place == "disk" and written else self.fetch_s(place, size)

    def forward_s(self) -> float:
        """One micro-batch forward."""
        return self.products_s("fprop") + self.attention_s() + FORWARD_SHARE * (self.elementwise_s() + self.calls_s())

    def backward_s(self) -> float:
        """One micro-batch backward, recomputation not counted."""
        loops = (1 - FORWARD_SHARE) * (self.elementwise_s() + self.calls_s())
        return self.products_s("dgrad") + self.products_s("wgrad") + 2.5 * self.attention_s() + loops

    def again_s(self) -> float:
        """One micro-batch's recomputation."""
        kind = self.choice.activations
        if kind == "keep":
            return 0.0
        if kind in SELECTED and opaque(self.found, self.shape):
            return self.forward_s()
        if kind in ("selective", "products"):
            share = FORWARD_SHARE * remade_share(self.found.fused, self.shape.product_bytes)
            return share * self.elementwise_s() + (self.attention_s() if kind == "products" else 0.0)
        again = self.forward_s() - (self.attention_s() if kind == "attention" else 0.0)
        if self.setting.executor == "standard" and self.found.product_flops:
            again -= self.products_s("fprop") * self.found.last_flops / self.found.product_flops
        return again

    def tiles_s(self) -> float:
        """A tiled token-wise part is computed once more inside its backward."""
        if self.choice.mlp_tiles == 1 or not self.found.product_flops:
            return 0.0
        return self.products_s("fprop") * self.found.mlp_flops / self.found.product_flops

    def products_s(self, which: str) -> float:
        """Products of one micro-batch; those that are no linear layer's (experts in one tensor) as they run."""
        rate, weighted = self.rates, 0.0
        for product in self.found.products:
            flops = 2.0 * self.rows * self.shape.seq_len * product.share * product.num_weights
            fmt = getattr(product.gemms, which)
            name = fmt if fmt not in FP8_FORMATS else "fp8" if "fp8" in rate.matmul else "bf16"
            padded = flops * (self.shape.expert_rows if product.share < 1 else 1.0)
            weighted += rate.matmul_s(name, product.num_weights**0.5, padded, compiled=self.shape.compiled)
        others = (self.rows * flops / rate.matmul_rate(fmt, self.shape.dim) for fmt, flops in self.found.others.items())
        return weighted + sum(others)

    def attention_s(self) -> float:
        """Scores and values of one micro-batch, forward."""
        slower = BLOCKED_ATTENTION if self.choice.attention_block else 1.0
        return slower * self.rows * self.found.attention_flops / self.rates.attention[self.shape.product_format]

    def elementwise_s(self) -> float:
        """Norms, activations and residuals of one micro-batch, forward and backward."""
        rate = self.rates.bandwidth if self.found.fused else self.rates.elementwise[self.shape.product_format]
        return self.found.moved(self.rows) / rate

    def calls_s(self) -> float:
        """To enter compiled pieces, or to call operations of layers that are not ours, in one micro-batch, forward and
        backward. Embedding and head are none."""
        if self.found.operations:
            return CALL_SHARE * self.found.operations * self.rates.call_s(self.shape.product_format)
        if not self.shape.compiled or not self.found.products:
            return 0.0
        return calls_s(self.found.called_experts, self.rates)

    def weights_s(self) -> float:
        """Casts of weights and accumulation of their gradients in one micro-batch."""
        casts = 6 if self.shape.stored_bytes > self.shape.product_bytes else 0
        return (casts + 12) * self.found.num_parameters / self.rates.bandwidth

    def update_s(self) -> float:
        """Norm, clipping and update."""
        clip = 12 * self.found.num_parameters / self.rates.bandwidth
        return self.found.num_parameters / self.rates.adam[self.setting.moments] + clip


def _overlapped(compute: float, *transfers: float) -> float:
    """Seconds of computation while something crosses the link, each direction for itself."""
    return max(compute, *transfers) + HIDDEN_SHARE * sum(min(compute, one) for one in transfers)


def layer_seconds(
    found: LayerClass,
    choice: Choice,
    setting: Setting,
    shape: ModelShape,
    recipe: Recipe,
    rates: Ceilings,
    links: Links,
) -> dict[str, float]:
    """What the seconds of `layer_cost` consist of. `link`: what crosses the link and is not hidden."""
    layer = _Layer(found, choice, setting, shape, recipe, rates, links)
    micro, passes = setting.num_micro, setting.passes if setting.executor == "layer_major" else 1
    products = layer.products_s("fprop") + passes * (layer.products_s("dgrad") + layer.products_s("wgrad"))
    loops = FORWARD_SHARE + passes * (1 - FORWARD_SHARE)
    again = passes * (layer.again_s() + layer.tiles_s())
    if choice.activations == "keep" and passes > 1:
        again += layer.forward_s()
    parts = {
        "products": micro * products,
        "attention": micro * (1 + 2.5 * passes) * layer.attention_s(),
        "elementwise": micro * loops * layer.elementwise_s(),
        "calls": micro * loops * layer.calls_s(),
        "recompute": micro * again,
        "weights": micro * passes * layer.weights_s(),
        "optimizer": layer.update_s(),
    }
    parts["link"] = max(0.0, layer.cost().seconds - sum(parts.values()))
    return parts


def end_class(name: str, num_parameters: int, shape: ModelShape) -> LayerClass:
    """Embedding or head as a class of one: parameters and states; its activations are in the phases' base."""
    first = shape.classes[0]
    nothing = type(first.kept)()
    return replace(
        first,
        name=name,
        indices=(-1,),
        num_parameters=num_parameters,
        active_parameters=num_parameters,
        **dict.fromkeys(("kept", "kept_selective", "kept_products", "kept_attention", "input"), nothing),
        **dict.fromkeys(("work", "moved", "mlp_kept", "mlp_work"), nothing),
        mask=0.0,
        products=(),
        product_flops=0.0,
        last_flops=0.0,
        mlp_flops=0.0,
        attention_flops=0.0,
        others={},
        operations=0,
        largest_weight=num_parameters if first.largest_weight else 0,
        codes=0.0,
    )
