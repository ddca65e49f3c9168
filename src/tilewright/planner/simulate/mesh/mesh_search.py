"""The fastest settings of a space that fit the memory of a rank, found best bound first.

Every setting has a bound from below (`MeshCosts.bound_s`, no table needed). In the order of bounds, those whose bytes
fit are simulated, until no bound is below the slowest of the best that are asked for: what is left cannot be among
them. So the answer is that of simulating all, but for settings whose formula of what is in flight says too much.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from tilewright.core.memory_plan import Activations
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.cost.layer_choices import state_bytes
from tilewright.planner.simulate.mesh.layers_over_stages import spread_layers
from tilewright.planner.simulate.mesh.mesh_model import ShapeKey, StageLayers
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.mesh.rank_memory import Extra, InFlight, RankMemory, rank_memory
from tilewright.planner.simulate.mesh.setting_space import Space
from tilewright.planner.simulate.mesh.setting_step import FP32, MeshCosts, MeshRates, in_all
from tilewright.planner.simulate.schedule_formulas import in_flight_of_1f1b, in_flight_of_interleaved
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.simulated_step import SimulatedStep
from tilewright.planner.simulate.torch_tables import Asked, KeptTables

Tables = Callable[[Asked], ScheduleTable]


@dataclass(frozen=True)
class MeshStep:
    """A setting with what it takes."""

    costs: MeshCosts
    seconds: float
    memory: tuple[RankMemory, ...]
    """By rank of a row."""
    budget_bytes: float
    peak_flops: float
    """Of a rank in a second, as published."""
    table: ScheduleTable | None = None
    """Of a row with stages: the order of its passes."""

    @property
    def setting(self) -> MeshSetting:
        """The mesh setting of a step that the search simulated."""
        return self.costs.setting

    @property
    def simulated(self) -> SimulatedStep | None:
        """The simulated passes of a row with stages, of a step in the mesh search."""
        return None if self.table is None else self.costs.simulated(self.table)

    @cached_property
    def worst(self) -> RankMemory:
        """Memory of the rank that needs most, in a step of the mesh search."""
        return max(self.memory, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        """True if each rank of the mesh has enough memory, in a step of the search."""
        return self.worst.peak <= self.budget_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a step of the mesh search."""
        setting, seq_len = self.setting, self.costs.model.whole.seq_len
        return setting.rows * setting.count * setting.sizes.data * seq_len

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s of all ranks of a mesh that the search simulated."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """The MFU of a simulated mesh: its share of the published peak."""
        flops = self.tokens_per_s * self.costs.model.flops()
        return flops / (self.setting.sizes.world * self.peak_flops)

    @property
    def idle(self) -> float:
        """Share of the mesh's time in which ranks wait for other stages, in a step of the search."""
        return self.parts["idle"]

    @property
    def exposed(self) -> float:
        """Share of the mesh's time in which ranks only communicate, on average, in a step of the search."""
        return self.parts["communication"]

    @cached_property
    def parts(self) -> dict[str, float]:
        """Shares of the mesh's time by what ranks do, in a step of the search; they add up to one."""
        ranks, count = self.costs.ranks, self.setting.count
        mean = {
            name: count * math.fsum(getattr(one, name) for one in ranks) / len(ranks)
            for name in ("recompute", "traffic", "total")
        }
        again = mean["recompute"] * (1 - mean["traffic"] / mean["total"])
        found = {"computation": mean["total"] - mean["traffic"] - again, "recomputation": again}
        found["communication"] = mean["traffic"] + self.costs.exposed.total
        found["update"] = self.costs.update_s
        shares = {name: seconds / self.seconds for name, seconds in found.items()}
        idle = max(0.0, 1 - math.fsum(shares.values())) if len(ranks) > 1 else 0.0  # what rounding leaves is none
        return shares | {"idle": idle}


@dataclass(frozen=True)
class BestMeshes:
    """The result of a search."""

    best: tuple[MeshStep, ...]
    nearest: MeshStep | None
    """Of what does not fit the one with the fewest bytes, where nothing fits."""
    settings: int
    """In the space."""
    simulated: int
    formats: tuple[str, str]
    """Of the optimizer: moments and master weights."""


