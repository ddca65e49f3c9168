"""`tilewright simulate`: one step of a pipeline in depth, from given costs and lengths, for any number of ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import (
    FiniteRange,
    PathName,
    echo,
    json_option,
    print_json,
    show_table,
    verbosity,
    write_answer,
)
from tilewright.core.errors import ConfigError

if TYPE_CHECKING:
    from tilewright.planner.simulate.ladder import Rung
    from tilewright.planner.simulate.schedule_formulas import Failures
    from tilewright.planner.simulate.step_case import SimulatedCase

_SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved_deferred", "interleaved_zero_bubble", "zbv", "dualpipe_v")
_CHOSEN_BY_LADDER = ("schedule", "virtual_stages", "table", "packing", "split")


@click.command()
@click.option("--pp", default=8, show_default=True, type=click.IntRange(1), help="Ranks in a row of the pipeline.")
@click.option("--dp", default=4, show_default=True, type=click.IntRange(1), help="Rows, each with its own documents.")
@click.option(
    "--microbatches", default=32, show_default=True, type=click.IntRange(1), help="Micro-batches per row and step."
)
@click.option("--schedule", default="1f1b", show_default=True, type=click.Choice(_SCHEDULES), help="Order of passes.")
@click.option(
    "--virtual-stages", default=None, type=click.IntRange(1), help="Stages per rank of interleaved schedules."
)
@click.option("--table", default="", metavar="FILE", help="Order of passes from a CSV file of torch's `_dump_csv`.")
@click.option(
    "--lengths",
    default="lognormal:6.6,1.1",
    show_default=True,
    metavar="SOURCE",
    help="Tokens of documents: lognormal:MEAN,SIGMA, uniform:LEAST,MOST, fixed:LENGTH, a file with one per line, "
    "or the folder of a prepared dataset.",
)
@click.option(
    "--max-length", default=8192, show_default=True, type=click.IntRange(1), help="Tokens of the longest document."
)
@click.option(
    "--documents", default=8, show_default=True, type=click.IntRange(1), help="Documents per micro-batch, on average."
)
@click.option(
    "--attention",
    default=6000.0,
    show_default=True,
    type=FiniteRange(1e-6),
    help="Tokens of a document that spends as long in attention as in all else.",
)
@click.option(
    "--packing",
    default="cost",
    show_default=True,
    type=click.Choice(["padded", "fixed", "tokens", "cost"]),
    help="Documents in micro-batches: a fixed number, padded or not; or balanced by tokens or cost.",
)
@click.option(
    "--layers", default=64, show_default=True, type=click.IntRange(1), help="Layers of the model, cut into stages."
)
@click.option(
    "--split",
    default="even",
    show_default=True,
    type=click.Choice(["even", "same", "own"]),
    help="Layers over stages: evenly, or by the speed of ranks, the same in all rows or in each row its own.",
)
@click.option("--slow", multiple=True, metavar="RANKS=SPEED", help="Speed of ranks, for example 13=0.8 or 8-15=0.8.")
@click.option(
    "--node",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks per node, which share its link outwards.",
)
@click.option(
    "--link", multiple=True, metavar="NAME=RATE", help="Link inter or intra a node, for example inter=50GB/s,5us."
)
@click.option("--message", default="0", metavar="SIZE", help="Bytes that a micro-batch sends from stage to stage.")
@click.option(
    "--forward", default="100ms", show_default=True, metavar="TIME", help="Forward pass of a micro-batch on a rank."
)
@click.option(
    "--dgrad",
    default=1.0,
    show_default=True,
    type=FiniteRange(0, 1e6, min_open=True),
    help="Gradient of the input, in forward passes.",
)
@click.option(
    "--wgrad", default=1.0, show_default=True, type=FiniteRange(0, 1e6), help="Gradients of weights, in forward passes."
)
@click.option("--data", default="0", metavar="TIME", help="Reading of a micro-batch, while others are computed.")
@click.option("--reduce", default="0", metavar="TIME", help="Sum of gradients over rows, after the last pass.")
@click.option("--optimizer", default="0", metavar="TIME", help="Update of the weights.")
@click.option("--fail-every", default="", metavar="TIME", help="Mean time between failures, for goodput: as 2.7h.")
@click.option(
    "--checkpoint-every", default="15m", show_default=True, metavar="TIME", help="Steps from checkpoint to checkpoint."
)
@click.option("--checkpoint-stall", default="0", metavar="TIME", help="Time for which a checkpoint stops the steps.")
@click.option(
    "--recover", default="15m", show_default=True, metavar="TIME", help="From a failure to the first step again."
)
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Steps, each with other documents.")
@click.option("--ladder", is_flag=True, help="Turn levers against idle time on, one after the other.")
@click.option(
    "--html", default="", metavar="FILE", type=PathName(str), help="Write an HTML page with the time of each rank."
)
@json_option
@verbosity
@click.pass_context
def simulate(ctx: click.Context, ladder: bool, html: str, as_json: bool, **options: Any) -> None:
    """Simulate a step of a pipeline on any number of ranks, from given costs and lengths.

    The order of passes is that of torch's own schedules. Idle time is shown by cause, with exposed communication, the
    activations that ranks hold and the passes that decide how long a step takes. Rank r of row i is rank r x DP + i.
    """
    # Defaults are not given: the ladder sets those options itself.
    given = {name for name in options if ctx.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE}
    if ladder and (both := [name for name in _CHOSEN_BY_LADDER if name in given]):
        option = f"--{both[0].replace('_', '-')}"
        raise ConfigError(
            f"--ladder and {option} contradict each other",
            got=f"--ladder, which goes through schedules, packings and splits, and {option}",
            need="one of them",
            try_="tilewright simulate --ladder",
            where=option,
        )
    failures = _failures(options, given)
    rungs = _ladder(options) if ladder else [_one(options, given)]
    if html:
        from tilewright.report.pages.simulate_page import render_simulation

        write_answer("--html", html, render_simulation(rungs, failures))
    if as_json:
        more = {} if failures is None else {"goodput": failures.goodput, "best_interval_s": failures.best_interval_s}
        print_json({"rungs": [rung.to_json() for rung in rungs]} | more)
    else:
        _show(rungs)
        if failures is not None:
            from tilewright.planner.simulate.describe_steps import failures_words

            echo()
            echo(failures_words(failures))


def _failures(options: dict[str, Any], given: set[str]) -> "Failures | None":
    from tilewright.planner.simulate.option_texts import failures_of

    names = ("checkpoint_every", "checkpoint_stall", "recover")
    if not options["fail_every"] and (idle := [name for name in names if name in given]):
        option = f"--{idle[0].replace('_', '-')}"
        raise ConfigError(
            f"{option} without --fail-every",
            got=f"{option}, and no failures",
            need="how often a run fails",
            try_=f"--fail-every 2.7h {option} ...",
            where=option,
        )
    return failures_of(options["fail_every"], *(options[name] for name in names))


def _case(options: dict[str, Any], pipeline: Any) -> "SimulatedCase":
    from tilewright.planner.simulate.option_texts import network_of, seconds_of, size_of, speeds_of
    from tilewright.planner.simulate.pass_costs import KindSeconds
    from tilewright.planner.simulate.step_case import DocumentCosts, SimulatedCase

    forward, message = seconds_of(options["forward"], "--forward"), size_of(options["message"], "--message")
    if not forward:
        raise ConfigError(
            "--forward is no time", got=options["forward"], need="above 0", try_="--forward 100ms", where="--forward"
        )
    return SimulatedCase(
        pipeline,
        options["dp"],
        options["microbatches"],
        options["packing"],
        split=options["split"],
        layers=options["layers"],
        speeds=speeds_of(options["slow"], options["dp"] * pipeline.pp),
        documents=DocumentCosts(options["attention"]),
        kinds=KindSeconds(forward, forward * options["dgrad"], forward * options["wgrad"]),
        message_bytes=message,
        network=network_of(options["link"], options["node"], message),
        data_s=seconds_of(options["data"], "--data"),
        reduce_s=seconds_of(options["reduce"], "--reduce"),
        optimizer_s=seconds_of(options["optimizer"], "--optimizer"),
    )


def _ladder(options: dict[str, Any]) -> "list[Rung]":
    from tilewright.parallel.pipeline.stage_split import Pipeline
    from tilewright.planner.simulate.document_lengths import lengths_from
    from tilewright.planner.simulate.ladder import climb
    from tilewright.planner.simulate.option_texts import check_case

    case = _case(options, Pipeline(options["pp"]))
    check_case(case)
    lengths = lengths_from(options["lengths"], options["max_length"])
    return climb(case, lengths, range(options["seeds"]), options["documents"])


def _one(options: dict[str, Any], given: set[str]) -> "Rung":
    from tilewright.planner.simulate.document_lengths import lengths_from
    from tilewright.planner.simulate.ladder import simulated
    from tilewright.planner.simulate.option_texts import check_case, pipeline_of, table_from

    lengths = lengths_from(options["lengths"], options["max_length"])
    if not options["table"]:
        case = _case(options, pipeline_of(options["pp"], options["schedule"], options["virtual_stages"]))
        check_case(case)
        return simulated(options["schedule"], case, lengths, range(options["seeds"]), options["documents"])
    if both := [name for name in ("pp", "microbatches", "schedule", "virtual_stages") if name in given]:
        raise ConfigError(
            f"--table and --{both[0].replace('_', '-')} contradict each other",
            got="both",
            need="the table alone, which has ranks, stages and micro-batches",
            try_=f"tilewright simulate --table {options['table']}",
            where="--table",
        )
    found = table_from(Path(options["table"]))
    case = _case(options | {"microbatches": found.table.num_microbatches}, found.pipeline)
    name = Path(options["table"]).name
    return simulated(name, case, lengths, range(options["seeds"]), options["documents"], found.table)


def _show(rungs: "list[Rung]") -> None:
    from tilewright.core.units import format_share
    from tilewright.planner.simulate.describe_steps import (
        LADDER_COLUMNS,
        causes_row,
        critical_words,
        ladder_row,
        ladder_verdict,
        setting_of,
    )
    from tilewright.planner.simulate.simulated_step import CAUSES

    done = [rung for rung in rungs if rung.steps]
    echo(ladder_verdict(rungs))
    echo(setting_of(done[-1].case))
    echo()
    show_table(LADDER_COLUMNS, [ladder_row(rung, rungs[0]) for rung in rungs])
    echo()
    show_table(("idle by cause", *CAUSES, "all"), [causes_row(rung) for rung in done])
    if len(rungs) == 1:
        step = rungs[0].steps[0]
        worst = max(range(step.num_ranks), key=step.peaks.__getitem__)
        echo()
        echo(f"critical path        {critical_words(step)}")
        echo(f"exposed by rank      at most {format_share(max(step.exposed_s) / step.seconds)} of the step")
        echo(f"activations          rank {worst} holds {step.peaks[worst]:.1f} micro-batches, the most of all")
