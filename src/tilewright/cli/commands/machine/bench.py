"""`tilewright bench`: what this machine reaches in a matmul, a recipe in a training step, and ranks between each other.

Quick readings for a user; the claims of the README have scripts of their own in `benchmarks/`.
"""

from pathlib import Path

import click
from click.core import ParameterSource

from tilewright.cli.commands.machine.bench_comm import SIZES, bench_comm
from tilewright.cli.commands.machine.bench_step import bench_step
from tilewright.cli.common import (
    PathName,
    RecipeCommand,
    echo,
    json_option,
    overrides,
    print_json,
    show_table,
    verbosity,
)
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_count


@click.command(cls=RecipeCommand)
@click.argument("what", type=click.Choice(["matmul", "step", "comm"]), default="matmul")
@click.argument("recipe", default="default", metavar="[RECIPE]")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Number of timed steps.")
@click.option("--against", default="", metavar="MODE", help="step: another precision.mode, measured beside it.")
@click.option("--ranks", type=click.IntRange(2, 64), help="comm: processes to start here (2; under torchrun its own).")
@click.option("--sizes", default=SIZES, show_default=True, help="comm: bytes of the tensors, in FP32.")
@click.option("--out", type=PathName(dir_okay=False), help="comm: file of links, which plans read.")
@json_option
@verbosity
@click.pass_context
def bench(
    ctx: click.Context,
    what: str,
    recipe: str,
    steps: int,
    against: str,
    ranks: int | None,
    sizes: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure matmuls, a training step, or exchanges between processes on this machine.

    `matmul` measures the ceilings that `plan` uses, and renews them. `step` trains RECIPE for a few steps on its real
    data and keeps nothing; it says which operations own a step's seconds, the share of its matmuls' rate that it
    reaches, and joules per token where this machine counts them; --against compares two precision modes. `comm` starts
    a few processes, or runs under torchrun on GPUs and several machines, and measures latency and bytes per second of
    each operation and wire format.
    """
    if what != "comm":
        from tilewright.cli.app import check_one_process

        check_one_process(f"bench {what}")
    _check_options(ctx, what)
    settings = load_recipe(recipe, overrides(ctx))
    if what == "comm":
        bench_comm(settings.recipe, ranks, sizes, out, as_json=as_json)
        return
    if what == "matmul":
        _matmul(settings.recipe, as_json)
        return
    other = load_recipe(recipe, [*overrides(ctx), "--precision.mode", against]) if against else None
    bench_step(settings, steps, against=other, as_json=as_json)


def _check_options(ctx: click.Context, what: str) -> None:
    """Check options of `bench`: raise for one of another measurement, which would have no effect.

    Raises:
        ConfigError: there is one.
    """
    of_what = {"steps": "step", "against": "step", "ranks": "comm", "sizes": "comm", "out": "comm"}
    for name, its in of_what.items():
        if its != what and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--{name} is an option of `bench {its}`",
                got=f"bench {what} --{name}",
                need=f"`bench {its}`, or no --{name}",
                try_=f"tilewright bench {its} --{name} ...",
                where=f"--{name}",
            )


def _matmul(recipe: Recipe, as_json: bool) -> None:
    import torch

    from tilewright.core.hardware import detect_machine
    from tilewright.planner.machine.ceilings import measure

    machine = detect_machine(recipe.run.device)
    torch.set_num_threads(recipe.run.threads or machine.physical_cores)
    rates = measure(machine, refresh=True, progress=say)
    if as_json:
        print_json({"device": machine.device_name} | rates.to_json())
        return
    widths = sorted(next(iter(rates.matmul.values())))
    rows = [(name, *(f"{format_count(rate[width])}FLOP/s" for width in widths)) for name, rate in rates.matmul.items()]
    echo(f"{machine.device_name}, {rates.threads} threads; the three matmuls of a linear layer, by width")
    show_table(("format", *map(str, widths)), rows)
    echo(f"memory {format_bytes(rates.bandwidth)}/s")
