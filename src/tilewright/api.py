"""`tilewright.train` and `tilewright.plan`: the two main commands by one call each from Python."""

from collections.abc import Mapping
from pathlib import Path

from tilewright.core.config.load import load_recipe
from tilewright.planner.plan import Plan
from tilewright.training.loop import RunResult
from tilewright.training.loop import train as run_training
from tilewright.training.planning.request import PlanRequest, plan_for, planner_for


def train(recipe: str | Path = "default", settings: Mapping[str, str] | None = None) -> RunResult:
    """Trains as `tilewright train RECIPE --section.field value` does.

    Args:
        recipe: a TOML file or the name of a shipped recipe.
        settings: `{"train.steps": "10"}`.

    Raises:
        TilewrightError: what a user can mend; see its subclasses.
    """
    return run_training(load_recipe(recipe, settings or {}))


def plan(
    recipe: str | Path = "default",
    settings: Mapping[str, str] | None = None,
    *,
    device_memory: str = "",
    host_memory: str = "",
    disk_memory: str = "",
    on: str = "",
) -> Plan:
    """Plans as `tilewright plan RECIPE --section.field value` does. Builds no model and needs no GPU.

    Without budget and machine the recipe is priced as it stands, whether it fits or not (`Plan.state`); with one of
    them the planner decides what `settings` leave open, so that a step is fastest.

    Args:
        recipe: a TOML file or the name of a shipped recipe.
        settings: `{"train.micro_batch_size": "4"}`; the planner leaves these as they are.
        device_memory: "24GiB"; by default what the machine has.
        host_memory: of the host, for what may be there.
        disk_memory: space on the disk that the plan may use; none by default.
        on: published numbers of h100, h200, a100, 4090 or b200 instead of this machine's.

    Raises:
        ConfigError: a setting or a size that makes no sense.
        FitError: the planner may decide, and nothing fits.
        UnknownFitError: it may decide, and what a step of the model takes is not known.

    Example:
        >>> found = plan("default", on="4090")
        >>> found.state, found.setting.executor, found.peak_bytes < found.budget.device
        ('fits', 'standard', True)
    """
    loaded = load_recipe(recipe, settings or {})
    request = PlanRequest(device_memory, host_memory, disk_memory, on)
    planner, budget = planner_for(loaded, request, quiet=True)
    return plan_for(planner, budget, request)
