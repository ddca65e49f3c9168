"""`tilewright bench`: what this machine reaches in a matmul, and what a recipe reaches in a training step.

Quick readings for a user; the claims of the README have scripts of their own in `benchmarks/`.
"""

import statistics

import click

from tilewright.cli.common import RecipeCommand, echo, json_option, overrides, print_json, show_table, verbosity
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_count, format_joules, format_seconds

WARM_UP_STEPS = 3


@click.command(cls=RecipeCommand)
@click.argument("what", type=click.Choice(["matmul", "step"]), default="matmul")
@click.argument("recipe", default="default", metavar="[RECIPE]")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Number of timed steps.")
@json_option
@verbosity
@click.pass_context
def bench(ctx: click.Context, what: str, recipe: str, steps: int, as_json: bool) -> None:
    """Measure matmuls or a training step on this machine.

    `matmul` measures the ceilings that `plan` uses, and renews them. `step` trains RECIPE for a few steps on its real
    data and keeps nothing.
    """
    settings = load_recipe(recipe, overrides(ctx))
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
