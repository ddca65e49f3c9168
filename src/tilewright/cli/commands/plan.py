"""`tilewright plan`: bytes and seconds of a run before it runs, from shapes and ceilings alone.

What `train` would do, and the faster way beside it; with `--fastest` that one. torch is imported inside, so that
`--help` stays fast.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.commands.chat_models.plan_model import named_model, plan_model
from tilewright.cli.commands.machine.plan_cards import names_of, plan_cards
from tilewright.cli.commands.machine.plan_mesh import check_options, plan_mesh
from tilewright.cli.common import (
    PathName,
    RecipeCommand,
    echo,
    gc_paused,
    json_option,
    overrides,
    print_json,
    verbosity,
    write_answer,
)
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError, FitError
from tilewright.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tilewright.core.config.load import Loaded
    from tilewright.planner.advice.recipe_changes import Change
    from tilewright.planner.plan import Plan
    from tilewright.planner.site import Site
    from tilewright.training.planning.plan_request import PlanRequest


@click.command(cls=RecipeCommand)
@click.argument("recipe", default="default", metavar="[RECIPE|MODEL]")
@json_option
@click.option("--device-memory", default="", metavar="SIZE", help="Device memory budget for the plan.")
@click.option("--host-memory", default="", metavar="SIZE", help="Host memory budget for offloaded tensors.")
@click.option(
    "--disk-memory",
    default="",
    metavar="SIZE",
    help="Disk space that the plan may use. Default: what is free; with --on none.",
)
@click.option(
    "--on",
    default="",
    metavar="NAME",
    help="Plan for another machine, from published numbers: h100, h200, a100, 4090 or b200. Several, as h100,h200, "
    "are ranked.",
)
@click.option("--by", type=click.Choice(["time", "energy"]), help="What several machines of --on are ranked by: time.")
@click.option("--fastest", is_flag=True, help="Find the fastest plan instead of the one that train executes.")
@click.option("--largest", is_flag=True, help="Find the deepest model of this shape that fits.")
@click.option(
    "--why",
    default="",
    metavar="LAYER",
    help="Explain the decisions for one layer, as layer.7; with --world a line of the table, as 2.",
)
@click.option("--compare", default="", metavar="OTHER", help="Compare with another recipe or a plan file.")
@click.option("--out", default="", metavar="FILE", type=PathName(str), help="Write the plan to a TOML file.")
@click.option(
    "--html",
    default="",
    metavar="FILE",
    type=PathName(str),
    help="Write an HTML page with memory over a step and memory against time.",
)
@click.option("--world", default=0, metavar="N", type=click.IntRange(0), help="Search the fastest mesh over N GPUs.")
@click.option("--nodes", default="", metavar="NODESxGPUS", help="With --world: nodes and GPUs in each, as in 32x8.")
@click.option(
    "--link",
    multiple=True,
    metavar="NAME=RATE",
    help="With --world: intra or inter nodes per GPU, as inter=50GB/s, inter=ethernet-100, or a file of bench comm.",
)
@verbosity
@click.pass_context
def plan(ctx: click.Context, recipe: str, as_json: bool, **options: Any) -> None:
    """Predict memory, step time and the bottleneck of a run, before it runs.

    RECIPE is a TOML file or the name of a shipped recipe; MODEL is a folder, its config.json, or a model of the Hugging
    Face Hub, org/name[@revision], of which the ways to fine-tune it are planned, each with the command that does it.

    The plan is that of `tilewright train` on this machine, or on another one with --on: the recipe unchanged where it
    fits, else what changes it least. With --fastest it is the fastest plan that fits: for each kind of layer where its
    tensors are stored and which activations are kept, and all that the command line leaves open. With --world it is the
    best of all meshes over many GPUs of --on, their steps simulated. With several names in --on the machines are ranked
    by the time or the energy of all steps. Exit code 3: the run does not fit; 6: its memory
    cannot be predicted.
    """
    world, by = options.pop("world"), options.pop("by")
    check_options(world, options)
    cards = names_of(options["on"], by or "", options | {"world": world})
    if (model := named_model(recipe)) is not None:
        if cards:
            raise _several(options["on"], cards[0])
        _of_model(model, overrides(ctx), as_json, options | {"world": world})
        return
    loaded = load_recipe(recipe, overrides(ctx))
    if world:
        plan_mesh(loaded, world, options, overrides(ctx), as_json=as_json)
        return
    out, html, why, compare = (options.pop(name) for name in ("out", "html", "why", "compare"))
    options = {name: value for name, value in options.items() if name not in ("nodes", "link")}
    if cards:
        from tilewright.training.planning.plan_request import PlanRequest

        plan_cards(loaded, cards, by or "time", PlanRequest(**options), as_json=as_json)
        return
    with gc_paused():
        from tilewright.cli.plan_output import show, to_json
        from tilewright.data.common.progress import ProgressBar
        from tilewright.planner.advice.plan_sweep import pareto
        from tilewright.training.planning.advice import advice
        from tilewright.training.planning.does_not_fit import refused
        from tilewright.training.planning.plan_request import PlanRequest, asked_for, plan_for

    request = PlanRequest(**options)
    with ProgressBar("planning") as progress:
        progress.phase("the run")
        loaded, site = asked_for(loaded, request)
        found = plan_for(loaded, site, request, as_it_stands=as_json)  # a program reads why not
        if why:
            lines = _why(loaded, site, found, why)
        else:
            progress.phase("what would be faster")
            told = advice(loaded, site, found, request)
            other = _other(site, request, found, compare, overrides(ctx)) if compare else None
            curve = pareto(loaded, site) if html and not request.largest and not found.shape.unknown else []
    if why:
        print_json({"why": lines}) if as_json else echo("\n".join(lines))
        return
    if as_json:
        print_json(to_json(found, told, other, curve))
    else:
        if request.largest:
            echo(f"The deepest model of this shape has {found.shape.num_layers} layers.")
        show(found, told, other)
    _write_files(found, curve, told.changes, out, html)
    if found.state != "fits":
        raise refused(found, told.changes)


def _of_model(model: str, typed: list[str], as_json: bool, options: dict[str, Any]) -> None:
    """`plan` of a model: the ways to fine-tune it, instead of one recipe's plan."""
    for name in ("fastest", "largest", "why", "compare", "out", "html", "world", "nodes", "link"):
        if options.pop(name):
            raise ConfigError(
                f"--{name} is of the plan of one recipe",
                got=f"--{name} and a model, of which several ways are planned",
                need="a recipe",
                try_=f"tilewright plan sft_lora --model.path {model} --{name} ...",
                where=f"--{name}",
            )
    with gc_paused():
        from tilewright.training.planning.plan_request import PlanRequest
    plan_model(model, typed, PlanRequest(**options), as_json=as_json)


