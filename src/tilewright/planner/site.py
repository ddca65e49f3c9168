"""Where a run would be: machine, rates, links, mesh and what may be used of them, as everything that plans asks.

The machine at hand is measured when it is asked for; of a published one the links are given. All planners of one place
share what they learned of models, which takes seconds.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.log import say
from tilewright.parallel.world import MeshSizes
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.cost.rank_share import Shards
from tilewright.planner.cost.storage_links import as_links, disk_speed, existing, host_speed, rank_speed
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.model.constraints import Constraints
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner


@dataclass(frozen=True)
class Site:
    """The machine, ranks and budget of a run: everything that a planner asks in addition to the recipe."""

    vocab_size: int
    machine: Machine
    rates: Ceilings
    offload_dir: Path
    """Of the disk tier."""
    mesh: MeshSizes | None = field(default=None, kw_only=True)
    """Of the run's processes, whose machine this is a share of; None: as recipes say."""
    one_machine: bool = field(default=True, kw_only=True)
    """Whether all processes are on this machine; else what they exchange is not priced."""
    links: Links | None = field(default=None, kw_only=True)
    """Of a machine that is not at hand, the disk's among them where bytes may be there; None: they are measured."""
    disk: float | None = field(default=None, kw_only=True)
    """Bytes that may be on the disk; None: what is free there."""
    given: Budget | None = field(default=None, kw_only=True)
    """What the run may use, where it is not what the recipe and the machine say: for advice about more of it."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What is known of rates and ranks, which plans say too."""
    attention_share: float | None = field(default=None, kw_only=True)
    """Of the pairs of positions in full rows, how many the data's documents have; None: the data is not known."""
    progress: Callable[[str], None] | None = field(default=say, kw_only=True)
    """Called with a line of text before a measurement."""
    finder: ShapeFinder | None = field(default=None, kw_only=True, compare=False)
    """Of another place with this tokenizer and machine, whose models are known; None: a new one."""

    def budget(self, recipe: Recipe, *, disk: bool = False) -> Budget:
        """The memory at a site that the run may use; with `disk`, of the tier's disk too, whose speed is measured."""
        if self.given is not None:
            return self.given if disk else self.given.without_disk()
        device = recipe.plan.device_memory or self.machine.device_memory_bytes
        links = self._links(recipe, disk=disk)
        room = 0.0
        if links.disk is not None:
            room = shutil.disk_usage(existing(self.offload_dir)).free if self.disk is None else self.disk
        return Budget(float(device), float(self.machine.host_memory_bytes), links, float(room))

    def _links(self, recipe: Recipe, *, disk: bool) -> Links:
        if self.links is not None:
            return self.links if disk else replace(self.links, disk=None)
        speed = disk_speed(self.offload_dir, self.machine, progress=self.progress) if disk else None
        ranks = Shards.of(self.at_mesh(recipe)).processes if self.one_machine else 1
        between = rank_speed(self.machine, ranks, progress=self.progress)
        return as_links(host_speed(self.machine, progress=self.progress), speed, between)

    def may_use_disk(self, recipe: Recipe) -> bool:
        """True if a run at this site may use the disk as a place like others: it was given, or the recipe stores
        something there."""
        return self.disk is not None or self.given is not None or on_disk(recipe)

    def at_mesh(self, recipe: Recipe) -> Recipe:
        """Fill the recipe's mesh with this site's numbers of processes; -1 in it means what is left."""
        if self.mesh is None:
            return recipe
        sizes = {"dp_replicate": self.mesh.dp_replicate, "dp_shard": self.mesh.dp_shard}
        return changed(recipe, {f"parallel.{name}": size for name, size in sizes.items()})

    def planner(
        self,
        recipe: Recipe,
        fixed: Constraints = Constraints(),  # noqa: B008 (frozen)
        open_formats: frozenset[str] = frozenset(),
    ) -> Planner:
        """A planner of a recipe at this site."""
        recipe, finder = self.at_mesh(recipe), self.shapes
        return Planner(recipe, self.vocab_size, self.machine, self.rates, open_formats, self.notes, fixed, finder)

    @cached_property
    def shapes(self) -> ShapeFinder:
        """The shapes of models that all planners of this site learn."""
        return self.finder or ShapeFinder(self.vocab_size, self.machine, self.attention_share)


def on_disk(recipe: Recipe) -> bool:
    """True if a recipe stores something on the disk of a site."""
    return recipe.memory.can.offload and "disk" in recipe.memory.tiers
