"""`tilewright bench step`: seconds and joules of a step, who owns the seconds, and the share of its matmuls' rate that
it reaches; of one precision mode, or of two beside each other."""

import datetime
import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.cli.common import echo, print_json, show_table
from tilewright.core.config.load import Loaded
from tilewright.core.units import format_count, format_joules, format_seconds

if TYPE_CHECKING:
    from tilewright.planner.trace.step_owners import Owner
    from tilewright.training.assemble import Components

WARM_UP_STEPS = 3
MOST_TURNS = 7
"""Steps after which the matmuls are timed alone."""
WATCHED_STEPS = 2
"""Of which the last one counts: layers of other parties were compiled again in the first one that was watched."""


@dataclass(frozen=True)
class StepBench:
    """Measurements of a few steps.

    Args:
        numbers: for JSON.
        owners: of one more step's seconds; None: not known.
    """

    numbers: Mapping[str, Any]
    owners: "list[Owner] | None"


def bench_step(settings: Loaded, steps: int, *, against: Loaded | None = None, as_json: bool) -> None:
    """`bench step`: train for a few steps on the recipe's data, keep nothing, and show what they took.

    Args:
        settings: the recipe.
        steps: that are timed. One more is profiled.
        against: the recipe in another precision mode, which is measured behind it.
        as_json: instead of text.
    """
    first = _measured(settings, steps)
    if against is None:
        print_json(first.numbers) if as_json else _show(first)
        return
    gc.collect()  # the first model goes before the second one is made
    second = _measured(against, steps)
    ratios = _beside(first.numbers, second.numbers)
    if as_json:
        print_json({**first.numbers, "against": {**second.numbers, "ratios": ratios}})
        return
    _show(first)
    echo()
    _show(second)
    echo()
    names = first.numbers["precision"], second.numbers["precision"]
    echo(f"{names[0]} over {names[1]}: step {_ratio(ratios['step_s'])}, joules per token {_joules_beside(ratios)}")