def _several(on: str, first: str) -> ConfigError:
    return ConfigError(
        "Several GPUs are ranked for a recipe",
        got=f"--on {on} and a model, of which several ways are planned",
        need="one GPU, or a recipe",
        try_=f"--on {first}",
        where="--on",
    )


def _other(site: "Site", request: "PlanRequest", found: "Plan", compare: str, typed: list[str]) -> dict[str, str]:
    """`plan` beside another: the numbers of what is compared: another recipe, planned as this one is, or a plan
    file."""
    from tilewright.cli.plan_output import numbers, settings_in_words
    from tilewright.planner.plan_file import is_plan_file, read_plan
    from tilewright.training.planning.plan_request import asked_for, plan_for

    if is_plan_file(compare):
        file = read_plan(compare)
        file.check(found.shape)
        made = file.predicted
        return {
            "plan": Path(compare).name,
            "step": format_seconds(made["step_s"]),
            "device": format_bytes(made["device_peak_bytes"]),
            "host": format_bytes(made["host_bytes"]),
            **settings_in_words(file.settings),
        }
    loaded = load_recipe(compare, typed)
    try:
        return {"plan": loaded.name} | numbers(plan_for(*asked_for(loaded, request, quiet=True), request))
    except FitError:
        return {"plan": loaded.name, "step": "does not fit"}


def _why(loaded: "Loaded", site: "Site", found: "Plan", text: str) -> list[str]:
    from tilewright.planner.advice.describe_plan import why
    from tilewright.planner.decide import free_planner

    match = re.fullmatch(r"(?:layers?\.)?(\d+)", text)
    if match is None or int(match[1]) >= found.shape.num_layers:
        raise ConfigError(
            "Unknown layer in the plan",
            got=f"--why {text}",
            need=f"layer.0 to layer.{found.shape.num_layers - 1}",
            try_="--why layer.0",
            where="--why",
        )
    return why(free_planner(loaded, site), found, int(match[1]))


def _write_files(plan: "Plan", curve: Sequence["Plan"], changes: Sequence["Change"], out: str, html: str) -> None:
    from tilewright.planner.plan_file import to_toml

    if out:
        write_answer("--out", out, to_toml(plan))
    if html:
        from tilewright.cli.plan_output import layer_table
        from tilewright.report.plan_page import render_plan

        page = render_plan(plan, curve, layer_table(plan), [str(change) for change in changes])
        write_answer("--html", html, page)
