"""Rows of a plan: layers that are treated alike, and ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.core.config.recipe import Recipe, Tier
from tilewright.core.memory_plan import LayerMemory
from tilewright.core.units import ranges
from tilewright.planner.cost.layer_choices import GlobalConfig, state_bytes
from tilewright.planner.cost.operations import Operation
from tilewright.planner.cost.solve_layers import Cost
from tilewright.planner.model.model_shape import ModelShape


@dataclass(frozen=True)
class PlanRow:
    """Layers of one class that are treated alike, or an end of the model (no indices)."""

    name: str
    indices: tuple[int, ...]
    choice: LayerMemory
    cost: Cost
    operations: tuple[Operation, ...] = ()
    """Of one layer in a step."""

    @property
    def count(self) -> int:
        """Number of layers of a row of the plan."""
        return max(1, len(self.indices))

    def __str__(self) -> str:
        """The layers of a plan's row as people write them."""
        return f"{self.name} {ranges(self.indices)}" if self.indices else self.name


def recomputed(rows: Sequence[PlanRow]) -> Counter[str]:
    """Rows of a plan that are computed again, whole or in part: layers of each class, by its name."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row.name] += len(row.indices) * (row.choice.activations != "keep")
    return found


def places(setting: GlobalConfig, row: PlanRow) -> tuple[Tier, Tier]:
    """Where parameters and states of a plan's row are between the passes."""
    return ("host", "host") if setting.shards.offload else (row.choice.parameters, row.choice.states)


@dataclass(frozen=True)
class RankRow:
    """Ranks that hold equally much of a run, and the bytes that they hold all the time."""

    ranks: tuple[int, ...]
    parameters: float
    gradients: float
    """Of a whole step, in FP32."""
    optimizer: float


def rank_rows(shape: ModelShape, setting: GlobalConfig) -> list[RankRow]:
    """Rows of a plan for what each rank holds. Parts of parameters are as long as the first rank's, filled up where
    rows do not come out even; the last ranks have fewer gradients and states."""
    shards = setting.shards
    found: dict[tuple[float, float], list[int]] = {}
    for rank in range(shards.ranks):
        part = shape.weights.part(shards.count, rank % shards.count)
        found.setdefault((4.0 * part.trained, state_bytes(part, setting)), []).append(rank)
    parameters = shape.weights.part(shards.count).stored
    return [RankRow(tuple(ranks), parameters, *sizes) for sizes, ranks in found.items()]


def documents_notes(recipe: Recipe, shape: ModelShape) -> tuple[str, ...]:
    """Notes beside a plan's rows on the documents that a plan of whole documents is made for."""
    if recipe.data.rows != "documents":
        return ()
    seconds = "and so are the seconds of attention"
    if shape.attention_share is not None:
        seconds = "the seconds of attention are those of the data's lengths"
    full = f"full rows of {recipe.data.seq_len:,} tokens"
    return (f"whole documents are planned as {full}: bytes are a bound, {seconds}",)
