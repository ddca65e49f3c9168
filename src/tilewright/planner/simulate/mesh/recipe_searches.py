"""Searches of a recipe over the meshes of a cluster, and what of the recipe would have to change for a faster one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.core.config.change_recipe import accepted, changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.planner.cost.step_phases import FRAGMENTS
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.planner.planner import narrower
from tilewright.planner.simulate.mesh.cluster import Cluster
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.simulate.mesh.mesh_search import BestMeshes, MeshSearch, MeshStep, Tables
from tilewright.planner.simulate.mesh.setting_space import Space
from tilewright.planner.simulate.mesh.setting_step import MeshRates

WORTH = 1.01
"""Times as many tokens per second: what gains less is not said."""
NUM_CHANGES = 3
_SAME_COSTS = frozenset(("parallel.grad_sync", "optim.moments", "train.global_batch_size"))
"""Settings that change nothing of what layers cost."""


@dataclass(frozen=True)
class MeshChange:
    """Settings of a recipe that change what is learned, and the best mesh with them."""

    settings: Mapping[str, Any]
    step: MeshStep
    gain: float
    """Tokens per second over those of the best mesh without."""

    @property
    def words(self) -> str:
        """The changes that searches of a recipe advise, as they are typed."""
        return " ".join(f"--{name} {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class MeshFinder:
    """Searches over the meshes of one cluster.

    Args:
        recipe: whose mesh does not matter.
        vocab_size: of the tokenizer.
        machine: of a rank.
        ceilings: of the machine.
        cluster: of the ranks.
        budget_bytes: of a rank.
        peak_flops: of a rank in a second, as published.
        tables: of schedules.
    """

    recipe: Recipe
    vocab_size: int
    machine: Machine
    ceilings: Ceilings
    cluster: Cluster
    budget_bytes: float
    peak_flops: float
    tables: Tables
    rates: MeshRates | None = field(default=None, repr=False)
    """Of the model, where another finder has them."""

    def with_rates(self, model: MeshModel | None = None) -> "MeshFinder":
        """Make the searches of a recipe with the rates of `model`, another finder's model of this machine; they share
        its costs."""
        model = model or MeshModel(self.recipe, self.vocab_size, self.machine, self.ceilings)
        return replace(self, rates=MeshRates(model, self.cluster))

    @property
    def model(self) -> MeshModel:
        """The costs of the recipe's model on this machine, which its searches share."""
        assert self.rates is not None
        return self.rates.model

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a recipe's searches on what the model's shape does not know."""
        return self.model.whole.notes

    def space(self) -> Space:
        """The space of settings that a recipe's searches choose from."""
        space = Space.of(self.model, self.cluster.world, self.cluster.gpus)
        return replace(space, batch=self.recipe.train.global_batch_size, wire=self.recipe.parallel.grad_sync)

    def best(self, number: int) -> BestMeshes:
        """Search a recipe's meshes for the fastest settings that fit, with narrower formats of the optimizer where the
        recipe's do not.

        Raises:
            ConfigError: no mesh fills the world.
        """
        return self._search().best(number, self._formats())

    def nearest(self) -> MeshStep:
        """Search a recipe's meshes for the one whose worst rank takes the fewest bytes, with the narrowest formats of
        the optimizer.

        Raises:
            ConfigError: no mesh fills the world.
        """
        return self._search().nearest(*self._formats()[-1])

    def fits(self) -> bool:
        """True if a recipe's search finds some mesh that fits, with the narrowest formats of the optimizer.

        Raises:
            ConfigError: no mesh fills the world.
        """
        return self._search().fits(*self._formats()[-1])

    def nearest_memory(self) -> float:
        """Bytes of a rank's device with which the nearest mesh of a recipe's search fits."""
        kept = self.nearest().worst.peak - FRAGMENTS * self.budget_bytes  # an allocator's share is one of the budget
        return kept / (1 - FRAGMENTS) / (1 - self.recipe.plan.margin)

    def _search(self) -> MeshSearch:
        space = self.space()
        space.check()
        assert self.rates is not None
        return MeshSearch(self.rates, space, self.budget_bytes, self.peak_flops, self.tables)

    def _formats(self) -> list[tuple[str, str]]:
        """The optimizer formats that a recipe's searches try, moments and master weights: the recipe's first and then
        narrower ones."""
        own = (self.recipe.optim.moments, self.recipe.optim.master_weights)
        pairs = ((one["optim.moments"], one.get("optim.master_weights", own[1])) for one in narrower(self.recipe))
        return [own, *pairs]

    def with_settings(self, settings: Mapping[str, Any]) -> "MeshFinder":
        """Searches of the recipe with other settings."""
        other = replace(self, recipe=changed(self.recipe, settings))
        return other if settings.keys() <= _SAME_COSTS else other.with_rates()

    def changes(self, found: MeshStep) -> tuple[MeshChange, ...]:
        """Changes of the recipe that would make the best mesh of its search faster, the one that gains most first. All
        of it changes what is learned: what does not was searched.

        Args:
            found: the best mesh of the recipe as it is.
        """
        tried = []
        for settings in _candidates(self.recipe, found):
            if not accepted(self.recipe, settings):
                continue
            other = self.with_settings(settings).best(1)
            if other.best and other.best[0].tokens_per_s > WORTH * found.tokens_per_s:
                step = other.best[0]
                tried.append(MeshChange(settings, step, step.tokens_per_s / found.tokens_per_s))
        return tuple(sorted(tried, key=lambda one: -one.gain)[:NUM_CHANGES])


def _candidates(recipe: Recipe, found: MeshStep) -> Iterator[dict[str, Any]]:
    """List changes of a recipe that are worth a search: fewer bytes that are sent, kept or multiplied, and more rows
    per step."""
    if recipe.parallel.grad_sync == "fp32" and found.parts["communication"] > WORTH - 1:
        yield {"parallel.grad_sync": "bf16"}
        yield {"parallel.grad_sync": "fp8"}
    if recipe.optim.moments != "8bit" and found.setting.moments != "8bit":
        yield {"optim.moments": "8bit"}
    if recipe.precision.mode == "bf16_mixed":
        yield {"precision.mode": "fp8_tile"}
    if found.parts["idle"] + found.parts["communication"] + found.parts["update"] > WORTH - 1:
        yield {"train.global_batch_size": 2 * recipe.train.global_batch_size}
