"""A step of a run's own mesh, simulated before the run begins: what is measured of the run stands beside it.

Without stages computation is that of the run's plan. With them the passes of a row are simulated in the order of the
schedule that the run executes. Exchanges take the speed that processes of this machine have, and nothing hides them
there; GPUs have published links, and hide what `simulated_step` says.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import KIND_OF, STEP_PHASES, Activations
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.cost.rank_traffic import RankSpeed, RankTraffic, cut_traffic
from tilewright.planner.machine.gpu_specs import TABLE
from tilewright.planner.machine.link_specs import links_of
from tilewright.planner.plan import Plan
from tilewright.planner.simulate.mesh.cluster import Cluster, cluster_of
from tilewright.planner.simulate.mesh.mesh_model import MeshModel, part_of
from tilewright.planner.simulate.mesh.mesh_search import in_flight_of
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.mesh.rank_memory import rank_memory
from tilewright.planner.simulate.mesh.setting_step import MeshCosts, MeshRates, stage_gathers
from tilewright.planner.simulate.pass_costs import Link
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.site import Site


@dataclass(frozen=True)
class Forecast:
    """The expected seconds and bytes of a step on the ranks of a run."""

    step_s: float
    exchange_s: float
    """Of these, in which the first rank only exchanges; messages between stages left out."""
    bound_s: float
    """The same if nothing of it were hidden."""
    idle: float | None
    """Share of the ranks' time between the first pass and the last one in which they wait; None without stages."""
    sent_bytes: Mapping[str, float]
    """By axis of the mesh, of the first rank."""
    peak_bytes: tuple[float, ...]
    """By rank of a row, in a step; those of other rows are the same."""

    def to_json(self) -> dict[str, object]:
        """The forecast of a mesh's step as plain types."""
        return {**asdict(self), "sent_bytes": dict(self.sent_bytes), "peak_bytes": list(self.peak_bytes)}


def forecast(recipe: Recipe, plan: Plan, site: Site, sizes: MeshSizes, table: ScheduleTable | None) -> Forecast | None:
    """Forecast a step on the run's own mesh: time, traffic and memory.

    Args:
        recipe: that it runs.
        plan: of the run; with stages that of one process with the layers of a rank.
        site: where it runs.
        sizes: of its mesh.
        table: the order of passes; None without stages.

    Returns:
        None where it is not known what ranks exchange: machines between which nothing was measured, executors that run
        layer by layer, a model that cannot be traced.
    """
    cluster = _cluster(plan, site, sizes)
    if cluster is None or plan.shape.unknown or not plan.setting.can.one_micro_batch:
        return None
    recipe = _as_run(recipe, sizes)
    model = MeshModel(recipe, site.vocab_size, site.machine, site.rates, site.shapes)
    setting = _setting(recipe, sizes)
    costs = MeshCosts(MeshRates(model, cluster), setting)
    unhidden = MeshCosts(MeshRates(model, replace(cluster, overlaps=False)), setting)
    bound_s = _exchange_s(unhidden)
    if table is None:
        computed_s = plan.step_s - plan.seconds.get("communication", 0.0)
        exchange_s = _exchange_s(costs)
        peaks = (float(plan.allocated_bytes),)
        return Forecast(computed_s + exchange_s, exchange_s, bound_s, None, _sent(costs, recipe), peaks)
    step = costs.simulated(table)
    seconds = step.seconds + costs.exposed.total + costs.update_s
    peaks = []
    for held, flight in zip(costs.held, in_flight_of(step), strict=True):
        alone, extra = rank_memory(model, setting, held, plan.budget.device)
        phases = alone.with_flight(extra, flight).phases
        steps = (owners for name, owners in phases.items() if name.startswith(STEP_PHASES))
        peaks.append(max(sum(owners.values()) for owners in steps) - plan.reserve_bytes)
    return Forecast(seconds, _exchange_s(costs), bound_s, step.idle, _sent(costs, recipe), tuple(peaks))


