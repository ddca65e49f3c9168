"""`tilewright.train` and `tilewright.plan`: the two main commands by one call each from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewright.core.config.load import load_recipe
from tilewright.planner.plan import Plan
from tilewright.training.assemble import HookFactory
from tilewright.training.executor.base import ExecutorKind
from tilewright.training.planning.plan_request import PlanRequest, asked_for, plan_for
from tilewright.training.session import RunResult
from tilewright.training.session import train as run_training


def train(
    recipe: str | Path = "default",
    settings: Mapping[str, str] | None = None,
    *,
    hooks: Sequence[HookFactory] = (),
    executor: ExecutorKind | None = None,
) -> RunResult:
    """Trains as `tilewright train RECIPE --section.field value` does.

    Args:
        recipe: a TOML file or the name of a shipped recipe.
        settings: `{"train.steps": "10"}`.
        hooks: each is called with what is known of the run and with its components, and gives a `StepHook` that rides
            along with the steps. A subclass of it whose constructor takes these two is such a function.
        executor: runs the steps instead of the one that the recipe names, at whose costs they are planned.

    Raises:
        TilewrightError: what a user can mend; see its subclasses.
    """
    return run_training(load_recipe(recipe, settings or {}), hooks=hooks, executor=executor)


def plan(
    recipe: str | Path = "default",
    settings: Mapping[str, str] | None = None,
    *,
    device_memory: str = "",
    host_memory: str = "",
    disk_memory: str = "",
    on: str = "",
    fastest: bool = False,
) -> Plan:
    """Plans as `tilewright plan RECIPE --section.field value` does. Builds no model and needs no GPU.

    The plan is that of `train` with the same settings: the recipe as it stands where that fits, else what changes it
    least. With `memory.plan = ""` the recipe is priced as it stands, whether it fits or not (`Plan.state`).

    Args:
        recipe: a TOML file or the name of a shipped recipe.
        settings: `{"train.micro_batch_size": "4"}`; the planner leaves these as they are.
        device_memory: "24GiB"; by default what the machine has.
        host_memory: of the host, for what may be there.
        disk_memory: space on the disk that the plan may use; by default what is free there, with `on` none.
        on: published numbers of h100, h200, a100, 4090 or b200 instead of this machine's.
        fastest: the fastest plan instead, which leaves only `settings` and variables of the environment as they are.

    Raises:
        ConfigError: a setting or a size that makes no sense.
        FitError: nothing fits.
        UnknownFitError: the fastest plan is asked for, and what a step of the model takes is not known.

    Example:
        >>> found = plan("default", on="4090")
        >>> found.state, found.setting.executor, found.peak_bytes < found.budget.device
        ('fits', 'standard', True)
    """
    loaded = load_recipe(recipe, settings or {})
    request = PlanRequest(device_memory, host_memory, disk_memory, on, fastest)
    return plan_for(*asked_for(loaded, request, quiet=True), request)