class MeshSearch:
    """Searches a space.

    Args:
        rates: of the model on its cluster.
        space: what may be chosen.
        budget_bytes: of a rank.
        peak_flops: of a rank in a second, as published.
        tables: of schedules; None: torch's.
    """

    def __init__(
        self, rates: MeshRates, space: Space, budget_bytes: float, peak_flops: float, tables: Tables | None = None
    ) -> None:
        self._rates, self._model, self._space = rates, rates.model, space
        self._budget, self._peak, self._table = budget_bytes, peak_flops, tables or KeptTables()
        self._flights: dict[Asked, tuple[InFlight, ...]] = {}
        self._split = cache(self._spread)
        self._least = cache(self._least_bytes)
        self._alone = cache(self._rank_alone)

    def best(self, number: int, formats: Sequence[tuple[str, str]]) -> BestMeshes:
        """Search for the fastest settings that fit, with the first formats of the optimizer with which anything does.

        Args:
            number: of settings that are wanted.
            formats: moments and master weights, the widest first.
        """
        tried = 0
        for moments, master in formats:
            groups = list(self._space.settings(moments, master))
            tried += len(groups) * len(self._space.kinds)
            found, simulated = self._climb(groups, number)
            if found:
                return BestMeshes(tuple(found), None, tried, simulated, (moments, master))
        return BestMeshes((), self.nearest(*formats[-1]), tried, 0, formats[-1])

    def nearest(self, moments: str, master: str) -> MeshStep:
        """Search for the mesh setting whose worst rank takes the fewest bytes."""
        *_, found = self._shrinking(moments, master, math.inf)
        return found

    def fits(self, moments: str, master: str) -> bool:
        """True if the search finds that a mesh setting fits."""
        return next(self._shrinking(moments, master, math.nextafter(self._budget, math.inf)), None) is not None

    def _shrinking(self, moments: str, master: str, below: float) -> Iterator[MeshStep]:
        """Search of settings, each with a worst rank that takes fewer bytes than the one before and than `below`. In
        the order of what settings take at least, until no other can take less."""
        groups = enumerate(self._space.settings(moments, master))
        for least, _, _, group in sorted((self._static(one), one.rows, place, one) for place, one in groups):
            if least >= below:
                return
            for kind in self._space.kinds:
                one = self._costs(group, kind)
                if self.priced(one, one.bound_s, None).worst.peak >= below:  # by formulas: at least so many
                    continue
                step = self.simulated(one)
                if step.worst.peak < below:
                    below = step.worst.peak
                    yield step

    def all(self, moments: str, master: str) -> Iterator[MeshStep]:
        """Simulate every setting of the mesh search, without bounds."""
        groups = self._space.settings(moments, master)
        yield from (self.simulated(self._costs(one, kind)) for one in groups for kind in self._space.kinds)

    def _costs(self, group: MeshSetting, kind: Activations) -> MeshCosts:
        setting = replace(group, activations=kind)
        if setting.sizes.pp > 1:
            sizes = replace(setting.sizes, dp_replicate=1)
            split = self._split(setting.pipeline, setting.rows, kind, sizes)
            setting = replace(setting, pipeline=replace(setting.pipeline, layers=split))
        return MeshCosts(self._rates, setting)

    def _spread(self, pipeline: Pipeline, rows: int, kind: Activations, sizes: MeshSizes) -> tuple[int, ...]:
        """Layers over stages such that ranks take as long, for a setting of the mesh search."""
        return spread_layers(MeshCosts(self._rates, MeshSetting(sizes, pipeline, rows, 1, kind, "fp32", "fp32")))

    def _static(self, group: MeshSetting) -> float:
        """The least bytes of a setting of the mesh search, whatever it keeps, on a rank with as many layers as
        others."""
        sizes, whole = group.sizes, group.sizes.pp > 1 or (group.count > 1 and not group.reduce_each)
        key = self._model.key(group.master, sizes)
        return self._least(sizes.pp, sizes.dp_shard, key, group.moments, whole)

    def _least_bytes(self, pp: int, shards: int, key: ShapeKey, moments: str, whole: bool) -> float:
        classes = self._model.whole.classes
        held = StageLayers(tuple(found.count for found in classes), first=False, last=False)
        part, all_ = self._model.part(held, key, shards), self._model.weights(held, key)
        setting = MeshSetting(MeshSizes(dp_shard=shards), Pipeline(1), 1, 1, "keep", moments, key.master)
        states = state_bytes(part, self._model.config(setting))
        cut = shards > 1 or (key.tp > 1 and self._model.experts > 0)
        gradients = all_.tensors.gradients(shards) if whole and cut else FP32 * part.trained
        gathered = all_.tensors.gathered(shards) if pp > 1 and cut else 0
        return (part.stored + states + gradients + gathered) / pp

    def _climb(self, groups: Sequence[MeshSetting], number: int) -> tuple[list[MeshStep], int]:
        """The best of the search's settings, and how many were simulated. A group is a setting with all that it may
        keep: its bound is that of keeping everything, until it is its turn."""
        queue: list[tuple[float, int, str, MeshCosts]] = []
        for place, group in enumerate(groups):
            if self._static(group) <= self._budget:
                kept = "keep" if "keep" in self._space.kinds else self._space.kinds[0]
                one = MeshCosts(self._rates, replace(group, activations=kept))  # `least_s` is that of any split
                queue.append((one.least_s, place, "", one))
        heapq.heapify(queue)
        found: list[tuple[float, int, MeshStep]] = []
        simulated = 0
        while queue:
            bound, place, kind, one = heapq.heappop(queue)
            if len(found) == number and bound >= -found[0][0]:
                break
            if not kind:
                for each in self._space.kinds:
                    other = self._costs(groups[place], each)
                    heapq.heappush(queue, (other.bound_s, place, each, other))
                continue
            if not self._may_fit(one):
                continue
            step, simulated = self.simulated(one), simulated + 1
            if not step.fits:
                continue
            entry = (-step.seconds, -simulated, step)
            if len(found) < number:
                heapq.heappush(found, entry)
            else:
                heapq.heappushpop(found, entry)
        return [step for _, _, step in sorted(found, key=lambda entry: (-entry[0], -entry[1]))], simulated

    def simulated(self, one: MeshCosts) -> MeshStep:
        """A setting of the mesh search simulated, its passes in the order of its schedule's table."""
        if one.setting.sizes.pp == 1:
            return self.priced(one, one.bound_s, None)
        asked = one.setting.without_layers(), one.simulated_count
        table = self._table(asked)
        if asked not in self._flights:
            self._flights[asked] = in_flight_of(one.simulated(table))
        seconds = in_all(one.row_s(table), one) + one.exposed.total + one.update_s
        return replace(self.priced(one, seconds, self._flights[asked]), table=table)

    def priced(self, one: MeshCosts, seconds: float, flights: Sequence[InFlight] | None) -> MeshStep:
        """A setting of the mesh search that takes so long; without a table what is in flight is taken from formulas."""
        flights = flights or flights_of(one.setting)
        memory = tuple(self._memory(one, rank, flight) for rank, flight in enumerate(flights))
        return MeshStep(one, seconds, memory, self._budget, self._peak)

    def _may_fit(self, one: MeshCosts) -> bool:
        """True if a setting of the mesh search may fit by formulas, the ranks with both ends of the model first."""
        flights = flights_of(one.setting)
        order = sorted(range(len(flights)), key=lambda rank: (not one.held[rank].last, rank))
        return all(self._memory(one, rank, flights[rank]).peak <= self._budget for rank in order)

    def _memory(self, one: MeshCosts, rank: int, flight: InFlight) -> RankMemory:
        setting, sizes = one.setting, one.setting.sizes
        pipeline = Pipeline(min(2, sizes.pp))  # no more of it matters
        same = MeshSizes(pp=pipeline.pp, dp_shard=sizes.dp_shard, tp=sizes.tp, ep=sizes.ep)
        alone, extra = self._alone(replace(setting, sizes=same, pipeline=pipeline, count=min(2, setting.count)),
                                   one.held[rank])  # fmt: skip
        return alone.with_flight(extra, flight)

    def _rank_alone(self, setting: MeshSetting, held: StageLayers) -> tuple[RankMemory, Extra]:
        return rank_memory(self._model, setting, held, self._budget)


