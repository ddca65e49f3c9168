"""Layers over stages such that the slowest rank is as fast as it can be: the last one has the head too."""

from tilewright.planner.simulate.mesh.step import MeshCosts


def spread_layers(costs: MeshCosts) -> tuple[int, ...]:
    """Layers of each stage: from as many in each, one moves from the slowest rank to the fastest for as long as that
    makes the slowest one faster.

    Args:
        costs: with as many layers in each stage.
    """
    pipeline = costs.setting.pipeline
    classes = costs.model.whole.classes
    counts = [len(one) for one in pipeline.split(sum(found.count for found in classes))]
    total = sum(costs.rates.layer(place, costs.key).total * found.count for place, found in enumerate(classes))
    each = total / sum(counts)
    head = costs.model.head(costs.setting.rows, costs.shape_key).total

    def loads(now: list[int]) -> list[float]:
        found = [0.0] * pipeline.pp
        for stage, count in enumerate(now):
            found[pipeline.rank_of(stage)] += count * each
        found[pipeline.rank_of(len(now) - 1)] += head
        return found

    while True:
        of_ranks = loads(counts)
        slow, fast = of_ranks.index(max(of_ranks)), of_ranks.index(min(of_ranks))
        giver = max((s for s in range(len(counts)) if pipeline.rank_of(s) == slow), key=lambda s: (counts[s], s))
        taker = min((s for s in range(len(counts)) if pipeline.rank_of(s) == fast), key=lambda s: (counts[s], s))
        moved = list(counts)
        moved[giver] -= 1
        moved[taker] += 1
        if slow == fast or moved[giver] < 1 or max(loads(moved)) >= max(of_ranks) * (1 - 1e-9):
            return tuple(counts)
        counts = moved
