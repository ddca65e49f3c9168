"""A step of a setting on a cluster: seconds of every stage's passes with their traffic, a bound from below, the step.

What is hidden and what is not:

    tensor parallelism   what layers exchange by pass (`cost.rank_traffic`), where they are computed again too; nothing
    hides
                         it
    experts              rows of tokens travel there and back, forward and backward; nothing hides it
    shards               a layer's parameters are gathered while the layer before computes; of that, what takes longer
                         than the computation is waited for. Under stages: `stage_gathers`
    gradients            reduced while the layer below computes, where there are no stages; under stages after the last
                         pass, all at once (torch's runtime), and summed over copies likewise
    stages               messages travel while ranks compute (`slot_times.simulate`)
"""

import itertools
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from tilewright.core.config.sections.parallel import WireName
from tilewright.core.memory_plan import Activations
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.cost.rank_traffic import WIRE_SHARE, RankTraffic, cut_ends, cut_layer, routed_layer
from tilewright.planner.model.part_weights import Weights
from tilewright.planner.simulate.mesh.cluster import Cluster
from tilewright.planner.simulate.mesh.mesh_model import MeshModel, PassSeconds, ShapeKey, StageLayers
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.pass_costs import KindSeconds, Network, PassCosts, StepCosts
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.simulated_step import SimulatedStep

ROUNDS = 4
"""Times the ranks of a row, as micro-batches that are simulated; more of them take as long as the slowest rank."""
FP32 = 4


@dataclass(frozen=True)
class Exposed:
    """Seconds of a step in which a rank only communicates, outside of passes."""

    gather: float = 0.0
    reduce: float = 0.0

    @property
    def total(self) -> float:
        """Sum both parts of the exposed seconds of a setting's step."""
        return self.gather + self.reduce


