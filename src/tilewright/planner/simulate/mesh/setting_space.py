"""All settings that a search may choose: meshes that fill the world, schedules, micro-batches, what is kept.

Left out is what another setting beats by construction: `gpipe` (the passes of `1f1b`, more in flight). Formats of the
optimizer change what is learned, so the recipe's own come first, and narrower ones only where those do not fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import get_args

from tilewright.core.config.sections.parallel import ScheduleName, WireName
from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import Activations
from tilewright.models.decoder.config import DecoderConfig
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting

MOST_ROWS, MOST_PP = 16, 64
"""Rows of a micro-batch and ranks of a row that are tried, at most."""
VIRTUAL = (2, 4)


@dataclass(frozen=True)
class Space:
    """The settings that may be chosen.

    Example:
        >>> space = Space(world=4, gpus=4, layers=8, heads=2, widths=512, experts=0, batch=8)
        >>> sorted({str(sizes) for sizes in space.meshes()})[:2]
        ['dp_replicate = 1, dp_shard = 2, tp = 2', 'dp_replicate = 1, dp_shard = 4']
    """

    world: int
    gpus: int
    """In a node: tensor parallelism stays inside."""
    layers: int
    heads: int
    """That tensor parallelism divides: of queries and of keys. 1: matrices stay whole."""
    widths: int
    """That it divides together with shards: of all matrices that it cuts."""
    experts: int
    batch: int
    """Rows of a step."""
    wire: WireName = "fp32"
    """What gradients are sent as: changes what is learned, so it is the recipe's."""
    schedules: tuple[ScheduleName, ...] = tuple(name for name in get_args(ScheduleName) if name != "gpipe")
    kinds: tuple[Activations, ...] = get_args(Activations)

    @staticmethod
    def of(model: MeshModel, world: int, gpus: int) -> "Space":
        """The space of mesh settings for a model and its recipe's batch."""
        recipe, layers = model.recipe, model.whole.num_layers
        batch, wire = recipe.train.global_batch_size, recipe.parallel.grad_sync
        return Space(world, gpus, layers, *_cut(model.decoder), model.experts, batch, wire)

    def check(self) -> None:
        """Check the space of settings: raise where no mesh fills the world.

        Raises:
            ConfigError: none does.
        """
        if next(self.settings("fp32", "fp32"), None) is None:
            rows = self.world * -(-self.batch // self.world)
            raise ConfigError(
                "No mesh fills the world",
                got=f"{self.world} GPUs in nodes of {self.gpus}, {self.layers} layers, {self.batch} rows in a step",
                need="ranks that read other rows divide the rows of a step; ranks in a row have a layer at least",
                try_=f"--train.global_batch_size {rows}",
                where="--world",
            )

    def meshes(self) -> Iterator[MeshSizes]:
        """List the meshes of the space of settings: those that fill the world."""
        for pp in _divisors(self.world, min(self.layers, MOST_PP)):
            for tp in _divisors(self.world // pp, self.gpus):
                if self.gpus % tp or self.heads % tp:
                    continue
                data = self.world // pp // tp
                if self.batch % data:
                    continue
                for shard in _divisors(data, data):
                    if tp > 1 and self.widths % (tp * shard):
                        continue
                    for ep in _divisors(shard * tp, self.experts) if self.experts else (1,):
                        if ep == 1 or self.experts % ep == 0:
                            yield MeshSizes(pp=pp, dp_replicate=data // shard, dp_shard=shard, tp=tp, ep=ep)

    def pipelines(self, pp: int) -> Iterator[Pipeline]:
        """List the pipeline schedules of the space of settings, for `pp` ranks in a row."""
        if pp == 1:
            yield Pipeline(1)
            return
        for name in self.schedules:
            for virtual in VIRTUAL if name.startswith("interleaved") else (1,) if name in ("1f1b", "gpipe") else (2,):
                if pp * virtual <= self.layers:
                    yield Pipeline(pp, name, virtual)

    def settings(self, moments: str, master: str) -> Iterator[MeshSetting]:
        """All settings of the space, with these formats of the optimizer; each stands for all `kinds` of what may be
        kept."""
        for sizes in self.meshes():
            each = self.batch // sizes.data
            for rows in (one for one in _powers(MOST_ROWS) if each % one == 0):
                count = each // rows
                for pipeline in self.pipelines(sizes.pp):
                    if sizes.pp > 1 and not pipeline.takes(count):
                        continue
                    one = MeshSetting(sizes, pipeline, rows, count, "keep", moments, master, wire=self.wire)
                    yield one
                    if sizes.pp == 1 and count > 1 and (sizes.dp_shard > 1 or (self.experts and sizes.tp > 1)):
                        yield replace(one, reduce_each=True)


def _cut(config: DecoderConfig | None) -> tuple[int, int]:
    """Heads and widths of a decoder for the space of settings: what `tp` must divide, and what `tp` and shards together
    must (`parallel.inside.tensor`)."""
    if config is None:
        return 1, 1
    if config.layers:
        of_layers = [_cut(config.at(layer)) for layer in range(config.num_layers)]
        return gcd(*(heads for heads, _ in of_layers)), gcd(*(widths for _, widths in of_layers))
    hidden = gcd(config.ffn_dim, config.shared_width if config.num_experts else 0)
    if config.attention == "mla":
        heads, widths = config.num_heads, (config.qk_head_dim, config.qk_nope_head_dim + config.v_head_dim)
        return gcd(heads, hidden), gcd(hidden, *(heads * width for width in widths))
    heads = gcd(config.num_heads, config.num_kv_heads)
    return gcd(heads, hidden), gcd(hidden, heads * config.head_dim)


def _divisors(number: int, most: int) -> Sequence[int]:
    return [one for one in range(1, min(number, most) + 1) if number % one == 0]


def _powers(most: int) -> Iterator[int]:
    one = 1
    while one <= most:
        yield one
        one *= 2
