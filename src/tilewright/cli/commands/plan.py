"""`tilewright plan`: bytes and seconds of a run before it runs, from shapes and ceilings alone.

Without budgets the recipe as it stands; with a budget or a machine the planner decides what the command line leaves
open. torch is imported inside, so that `--help` stays fast.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.commands.chat_models.plan_model import named_model, plan_model
from tilewright.cli.common import RecipeCommand, echo, json_option, overrides, print_json, verbosity
from tilewright.core.config.load import load_recipe
from tilewright.core.env import gc_paused
from tilewright.core.errors import ConfigError, DataError
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tilewright.planner.advice.changes import Change
    from tilewright.planner.advice.fixes import Fix
    from tilewright.planner.plan import Budget, Plan
    from tilewright.planner.planner import Planner
    from tilewright.training.planning.request import PlanRequest


@click.command(cls=RecipeCommand)
@click.argument("recipe", default="default", metavar="[RECIPE|MODEL]")
@json_option
@click.option("--device-memory", default="", metavar="SIZE", help="Device memory budget for the plan.")
@click.option("--host-memory", default="", metavar="SIZE", help="Host memory budget for offloaded tensors.")
@click.option("--disk-memory", default="", metavar="SIZE", help="Disk space that the plan may use. Default: none.")
@click.option(
    "--on",
    default="",
    metavar="NAME",
    help="Plan for another machine, from published numbers: h100, h200, a100, 4090 or b200.",
)
@click.option("--largest", is_flag=True, help="Find the deepest model of this shape that fits.")
@click.option("--why", default="", metavar="LAYER", help="Explain the decisions for one layer, for example layer.7.")
@click.option("--compare", default="", metavar="OTHER", help="Compare with another recipe or a plan file.")
@click.option("--out", default="", metavar="FILE", help="Write the plan to a TOML file.")
@click.option(
    "--html", default="", metavar="FILE", help="Write an HTML page with memory over a step and memory against time."
)
@verbosity
@click.pass_context
def plan(ctx: click.Context, recipe: str, as_json: bool, **options: Any) -> None:
    """Predict memory, step time and the bottleneck of a run, before it runs.

    RECIPE is a TOML file or the name of a shipped recipe; MODEL is a folder, its config.json, or a model of the Hugging
    Face Hub, org/name[@revision], of which the ways to fine-tune it are planned, each with the command that does it.

    With --device-memory, --host-memory, --on or --largest the
    plan decides, for each kind of layer, where its tensors are stored and which activations are kept, and takes the
    fastest step that fits. Without them it prices the recipe unchanged. Exit code 3: the run does not fit; 6: its
    memory cannot be predicted.
    """
    if (model := named_model(recipe)) is not None:
        _of_model(model, overrides(ctx), as_json, options)
        return
    loaded = load_recipe(recipe, overrides(ctx))
    out, html, why, compare = (options.pop(name) for name in ("out", "html", "why", "compare"))
    with gc_paused():
        from tilewright.cli.plan_output import show, to_json
        from tilewright.planner.advice.changes import idle_memory
        from tilewright.planner.advice.sweep import pareto
        from tilewright.training.planning.refused import refused
        from tilewright.training.planning.request import PlanRequest, plan_for, planner_for

    asked = PlanRequest(**options)
    planner, budget = planner_for(loaded, asked, quiet=as_json)
    found = plan_for(planner, budget, asked)
    if why:
        lines = _why(planner, found, why)
        print_json({"why": lines}) if as_json else echo("\n".join(lines))
        return
    changes = _changes(planner, budget, found, asked)
    other = _other(planner, budget, asked, compare, overrides(ctx)) if compare else None
    chosen = asked.decides and not asked.largest
    idle = idle_memory(planner, found) if chosen else ""
    curve = pareto(planner, budget) if html and chosen else []
    if as_json:
        print_json(to_json(found, changes, other, curve, idle))
    else:
        if asked.largest:
            echo(f"The deepest model of this shape has {found.shape.num_layers} layers.")
        show(found, changes, other, idle)
    _write_files(found, curve, changes, out, html)
    if found.state != "fits":
        raise refused(found, changes)


def _of_model(model: str, typed: list[str], as_json: bool, options: dict[str, Any]) -> None:
    """The ways to fine-tune a model, instead of one recipe's plan."""
    for name in ("largest", "why", "compare", "out", "html"):
        if options.pop(name):
            raise ConfigError(
                f"--{name} is of the plan of one recipe",
                got=f"--{name} and a model, of which several ways are planned",
                need="a recipe",
                try_=f"tilewright plan sft_lora --model.path {model} --{name} ...",
                where=f"--{name}",
            )
    with gc_paused():
        from tilewright.training.planning.request import PlanRequest
    plan_model(model, typed, PlanRequest(**options), as_json=as_json)


