"""`tilewright search`: layers of their own shape for a run, found with latencies that were measured on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.commands.outputs.stage_commands import alone_in, folder_beside, page_behind, say_aside, write_page
from tilewright.cli.common import (
    LATEST,
    PathName,
    RecipeCommand,
    echo,
    json_option,
    overrides,
    print_json,
    run_or_model,
    show_table,
    verbosity,
)
from tilewright.core.log import say

if TYPE_CHECKING:
    from tilewright.compress.search.search_run import LayerSearch

PAGE = "search.html"


@click.command(cls=RecipeCommand)
@click.argument("run", default=LATEST, metavar="[RUN]", callback=run_or_model)
@click.option(
    "--limits",
    default="token=85%",
    show_default=True,
    help="Shares of the run's token, prefill, flops, parameters, cache: token=85%,cache=50%.",
)
@click.option("--kinds", default="ffn,heads,groups,window,linear,none", show_default=True, help="Kinds of replacement.")
@click.option("--rows", type=click.IntRange(1), default=64, show_default=True, help="Rows of text for replacements.")
@click.option(
    "--block-steps", type=click.IntRange(0), help="Steps per replacement. Default: RUN's over 4, at most 100."
)
@click.option("--score-rows", type=click.IntRange(1), default=16, show_default=True, help="Held-out rows per score.")
@click.option("--steps", type=click.IntRange(0), default=0, help="Steps per best shape. 0: a quarter of RUN's.")
@click.option("--candidates", type=click.IntRange(1), default=3, show_default=True, help="Shapes that are trained.")
@click.option("--context", type=click.IntRange(1), default=512, show_default=True, help="Tokens before a cached one.")
@click.option("--no-uniform", is_flag=True, help="Do not train the best shape whose layers are alike.")
@click.option("--out", type=PathName(), help="Folder of all stages. Default: RUN-searched.")
@click.option("--dry-run", is_flag=True, help="Print the choices of each layer and the hours, and train nothing.")
@json_option
@verbosity
@click.pass_context
def search(ctx: click.Context, run: str, out: Path | None, dry_run: bool, as_json: bool, **asked: Any) -> None:
    """Find layers of their own shape for a run, by latency measured on this machine.

    RUN is a run folder or its name below `runs`; without it `runs/latest`. Or a folder of Llama, Mistral or DeepSeek-V3
    layout, or such a model of the hub; settings (`--data.source FOLDER`) say what it learns from. Smaller parts for
    each layer are trained to give what the run's parts give, scored by held-out loss with each alone in place, and
    timed here. An integer program finds the shapes of least predicted loss within the limits; the best are trained with
    the run as their teacher. The same command continues where it was stopped. Exits with 3 where no shape is within the
    limits.
    """
    from tilewright.compress.search.search_settings import LayerSearchSettings

    asked["uniform"] = not asked.pop("no_uniform")
    settings = LayerSearchSettings.of(asked.pop("limits"), asked.pop("kinds"), **asked)
    from tilewright.cli.load_run import open_to_compress, open_to_export
    from tilewright.compress.search.search_run import RECIPE, LayerSearch

    source = open_to_compress(run, overrides(ctx))
    out = out or folder_beside(run, "searched")
    if dry_run:  # which writes nothing
        _show_choices(LayerSearch(source, settings, out, open_to_export, say_aside), as_json)
        return
    with alone_in(out):
        found = LayerSearch(source, settings, out, open_to_export, say_aside)
        with page_behind(lambda: _write_page(found, out)):
            found.run()
    if as_json:
        print_json(found.record)
        return
    from tilewright.report.pages.search_page import verdict_of

    echo(verdict_of(found.record))
    say(f"next   tilewright train {out / RECIPE}      trains it from scratch")


def _show_choices(found: "LayerSearch", as_json: bool) -> None:
    from tilewright.core.units import format_seconds

    choices = {str(place): [choice.name for choice in of_place] for place, of_place in found.choices.items()}
    seconds, whole = found.seconds(), found.kept_whole()
    if as_json:
        print_json({"choices": choices, "kept_whole": whole, "seconds": seconds})
        return
    rows = [(place, " ".join(names), whole.get(place, "")) for place, names in choices.items()]
    show_table(("part", "choices", "why not smaller"), rows)
    click.echo()
    stages = [(stage, format_seconds(value)) for stage, value in seconds.items()]
    show_table(("stage", "about"), [*stages, ("together", format_seconds(sum(seconds.values())))])


def _write_page(found: "LayerSearch", out: Path) -> None:
    from tilewright.report.pages.search_page import render_search

    if "run_costs" in found.record:
        write_page(out / PAGE, render_search(found.record))
