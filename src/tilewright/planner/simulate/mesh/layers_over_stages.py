"""Layers over stages by the seconds of a setting: the last one has the head too."""

from tilewright.parallel.pipeline.balance.resplit import SplitCosts, best_split
from tilewright.planner.simulate.mesh.mesh_model import StageLayers
from tilewright.planner.simulate.mesh.setting_step import MeshCosts


def spread_layers(costs: MeshCosts) -> tuple[int, ...]:
    """Layers of each stage of a mesh such that the slowest rank is as fast as it can be (`balance.resplit`).

    Args:
        costs: of the setting; which layers its stages have does not matter.
    """
    pipeline, classes = costs.setting.pipeline, costs.model.whole.classes
    seconds: dict[int, float] = {}
    for place, found in enumerate(classes):
        seconds |= dict.fromkeys(found.indices, costs.rates.layer(place, costs.key).total)
    head = costs.rates.stage(StageLayers((0,) * len(classes), first=False, last=True), costs.key).total
    layers = [of_layer for _, of_layer in sorted(seconds.items())]
    ranks = [pipeline.rank_of(stage) for stage in range(pipeline.num_stages)]
    return best_split(SplitCosts(layers, ranks, (1.0,) * pipeline.pp, last=head))