def _changes(planner: "Planner", budget: "Budget", found: "Plan", asked: "PlanRequest") -> Sequence["Change | Fix"]:
    """What would make a decided plan faster, and a recipe that does not fit as it stands fit."""
    from tilewright.planner.advice.changes import cheapest_changes, replan_with
    from tilewright.planner.advice.fixes import find_fixes

    if asked.decides:
        return [] if asked.largest else cheapest_changes(planner.recipe, budget, found, replan_with(planner))
    return find_fixes(planner, budget) if found.state == "does not fit" and not found.shape.unknown else []


def _other(
    planner: "Planner", budget: "Budget", asked: "PlanRequest", compare: str, typed: list[str]
) -> dict[str, str]:
    """The numbers of what is compared: another recipe, planned as this one is, or a plan file."""
    from tilewright.cli.plan_output import numbers, settings_in_words
    from tilewright.planner.plan_file import is_plan_file, read_plan
    from tilewright.training.planning.request import planner_for

    if is_plan_file(compare):
        file = read_plan(compare)
        file.check(planner.shape(planner.recipe))
        made = file.predicted
        return {
            "plan": Path(compare).name,
            "step": format_seconds(made["step_s"]),
            "device": format_bytes(made["device_peak_bytes"]),
            "host": format_bytes(made["host_bytes"]),
            **settings_in_words(file.settings),
        }
    loaded = load_recipe(compare, typed)
    theirs, _ = planner_for(loaded, asked, quiet=True)
    found = theirs.plan(budget) if asked.decides else theirs.as_it_stands(budget)
    return {"plan": loaded.name} | (numbers(found) if found else {"step": "does not fit"})


def _why(planner: "Planner", found: "Plan", text: str) -> list[str]:
    from tilewright.planner.advice.describe import why

    match = re.fullmatch(r"(?:layers?\.)?(\d+)", text)
    if match is None or int(match[1]) >= found.shape.num_layers:
        raise ConfigError(
            "Unknown layer in the plan",
            got=f"--why {text}",
            need=f"layer.0 to layer.{found.shape.num_layers - 1}",
            try_="--why layer.0",
            where="--why",
        )
    return why(planner, found, int(match[1]))


def _write_files(plan: "Plan", curve: Sequence["Plan"], changes: Sequence["Change | Fix"], out: str, html: str) -> None:
    from tilewright.core.atomic_io import write_whole
    from tilewright.planner.plan_file import to_toml

    try:
        if out:
            write_whole(Path(out), to_toml(plan))
            say(f"wrote {out}")
        if html:
            from tilewright.cli.plan_output import layer_table
            from tilewright.report.plan_page import render_plan

            write_whole(Path(html), render_plan(plan, curve, layer_table(plan), [str(change) for change in changes]))
            say(f"wrote {html}")
    except OSError as error:
        raise DataError(
            "Plan cannot be written",
            got=str(error),
            need="a folder in which files can be made",
            try_="another path for --out and --html",
            where=out or html,
        ) from error
