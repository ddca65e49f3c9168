"""`tilewright bench`: what this machine reaches in a matmul, a recipe in a training step, and ranks between each other.

Quick readings for a user; the claims of the README have scripts of their own in `benchmarks/`.
"""

import statistics
from pathlib import Path

import click
from click.core import ParameterSource

from tilewright.cli.commands.machine.bench_comm import SIZES, bench_comm
from tilewright.cli.common import RecipeCommand, echo, json_option, overrides, print_json, show_table, verbosity
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_count, format_joules, format_seconds

WARM_UP_STEPS = 3


@click.command(cls=RecipeCommand)
@click.argument("what", type=click.Choice(["matmul", "step", "comm"]), default="matmul")
@click.argument("recipe", default="default", metavar="[RECIPE]")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Number of timed steps.")
@click.option("--ranks", type=click.IntRange(2, 64), help="comm: processes to start here (2; under torchrun its own).")
@click.option("--sizes", default=SIZES, show_default=True, help="comm: bytes of the tensors, in FP32.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="comm: file of links, which plans read.")
@json_option
@verbosity
@click.pass_context
def bench(
    ctx: click.Context,
    what: str,
    recipe: str,
    steps: int,
    ranks: int | None,
    sizes: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure matmuls, a training step, or exchanges between processes on this machine.

    `matmul` measures the ceilings that `plan` uses, and renews them. `step` trains RECIPE for a few steps on its real
    data and keeps nothing. `comm` starts a few processes, or runs under torchrun on GPUs and
    several machines, and measures latency and bytes per second of each operation and wire format.
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
    from tilewright.energy.meter import EnergyMeter
    from tilewright.training.assemble import build, set_up
    from tilewright.training.hooks.energy_hook import counters_of

    setup = set_up(settings)
    parts = build(setup, fresh=True)
    results, waits = [], []
    counters, reasons = counters_of(processors=True, gpu=setup.machine.device == "cuda")
    try:
        for number in range(WARM_UP_STEPS + steps):
            if number == WARM_UP_STEPS:
                meter = EnergyMeter(counters, thread=False)
            result = parts.executor.step(parts.stream.next_step(), settings.recipe.optim.lr)
            if number >= WARM_UP_STEPS:
                results.append(result)
                waits.append(parts.stream.wait_s)
        use = meter.use()
    finally:
        parts.stream.close()
    joules = use.total_j if counters and meter.reads else None
    seconds = [result.seconds for result in results]
    found = {
        "recipe": settings.name,
        "device": setup.machine.device_name,
        "precision": settings.recipe.precision.mode,
        "steps": steps,
        "step_s": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "wait_s": statistics.median(waits),
        "tokens_per_s": statistics.median(r.num_tokens / (r.seconds + w) for r, w in zip(results, waits, strict=True)),
        "joules_per_token": joules and joules / sum(result.num_tokens for result in results),
        "not_counted": reasons,
    }
    if as_json:
        print_json(found)
        return
    echo(f"{found['recipe']} in {found['precision']} on {found['device']}, {steps} steps")
    echo(f"step      {format_seconds(statistics.median(seconds))} (median; {min(seconds):.3g} to {max(seconds):.3g} s)")
    echo(f"tokens/s  {found['tokens_per_s']:,.0f}")
    echo(f"wait      {format_seconds(found['wait_s'])} a step for data")
    if joules is None:
        echo(f"energy    unavailable: {'; '.join(reasons)}")
    else:
        per_token = format_joules(joules / sum(result.num_tokens for result in results))
        how = "; ".join(reasons) or "all of it measured"
        echo(f"energy    {format_joules(joules / steps)} a step, {per_token} a token ({how})")


def _check_options(ctx: click.Context, what: str) -> None:
    """Raise for an option of another measurement, which would have no effect.

    Raises:
        ConfigError: there is one.
    """
    of_what = {"steps": "step", "ranks": "comm", "sizes": "comm", "out": "comm"}
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
    rates = measure(machine, refresh=True, progress=None if as_json else say)
    if as_json:
        print_json({"device": machine.device_name} | rates.to_json())
        return
    widths = sorted(next(iter(rates.matmul.values())))
    rows = [(name, *(f"{format_count(rate[width])}FLOP/s" for width in widths)) for name, rate in rates.matmul.items()]
    echo(f"{machine.device_name}, {rates.threads} threads; the three matmuls of a linear layer, by width")
    show_table(("format", *map(str, widths)), rows)
    echo(f"memory {format_bytes(rates.bandwidth)}/s")
