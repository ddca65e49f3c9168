"""The simulated step of a run on several ranks, before its first step."""

from typing import TYPE_CHECKING, cast

from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.simulate.mesh.mesh_forecast import Forecast, forecast
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.torch_tables import order_text
from tilewright.training.assemble import Components, RunContext

if TYPE_CHECKING:
    from tilewright.training.executor.pipeline import PipelineExecutor


def forecast_of(setup: RunContext, parts: Components) -> Forecast | None:
    """The forecast of a run that is assembled; None of one process, on all but the first rank, and where it is not
    known: see `forecast`, and of whole documents, whose micro-batches differ from step to step. All ranks call it.

    Args:
        setup: of the run.
        parts: of it; with stages the executor has the schedule.
    """
    world = setup.world
    if world.size == 1 or setup.recipe.data.rows == "documents":
        return None
    table, executor = None, parts.executor
    if world.sizes.pp > 1:
        pipeline = Pipeline.of(setup.recipe.parallel)
        count = GlobalConfig.of(setup.site.at_mesh(setup.recipe)).num_micro
        table = ScheduleTable.parse(
            order_text(cast("PipelineExecutor", executor).schedule_of(count), pipeline, count), pipeline.schedule
        )
    return forecast(setup.recipe, setup.plan, setup.site, world.sizes, table) if world.is_first else None