def _as_run(recipe: Recipe, sizes: MeshSizes) -> Recipe:
    """The recipe as the run takes it, for the forecast: layers whose weight gradients wait are not compiled by
    themselves."""
    settings: dict[str, object] = {f"parallel.{axis}": getattr(sizes, axis) for axis in ("dp_replicate", "dp_shard")}
    if sizes.pp > 1 and Pipeline.of(recipe.parallel).defers and recipe.train.compile == "auto":
        settings["train.compile"] = "off"
    return changed(recipe, settings)


def _setting(recipe: Recipe, sizes: MeshSizes) -> MeshSetting:
    config, parallel, optim = GlobalConfig.of(recipe), recipe.parallel, recipe.optim
    pipeline = Pipeline.of(parallel) if sizes.pp > 1 else Pipeline(1)
    kind: Activations = KIND_OF[recipe.train.activation_checkpoint]
    return MeshSetting(
        sizes, pipeline, config.micro_batch_size, config.num_micro, kind, optim.moments, optim.master_weights,
        parallel.reduce_each, parallel.grad_sync,
    )  # fmt: skip


def _cluster(plan: Plan, site: Site, sizes: MeshSizes) -> Cluster | None:
    """The cluster of a forecast: processes of this machine, or its GPUs with published links; None if nothing is
    known."""
    speed = plan.budget.links.ranks
    if site.machine.device == "cpu":
        if speed is None and sizes.pp == sizes.world:  # messages between stages, which take next to nothing
            return Cluster(1, sizes.world, Link(), Link(), overlaps=False)
        return _measured(speed, sizes.world) if speed is not None else None
    named = next((name for name, row in TABLE.items() if row.reported == site.machine.device_name), None)
    if named is None or not site.one_machine:
        return None
    intra, _ = links_of(named)
    return cluster_of(named, sizes.world, f"1x{sizes.world}", [f"intra={intra.name}"])


def _measured(speed: RankSpeed, world: int) -> Cluster:
    """A link for the forecast over which a ring takes as long as was measured of a gather."""
    link = Link(speed.gather * (world - 1) / world)
    return Cluster(1, world, link, link, overlaps=False)


def _exchange_s(costs: MeshCosts) -> float:
    """Forecast seconds of exchanges of the first rank, in a step."""
    return costs.setting.count * costs.ranks[0].traffic + costs.exposed.total


def _sent(costs: MeshCosts, recipe: Recipe) -> dict[str, float]:
    """Forecast bytes that the first rank sends, by axis of the mesh."""
    setting, sizes, model = costs.setting, costs.setting.sizes, costs.model
    shards, count, held = model.config(setting).shards, setting.count, costs.held[0]
    part = part_of(model.shape(costs.shape_key), held)
    traffic = RankTraffic.of(part, shards, 1 if sizes.pp > 1 else count)
    if sizes.pp > 1:  # counted once
        layers = sum(one.count * one.weights.tensors.cut(shards.count).travels(shards.count) for one in part.classes)
        more = stage_gathers(count, recipe.parallel.reshard_after_forward) - 1
        traffic = traffic.plus(RankTraffic(gather=float(more * layers)))
    gathers = traffic.sent(shards)
    copies = gathers.pop("all_reduce", 0.0)
    found = {"dp_shard": sum(gathers.values()), "dp_replicate": copies}
    again = {one.name: one.count for one in part.classes} if setting.activations != "keep" else {}
    whole = cut_traffic(part, recipe, setting.rows, count, again)
    found["tp"] = (whole.gather + whole.scatter + 2 * whole.reduce) * (sizes.tp - 1) / sizes.tp
    found["ep"] = whole.exchange * (sizes.ep - 1) / sizes.ep
    tokens = setting.rows * part.seq_len * part.dim
    if sizes.pp > 1:
        pipeline = setting.pipeline
        ends = [(one, other) for one in pipeline.stages_of(0) for other in (one - 1, one + 1)]
        inside = [other for _, other in ends if 0 <= other < pipeline.num_stages]
        away = sum(pipeline.rank_of(other) != 0 for other in inside)
        found["pp"] = float(away * count * tokens * part.stream_bytes)
    return {axis: size for axis, size in found.items() if size}