class MeshRates:
    """Seconds of stages of a model on a cluster; each is worked out once.

    Args:
        model: of the run.
        cluster: that it runs on.
    """

    def __init__(self, model: MeshModel, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self.layer = cache(self._layer)
        self.stage = cache(self._stage)
        self.held = cache(self._held)
        self.update_s = cache(self._update_s)
        self.exposed = cache(self._exposed)
        self.row_s: dict[tuple[Pipeline, StepCosts], float] = {}
        """Seconds of the passes of a row, of those that were simulated in the order of a schedule: meshes that differ
        in copies and shards alone have the same ones, and so have searches that differ in what is sent or stored."""

    def _held(self, pipeline: Pipeline) -> tuple[tuple[StageLayers, ...], tuple[StageLayers, ...]]:
        """The layers that stages of a setting hold, and the work of ranks in its step."""
        whole = self.model.whole
        ranges = pipeline.split(whole.num_layers, whole.layer_costs, whole.end_costs)
        stages = tuple(self.model.layers_of(ranges, [stage]) for stage in range(len(ranges)))
        return stages, tuple(self.model.layers_of(ranges, pipeline.stages_of(rank)) for rank in range(pipeline.pp))

    def _layer(self, place: int, one: "PassKey") -> PassSeconds:
        """Seconds of a layer in a setting's step, of the class at this place, with its traffic."""
        found = self.model.passes(place, one.rows, one.activations, one.shape)
        there, again, back = self._traffic(place, one)
        again = 0.0 if one.activations == "keep" else again
        return PassSeconds(
            found.forward + there, found.recompute + again, found.dgrad + back, found.wgrad, there + again + back
        )

    def _traffic(self, place: int, one: "PassKey") -> tuple[float, float, float]:
        """Traffic of a layer in a setting's step, forward, where it is computed again, and backward: rows of tokens
        that ranks exchange."""
        shape, tp, ep = self.model.whole, one.shape.tp, one.shape.ep
        found, recipe = shape.classes[place], self.model.recipe
        passes = cut_layer(found, shape, recipe, one.rows, tp, one.shape.shards)
        mine = self.model.shape(one.shape)
        passes = passes.plus(routed_layer(mine.classes[place], recipe, one.rows, ep))
        there, again, back = (self._cut_s(each, tp, ep) for each in (passes.forward, passes.again, passes.backward))
        return there, again, back

    def _cut_s(self, traffic: RankTraffic, tp: int, ep: int = 1) -> float:
        """Seconds of a setting's step in exchanges between ranks with other parts of matrices or other experts; a sum
        that all have is both of the others."""
        whole = (traffic.gather, traffic.scatter, 2 * traffic.reduce)
        there_and_back = 2 * self.cluster.exchange_s(traffic.exchange / 2, ep, 1)
        return sum(self.cluster.ring_s(size, tp, 1) for size in whole) + there_and_back

    def _head(self, one: "PassKey") -> PassSeconds:
        """Seconds of the head in a setting's step, with what ranks exchange at both ends of the model."""
        found, tp = self.model.head(one.rows, one.shape), one.shape.tp
        ends = cut_ends(self.model.whole, self.model.recipe, one.rows, tp, one.shape.shards)
        there, back = self._cut_s(ends.forward, tp), self._cut_s(ends.backward, tp)
        return found.plus(PassSeconds(there, 0.0, back, 0.0, there + back))

    def _stage(self, held: StageLayers, one: "PassKey") -> PassSeconds:
        """Seconds of one micro-batch of a setting's step in some layers and ends."""
        found = PassSeconds()
        for place, count in enumerate(held.counts):
            if count:
                found = found.plus(self.layer(place, one).times(count))
        return found.plus(self._head(one)) if held.last else found

    def _update_s(self, held: StageLayers, setting: "UpdateKey") -> float:
        """Seconds of the optimizer in a setting's step."""
        weights = self.model.weights(held, setting.shape)
        return self.model.update_s(weights, setting.moments, setting.shape, setting.dp_shard)

    def _exposed(self, held: StageLayers, one: "PassKey", count: int, sizes: MeshSizes, sums: "SumKey") -> Exposed:
        """The seconds of the traffic of shards and copies that computation does not hide, in a setting's step."""
        gather = reduce = 0.0
        reduce_each, wire = sums
        alone, shape, shards = sizes.pp == 1, self.model.shape(one.shape), sizes.dp_shard
        if self.model.shards(sizes).cut:
            resharded = self.model.recipe.parallel.reshard_after_forward
            forwards = stage_gathers(count, resharded) if not alone else count if resharded else 1
            scatters = count if alone and reduce_each else 1
            for place, layers in enumerate(held.counts):
                tensors = shape.classes[place].weights.tensors.cut(shards)
                passes = self.layer(place, one) if self.cluster.overlaps else PassSeconds()  # that hide it
                whole = self._over_shards(tensors.travels(shards), sizes)
                back = self._summed_s(tensors.gradients(shards), sizes, wire)
                gather += layers * forwards * max(0.0, whole - passes.forward)
                if alone:
                    again = whole if resharded else 0.0
                    gather += layers * (forwards - scatters) * max(0.0, again - passes.backward) * (forwards > scatters)
                    reduce += layers * scatters * max(0.0, again + back - passes.backward)
                else:
                    reduce += layers * back
            ends = shape.embedding if held.first else Weights()
            ends = ends + shape.head if held.last else ends
            tensors = ends.tensors.cut(shards)
            gather += (count if alone else 1) * self._over_shards(tensors.travels(shards), sizes)
            reduce += self._summed_s(tensors.gradients(shards), sizes, wire)
        if sizes.dp_replicate > 1:
            part = self.model.part(held, one.shape, shards)
            ring = sizes.dp_replicate, sizes.tp * shards
            sent = WIRE_SHARE[wire] * FP32 * part.trained
            there = self.cluster.ring_s(sent, *ring) if wire == "fp32" else self.cluster.exchange_s(sent, *ring)
            reduce += there + self.cluster.ring_s(sent, *ring)
        return Exposed(gather, reduce)

    def _summed_s(self, num_bytes: float, sizes: MeshSizes, wire: WireName) -> float:
        """Seconds of a setting's step to sum FP32 gradients over shards. In a wire format each rank sends the others
        theirs, which add them."""
        if wire == "fp32":
            return self._over_shards(num_bytes, sizes)
        return self.cluster.exchange_s(WIRE_SHARE[wire] * num_bytes, *self._sharing(sizes))

    def _over_shards(self, num_bytes: float, sizes: MeshSizes) -> float:
        return self.cluster.ring_s(num_bytes, *self._sharing(sizes))

    def _sharing(self, sizes: MeshSizes) -> tuple[int, int]:
        """Ranks of a setting that share most of a layer, and how far they are apart: of experts those too that cut
        matrices."""
        if self.model.shards(sizes).experts_apart:
            return sizes.dp_shard * sizes.tp, 1
        return sizes.dp_shard, sizes.tp


class PassKey(NamedTuple):
    """The numbers that decide how long passes of a layer take."""

    rows: int
    activations: Activations
    shape: ShapeKey


class SumKey(NamedTuple):
    """The numbers that decide how long sums of gradients take."""

    reduce_each: bool
    wire: WireName


class UpdateKey(NamedTuple):
    """The numbers that decide how long an update takes."""

    moments: str
    dp_shard: int
    shape: ShapeKey


@dataclass(frozen=True)
class MeshCosts:
    """The costs of a step of a setting."""

    rates: MeshRates
    setting: MeshSetting

    @property
    def model(self) -> MeshModel:
        """The model of the setting's run."""
        return self.rates.model

    @cached_property
    def shape_key(self) -> ShapeKey:
        """The key of a rank's part of the model under a setting."""
        return self.model.key(self.setting.master, self.setting.sizes)

    @cached_property
    def key(self) -> PassKey:
        """The key of the passes in a setting's step."""
        one = self.setting
        return PassKey(one.rows, one.activations, self.shape_key)

    @cached_property
    def held(self) -> tuple[StageLayers, ...]:
        """The layers that each rank of a row holds under a setting."""
        return self.rates.held(self.setting.pipeline)[1]

    @cached_property
    def stages(self) -> list[PassSeconds]:
        """Seconds of one micro-batch of a setting's step in each stage."""
        return [self.rates.stage(held, self.key) for held in self.rates.held(self.setting.pipeline)[0]]

    @cached_property
    def ranks(self) -> list[PassSeconds]:
        """Seconds of one micro-batch of a setting's step on each rank of a row."""
        return [self.rates.stage(held, self.key) for held in self.held]

    @cached_property
    def update_s(self) -> float:
        """Seconds of the update in a setting's step, on the rank that takes longest."""
        key = UpdateKey(self.setting.moments, self.setting.sizes.dp_shard, self.shape_key)
        return max(self.rates.update_s(held, key) for held in dict.fromkeys(self.held))

    @cached_property
    def exposed(self) -> Exposed:
        """Exposed exchanges of shards and copies in a setting's step, on the rank that waits longest."""
        one = self.setting
        found = [
            self.rates.exposed(held, self.key, one.count, one.sizes, SumKey(one.reduce_each, one.wire))
            for held in dict.fromkeys(self.held)
        ]
        return max(found, key=lambda each: each.total)

    # ---- the step ----

    @cached_property
    def least_s(self) -> float:
        """The least seconds of a setting's step, whatever is kept and however layers are split: the mean over ranks of
        their passes."""
        total = sum(one.total - one.recompute for one in self.stages)
        return self.setting.count * total / self.setting.pipeline.pp

    @cached_property
    def bound_s(self) -> float:
        """The least seconds of a setting's step by its ranks: all passes of a rank, after the first forward pass has
        reached it and before the last backward pass has left it."""
        count, defers = self.setting.count, self.setting.pipeline.defers
        first = {self.setting.pipeline.rank_of(stage): stage for stage in range(len(self.stages) - 1, -1, -1)}
        fills = [0.0, *itertools.accumulate(one.forward for one in self.stages)]
        backs = (one.backward - (one.wgrad if defers else 0.0) for one in self.stages)
        drains = [0.0, *itertools.accumulate(backs)]
        longest = 0.0
        for rank, seconds in enumerate(self.ranks):
            fill, drain = fills[first[rank]], drains[first[rank]]
            ends = count * (seconds.total - seconds.wgrad) + drain if defers else count * seconds.total + drain
            longest = max(longest, fill + max(ends, count * seconds.total))
        return longest + self.exposed.total + self.update_s

    @property
    def simulated_count(self) -> int:
        """Micro-batches of the table that is simulated of a setting's step."""
        pp, count = self.setting.pipeline.pp, self.setting.count
        return count if count <= (ROUNDS + 1) * pp else ROUNDS * pp

    def pass_costs(self, count: int) -> PassCosts:
        """A setting's costs of the passes of one row with `count` micro-batches."""
        pp = self.setting.pipeline.pp
        sums = PassSeconds()
        for one in self.stages:
            sums = sums.plus(one)
        kinds = KindSeconds(sums.forward / pp, (sums.recompute + sums.dgrad) / pp, sums.wgrad / pp)
        shares = tuple(one.total / kinds.total for one in self.stages)
        return PassCosts(kinds, ((1.0,) * count,), (shares,), ((1.0,) * pp,))

    def step_costs(self, count: int) -> StepCosts:
        """A setting's costs of a step of one row with `count` micro-batches and their messages."""
        sizes, shape = self.setting.sizes, self.model.whole
        message = self.setting.rows * shape.seq_len * shape.dim * shape.stream_bytes
        network = Network(1, inter=self.rates.cluster.hop(sizes.world // sizes.pp))
        return StepCosts(self.pass_costs(count), float(message), network)

    def simulated(self, table: ScheduleTable) -> SimulatedStep:
        """A row's passes of a setting's step, simulated; of `simulated_count` micro-batches."""
        step = SimulatedStep.of(table, self.step_costs(table.num_microbatches))
        self.rates.row_s[self.setting.without_layers(), step.costs] = step.seconds
        return step

    def row_s(self, table: ScheduleTable) -> float:
        """Seconds of a row's passes of a setting's step, simulated once."""
        known = self.rates.row_s.get((self.setting.without_layers(), self.step_costs(table.num_microbatches)))
        return self.simulated(table).seconds if known is None else known


def stage_gathers(count: int, resharded: bool) -> int:
    """How often in a setting's step a stage's layers are put together in a step of so many micro-batches, in whatever
    order they pass it.

    Without `reshard_after_forward` once. With it they are in parts after each forward pass, and stay whole after a
    backward one (torch's runtime): a forward pass gathers except behind a backward pass, a backward pass only behind a
    forward one.
    """
    return count + 1 if resharded else 1


def in_all(step_s: float, costs: MeshCosts) -> float:
    """Seconds of the passes of a setting's whole step, from those of a simulated one with fewer micro-batches."""
    more = costs.setting.count - costs.simulated_count
    return step_s + more * max(one.total for one in costs.ranks)