def _beside(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two results of `bench step` beside each other: numbers of the first over those of the second; of joules None
    where one of them is not counted, and why."""
    joules = first["joules_per_token"], second["joules_per_token"]
    reasons = dict.fromkeys((*first["not_counted"], *second["not_counted"]))
    return {
        "step_s": first["step_s"]["median"] / second["step_s"]["median"],
        "joules_per_token": joules[0] / joules[1] if joules[0] and joules[1] else None,
        "not_counted": list(reasons),
    }


def _ratio(value: float) -> str:
    """Ratio of two numbers of `bench step`, and the change in percent.

    Example:
        >>> _ratio(0.583)
        '0.58x (-42 %)'
    """
    return f"{value:.2f}x ({100 * (value - 1):+.0f} %)"


def _joules_beside(ratios: Mapping[str, Any]) -> str:
    value, reasons = ratios["joules_per_token"], "; ".join(ratios["not_counted"])
    if value is None:
        return f"unavailable: {reasons}"
    return _ratio(value) + (f" of what is counted ({reasons})" if reasons else "")


def _measured(settings: Loaded, steps: int) -> StepBench:
    from tilewright.energy.meter import EnergyMeter
    from tilewright.planner.advice.energy import flops_per_token
    from tilewright.planner.advice.step_gemms import alone_s, total_flops
    from tilewright.planner.machine import step_share
    from tilewright.planner.machine.microbench import Load
    from tilewright.planner.trace.step_owners import explained
    from tilewright.training.assemble import build, set_up
    from tilewright.training.hooks.energy_hook import counters_of

    setup = set_up(settings)
    parts = build(setup, fresh=True)
    recipe, results, waits, alone = setup.recipe, [], [], []
    counters, reasons = counters_of(processors=True, gpu=setup.machine.device == "cuda")
    try:
        # Steps, with the same matmuls alone between some of them.
        for _ in range(WARM_UP_STEPS):
            parts.executor.step(parts.stream.next_step(), recipe.optim.lr)
        probe, gemms = _matmuls(parts)
        meter, load = EnergyMeter(counters, thread=False), Load()
        for number in range(steps):
            meter.at("steps")
            results.append(parts.executor.step(parts.stream.next_step(), recipe.optim.lr))
            meter.at("between")
            waits.append(parts.stream.wait_s)
            if probe is not None and number < MOST_TURNS:
                alone.append(alone_s(probe, gemms))
        use, others = meter.use(), load.others()
        told, why = _owners(parts)
    finally:
        parts.stream.close()
    # What was measured, per step and per token.
    joules = use.joules["steps"] if counters and meter.reads else None
    broken = [f"{name}: {part['trouble']}" for name, part in use.parts.items() if part["trouble"]]
    tokens = sum(result.num_tokens for result in results)
    seconds = [result.seconds for result in results]
    per_token = flops_per_token(setup.plan)
    rates = _rates(total_flops(gemms), alone, seconds)
    if rates is not None:
        share = step_share.StepShare(rates["reached"], rates["alone"], others, datetime.date.today().isoformat())
        step_share.keep(setup.site.rates.key, f"{settings.name} in {recipe.precision.mode}", share)
    numbers = {
        "recipe": settings.name,
        "device": setup.machine.device_name,
        "precision": recipe.precision.mode,
        "steps": steps,
        "step_s": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "wait_s": statistics.median(waits),
        "tokens_per_s": statistics.median(r.num_tokens / (r.seconds + w) for r, w in zip(results, waits, strict=True)),
        "joules_per_step": joules and joules / steps,
        "joules_per_token": joules and joules / tokens,
        "joules_per_flop": joules / (tokens * per_token) if joules and per_token else None,
        "not_counted": [*reasons, *broken],
        "others": others,
        "matmuls": rates,
        "owners": None if told is None else [{"name": o.name, "seconds": o.seconds, "calls": o.calls} for o in told],
        "explained": None if told is None else explained(told),
        "no_owners": why,
        "planned_s": dict(setup.plan.seconds),
    }
    return StepBench(numbers, told)


def _show(bench: StepBench) -> None:
    from tilewright.planner.machine.step_share import BUSY

    found = bench.numbers
    step, others = found["step_s"], found["others"]
    echo(f"{found['recipe']} in {found['precision']} on {found['device']}, {found['steps']} steps")
    echo(f"step      {format_seconds(step['median'])} (median; {step['min']:.3g} to {step['max']:.3g} s)")
    echo(f"tokens/s  {found['tokens_per_s']:,.0f}")
    echo(f"wait      {format_seconds(found['wait_s'])} per step for data")
    echo(f"energy    {_energy_in_words(found)}")
    if others > BUSY:
        echo(f"note: others took {100 * others:.0f} % of the processors' time; matmuls by themselves leave that out")
    _show_matmuls(found["matmuls"])
    _show_owners(bench.owners, found)


def _energy_in_words(found: Mapping[str, Any]) -> str:
    reasons = "; ".join(found["not_counted"])
    if found["joules_per_step"] is None:
        return f"unavailable: {reasons}"
    each = [f"{format_joules(found[f'joules_per_{name}'])} per {name}" for name in ("step", "token")]
    if found["joules_per_flop"] is not None:
        each.append(f"{format_joules(found['joules_per_flop'])} per FLOP of its matmuls")
    return f"{', '.join(each)} ({reasons or 'all of it measured'})"


def _matmuls(parts: "Components") -> tuple[Any, Mapping[Any, int]]:
    """Matmuls for `bench step`: a probe of the device, and the step's matmuls; None of a model whose shapes are not
    known."""
    from tilewright.planner.advice.step_gemms import step_gemms
    from tilewright.planner.machine.microbench import RateProbe

    setup, shape = parts.setup, parts.setup.plan.shape
    if shape.unknown:
        return None, {}
    batches = parts.stream.next_step()
    tokens = [batch["input_ids"].numel() if "input_ids" in batch else len(batch["labels"]) for batch in batches]
    probe = RateProbe(setup.kernels, parts.memory_tracker.device)
    return probe, step_gemms(shape, tokens, setup.site.rates.matmul)


def _rates(flops: int, alone: Sequence[float], seconds: Sequence[float]) -> dict[str, float] | None:
    """Rates of `bench step`: FLOP/s of the matmuls by themselves and in the step, and the share that is reached."""
    if not alone:
        return None
    by_itself, step = statistics.median(alone), statistics.median(seconds)
    return {
        "flops": flops,
        "alone_s": by_itself,
        "alone": flops / by_itself,
        "reached": flops / step,
        "share": by_itself / step,
    }


def _owners(parts: "Components") -> tuple[list["Owner"] | None, str]:
    """Owners for `bench step`: of one step's seconds, or why there are none."""
    from tilewright.planner.trace.step_owners import owners, watched

    if parts.setup.machine.device != "cpu":
        return None, "known of steps on CPUs only"
    if not parts.setup.recipe.memory.can.whole_gradient:
        return None, "not known of an executor that updates weights on the way (memory.executor)"
    for _ in range(WATCHED_STEPS):
        batches = parts.stream.next_step()
        with watched() as profile:
            parts.executor.step(batches, parts.setup.recipe.optim.lr)
    return owners(profile.function_events or ()), ""


def _show_matmuls(rates: Mapping[str, float] | None) -> None:
    if rates is None:
        return echo("matmuls   not known of this model")
    reached, alone = (f"{format_count(rates[name])}FLOP/s" for name in ("reached", "alone"))
    return echo(f"matmuls   {reached} of {alone} that they reach by themselves: {rates['share']:.2f} of the rate")


def _show_owners(told: "list[Owner] | None", found: Mapping[str, Any]) -> None:
    """Show owners in `bench step`: of a profiled step, and the plan's parts."""
    if told is None:
        echo(f"owners    {found['no_owners']}")
    else:
        whole = sum(one.seconds for one in told)
        echo(f"\nOne more step, profiled: {format_seconds(whole)}")
        rows = [(o.name, format_seconds(o.seconds), f"{100 * o.seconds / whole:.1f} %", f"{o.calls:,}") for o in told]
        show_table(("owner", "own time", "share", "calls"), rows)
        echo(f"named owners have {100 * found['explained']:.1f} % of it")
    parts = sorted(found["planned_s"].items(), key=lambda item: -item[1])
    echo(f"planned: {', '.join(f'{name} {format_seconds(value)}' for name, value in parts if value)}")
