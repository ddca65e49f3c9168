"""Choices for a model and its layers: one `GlobalConfig` for all of it, a `LayerMemory` for each layer.

What a choice costs is in `layer_cost`.

Executors. `standard`: one micro-batch after the other through the whole model; everything stays on the device; all
gradients live until the update. `layer_major`: all micro-batches through a layer, then the next; parameters, states and
layer inputs may be elsewhere; one layer's gradients live at a time.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from tilewright.core.config.executors import CAPABILITIES, Capabilities, ExecutorName, capabilities_of
from tilewright.core.config.recipe import Recipe, Tier
from tilewright.core.memory_plan import KIND_OF, Activations, LayerMemory
from tilewright.planner.cost.rank_share import Shards
from tilewright.planner.cost.rank_traffic import RankSpeed
from tilewright.planner.model.constraints import BLOCK_ROWS, SELECTED, Constraints
from tilewright.planner.model.gemms import BYTES
from tilewright.planner.model.model_shape import LayerClass, ModelShape
from tilewright.planner.model.part_weights import Weights
from tilewright.planner.model.roofline import backward_passes

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}
MASTER_BYTES = {"fp32": 4, "split24": 1, "stochastic": 0}

SMALL_LOSS_CHUNKS = (64 * 2**20, 16 * 2**20)
MOST_ROWS = 64
"""Largest micro-batch tried."""

NOTHING_FIXED = Constraints()


@dataclass(frozen=True)
class Links:
    """Bytes/s, one direction. None: there is no such place. `guessed`: what of it was not measured."""

    host: float | None
    disk: float | None
    guessed: str = ""
    disk_write: float | None = None
    """Of the disk; None: as it reads."""
    ranks: RankSpeed | None = None
    """Between the ranks of a run."""


@dataclass(frozen=True)
class GlobalConfig:
    """Choices that are the same for all layers."""

    executor: ExecutorName
    micro_batch_size: int
    num_micro: int
    moments: str
    master: str
    loss_chunk_bytes: int
    passes: int
    """Backward passes of a step: two where clipping by the exact norm comes before the first update."""
    prefetch: int = 1
    group: int = 1
    """Layers that the layer-major executor treats as one."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    shards: Shards = field(default_factory=Shards)
    """How the ranks share the run; rows and micro-batches are those of one rank."""

    @property
    def can(self) -> Capabilities:
        """The capabilities of the executor that was chosen for the whole model."""
        return capabilities_of(self.executor)

    @classmethod
    def of(cls, recipe: Recipe) -> "GlobalConfig":
        """The choice for the whole model (`GlobalConfig`) that a recipe asks for."""
        optim, shards = recipe.optim, Shards.of(recipe)
        rows = shards.rows(recipe)
        micro = min(recipe.train.micro_batch_size, rows)
        return cls(
            executor=recipe.memory.executor,
            micro_batch_size=micro,
            num_micro=-(-rows // micro),
            moments=optim.moments,
            master=optim.master_weights,
            loss_chunk_bytes=recipe.memory.loss_chunk_bytes,
            passes=backward_passes(recipe),
            prefetch=recipe.memory.prefetch,
            group=recipe.memory.layers_per_group,
            optimizer=optim.kind,
            shards=shards,
        )


def settings_of(recipe: Recipe, fixed: Constraints) -> Iterator[GlobalConfig]:
    """Every choice for the whole model; the smaller loss tile last."""
    batch = Shards.of(recipe).rows(recipe)
    most = min(batch, fixed.most_rows or max(MOST_ROWS, recipe.train.micro_batch_size))
    sizes = {2**power for power in range(most.bit_length())} | {min(recipe.train.micro_batch_size, most)}
    if fixed.micro_batch_size is not None:
        sizes = {fixed.micro_batch_size}
    most = recipe.memory.loss_chunk_bytes
    tiles = dict.fromkeys((most, *(tile for tile in SMALL_LOSS_CHUNKS if tile < most)))
    if fixed.loss_chunk_bytes is not None:
        tiles = {fixed.loss_chunk_bytes: None}
    wanted = {fixed.executor} if fixed.executor else set(CAPABILITIES)
    for tile in tiles:
        for executor in executors(recipe):
            if executor not in wanted:
                continue
            for size in sorted(sizes, reverse=True):
                rows = {"micro_batch_size": size, "num_micro": -(-batch // size)}
                yield replace(GlobalConfig.of(recipe), executor=executor, loss_chunk_bytes=tile, **rows)


def executors(recipe: Recipe) -> tuple[ExecutorName, ...]:
    """The executors that may be chosen: those that support a recipe's formats, clipping, adapters and mesh."""
    precision = recipe.precision
    on_mesh: dict[ExecutorName, Capabilities] = {
        name: can for name, can in CAPABILITIES.items() if can.stages == (recipe.parallel.pp > 1)
    }
    scaled = {"pure_fp16", "hybrid"} & {precision.mode, precision.start_mode}
    scaled |= {"fp16"} & {rule.compute for rule in precision.rules}
    need, wanted = "whole_gradient", True  # loss scaling, and formats that move
    if recipe.lora.rank:
        need = "adapters"
    elif recipe.model.task != "causal_lm" and recipe.memory.can.whole_model:
        need = "whole_model"
    elif Shards.of(recipe).cut:
        need = "shard"
    elif recipe.optim.clip == "delayed":
        wanted = False
    elif not (precision.enabled and (scaled or precision.moves_matmuls)):
        return tuple(on_mesh)
    return tuple(name for name, can in on_mesh.items() if getattr(can, need) is wanted)


def state_bytes(weights: Weights, setting: GlobalConfig) -> float:
    """Bytes of the optimizer states of some parameters: two moments, one for Muon's matrices, and the parts that 16-bit
    storage adds."""
    numbers, blocks = 2 * weights.trained, 2 * weights.blocks
    if setting.optimizer == "muon":
        numbers, blocks = numbers - weights.matrices.elements, blocks - weights.matrices.blocks
    moments = MOMENT_BYTES[setting.moments] * numbers + (4 * blocks if setting.moments == "8bit" else 0)
    return moments + MASTER_BYTES[setting.master] * weights.narrow_trained


def update_bytes(weights: Weights, setting: GlobalConfig, shape: ModelShape) -> float:
    """Bytes that a Muon update of these weights takes beyond weights, gradients and states, on all ranks together."""
    if setting.optimizer != "muon":
        return 0.0
    multiplied = BYTES[shape.direction_format]
    return weights.matrices.update_bytes(setting.moments, setting.master, setting.shards.count, multiplied)


def opaque(found: LayerClass, shape: ModelShape) -> bool:
    """True if nothing can be selected among a layer's choices: experts are compiled pieces, which are opaque."""
    return shape.compiled and found.called_experts > 0


def choices(
    found: LayerClass,
    setting: GlobalConfig,
    shape: ModelShape,
    recipe: Recipe,
    links: Links,
    fixed: Constraints = NOTHING_FIXED,
) -> Iterator[LayerMemory]:
    """List all choices for a layer of this class: everything that may be done with it. A layer that keeps all
    activations keeps its parameters, too."""
    exact = recipe.train.checkpoint_inputs == "exact"  # else a layer that is recomputed differs from one that is kept
    if setting.can.activation_checkpoint:
        tiles, block = fixed.mlp_chunks or 1, fixed.attention_block or 0
        there: list[Activations] = list(KIND_OF.values()) if exact else ["recompute"]
        device: Tier = "device"
        allowed: list[Activations] = [kind for kind, _ in fixed.kinds((kind, device) for kind in there)]
        if opaque(found, shape):  # what is asked for stays, and recomputes the layer whole
            allowed = [kind for kind in allowed if kind not in SELECTED] or allowed
        for kind in allowed:
            yield LayerMemory(activations=kind, mlp_chunks=tiles, attention_block=block)
        return
    tiers: list[Tier] = ["device"]
    if links.host:
        tiers.append("host")
    if links.disk:
        tiers.append("disk")
    kinds: list[tuple[Activations, Tier]] = [("keep", "device")] if exact else []
    kinds.append(("recompute", "device"))
    if links.host or fixed.inputs == "host":
        kinds.append(("recompute", "host"))
    if (links.disk and not links.host) or fixed.inputs == "disk":
        kinds.append(("recompute", "disk"))
    whole = found.active_parameters == found.weights.count  # experts stay whole
    chunkings = fixed.chunkings(whole and bool(found.mlp_kept(1)), bool(found.mask) and shape.seq_len > BLOCK_ROWS)
    homes = itertools.product(fixed.tiers("parameters", tiers), fixed.tiers("states", tiers), fixed.kinds(kinds))
    for parameters, states, (kind, waits) in homes:
        for tiles, block in chunkings:
            if kind != "keep" or (parameters == "device" and (tiles, block) == chunkings[0]):
                yield LayerMemory(
                    parameters=parameters,
                    states=states,
                    inputs=waits,
                    activations=kind,
                    mlp_chunks=tiles,
                    attention_block=block,
                )