def flights_of(setting: MeshSetting) -> list[InFlight]:
    """Micro-batches in flight on each rank of a row, by the formulas of schedules: at least as many as their tables
    have."""
    p, m, pipeline = setting.pipeline.pp, setting.count, setting.pipeline
    if pipeline.schedule == "1f1b":
        return [InFlight(float(in_flight_of_1f1b(p, m, rank))) for rank in range(p)]
    if pipeline.schedule in ("interleaved", "interleaved_deferred"):
        return [InFlight(in_flight_of_interleaved(p, m, pipeline.virtual, rank)) for rank in range(p)]
    return [InFlight(1.0)] * p


def in_flight_of(step: SimulatedStep) -> tuple[InFlight, ...]:
    """Micro-batches in flight on each rank of a row, by the simulated table."""
    costs, found = step.costs.passes, []
    for rank, row in enumerate(step.table.rows):
        mine = sum(costs.shares[0][stage] for stage, of in enumerate(step.table.rank_of) if of == rank)
        waiting = most = 0.0
        for one in (one for slot in row for one in slot):
            waiting += {"I": 1.0, "W": -1.0}.get(one.kind, 0.0) * costs.held(0, one)
            most = max(most, waiting)
        found.append(InFlight(step.peaks[rank] / mine, most / mine))
    return tuple(found)
