"""The joint plan on the command line: budgets as text, the verdict, tables, files. Called by `cli.plan`.

torch is imported inside, so that `--help` stays fast.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.common import print_json, show_table
from tilewright.core.config import Recipe
from tilewright.core.env import quick_imports
from tilewright.core.errors import ConfigError, DataError
from tilewright.core.load import Loaded, load_recipe
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_count, format_seconds, parse_bytes

if TYPE_CHECKING:
    from tilewright.core.hardware import Machine
    from tilewright.plan.joint import JointPlanner
    from tilewright.plan.joint_plan import Budget, JointPlan

DISK_SPEED = 2e9
"""Bytes/s of a disk that nobody measured (guess)."""


@dataclass(frozen=True)
class JointOptions:
    """What was asked for, as typed."""

    device_memory: str = ""
    host_memory: str = ""
    disk_memory: str = ""
    on: str = ""
    largest: bool = False
    why: str = ""
    compare: str = ""
    out: str = ""
    html: str = ""

    @property
    def asked(self) -> bool:
        """Whether anything here was asked for."""
        return self != JointOptions()


def joint_plan(
    loaded: Loaded, typed: list[str], options: JointOptions, vocab_size: Callable[[Recipe], int], as_json: bool
) -> None:
    """Plan a recipe jointly and print it.

    Args:
        loaded: the recipe.
        typed: settings from the command line; another recipe that is compared gets them too.
        options: what was asked for.
        vocab_size: tokens of a recipe's tokenizer.
        as_json: print JSON.

    Raises:
        ConfigError: an option that makes no sense.
        FitError: nothing fits.
    """
    with quick_imports():
        from tilewright.plan.changes import cheapest_changes, idle_memory, replan_with
        from tilewright.plan.joint_words import no_plan
        from tilewright.plan.sweep import largest, pareto

    planner, budget = _planner(loaded, options, vocab_size(loaded.recipe), as_json)
    found = largest(planner, budget) if options.largest else planner.plan(budget)
    if found is None:
        changes = cheapest_changes(planner.recipe, budget, None, replan_with(planner))
        raise no_plan(planner, budget, [str(change) for change in changes])
    if options.why:
        lines = _why(planner, found, options.why)
        print_json({"why": lines}) if as_json else click.echo("\n".join(lines))
        return
    other = _other(planner, budget, options, typed, vocab_size)
    changes = [] if options.largest else cheapest_changes(planner.recipe, budget, found, replan_with(planner))
    idle = "" if options.largest else idle_memory(planner, found)
    curve = pareto(planner, budget) if options.html and not options.largest else []
    if as_json:
        print_json(_json(found, changes, other, curve) | {"idle": idle})
    else:
        _print(found, changes, other, options, idle)
    _write_files(found, curve, changes, options)


def _planner(loaded: Loaded, options: JointOptions, vocab_size: int, quiet: bool) -> tuple["JointPlanner", "Budget"]:
    import torch

    from tilewright.core.hardware import detect_machine
    from tilewright.plan.auto import planner_of
    from tilewright.plan.ceilings import measure
    from tilewright.plan.joint_plan import Budget
    from tilewright.plan.links import as_links, disk_speed, host_speed
    from tilewright.plan.options import Links
    from tilewright.plan.published import GUESSES, HOST_BYTES, LINK_SHARE, find_published

    recipe = loaded.recipe
    disk = _size(options.disk_memory, "--disk-memory", None, "") if options.disk_memory else 0
    if options.on:
        row = find_published(options.on)
        host = _size(options.host_memory, "--host-memory", None, "") if options.host_memory else HOST_BYTES
        machine = row.machine(detect_machine("cpu"), host)
        there = int(row.memory)
        device = (
            _size(options.device_memory, "--device-memory", there, machine.device_name)
            if options.device_memory
            else recipe.plan.device_budget or there
        )
        guessed = f"guessed: {DISK_SPEED / 1e9:.0f} GB/s of the disk" if disk else ""
        links = Links(LINK_SHARE * row.link, DISK_SPEED if disk else None, guessed)
        notes = (f"published, not measured: {row.full_name} ({row.source})", GUESSES)
        budget = Budget(device, host, links, disk)
        return planner_of(loaded, vocab_size, machine, row.ceilings(), notes), budget
    machine = detect_machine(recipe.run.device)
    torch.set_num_threads(recipe.run.threads or machine.physical_cores)
    rates = measure(machine, progress=None if quiet else say)
    device, host = _budgets_here(options, machine, recipe.plan.device_budget)
    progress = None if quiet else say
    folder = recipe.memory.tier_dir or recipe.run.dir
    links = as_links(
        host_speed(machine, progress=progress), disk_speed(folder, machine, progress=progress) if disk else None
    )
    return planner_of(loaded, vocab_size, machine, rates), Budget(device, host, links, disk)


def _budgets_here(options: JointOptions, machine: "Machine", wanted: int) -> tuple[int, int]:
    """Device and host budget on the machine at hand."""
    if options.host_memory and machine.device == "cpu":
        raise ConfigError(
            "On a CPU the device's memory is the host's.",
            got=f"--host-memory {options.host_memory}",
            need="--device-memory alone",
            try_="--device-memory, or --on for a machine that is not at hand",
            where="--host-memory",
        )
    device, host = wanted or machine.device_memory_bytes, machine.host_memory_bytes
    if options.device_memory:
        device = _size(options.device_memory, "--device-memory", machine.device_memory_bytes, "this machine")
    if options.host_memory:
        host = _size(options.host_memory, "--host-memory", machine.host_memory_bytes, "this machine")
    return device, host


def _size(text: str, option: str, most: int | None, owner: str) -> int:
    """Bytes from text, with the units as they are written: Gib and Gb are bits to many."""
    unit = re.sub(r"[^A-Za-z]", "", text)
    try:
        size = parse_bytes(text)
        if unit != unit.lower() and unit.endswith("b"):
            raise ValueError(f"{unit} may mean bits")
        if size <= 0:
            raise ValueError("no memory at all")
    except ValueError as error:
        raise ConfigError(
            "This is not a size of memory.",
            got=f"{option} {text!r}: {error}",
            need="a number above 0 with GiB, GB, MiB or MB",
            try_=f"{option} 24GiB",
            where=option,
        ) from error
    if most is not None and size > most:
        raise ConfigError(
            "This is more memory than the machine has.",
            got=f"{option} {text}, {owner} has {format_bytes(most)}",
            need=f"at most {format_bytes(most)}",
            try_=f"{option} {most // 2**30}GiB, or --on for a machine that is not at hand",
            where=option,
        )
    return size


def _why(planner: "JointPlanner", found: "JointPlan", text: str) -> list[str]:
    from tilewright.plan.joint_words import why

    match = re.fullmatch(r"(?:layers?\.)?(\d+)", text)
    if match is None or int(match[1]) >= found.shape.num_layers:
        raise ConfigError(
            "The plan has no such layer.",
            got=f"--why {text}",
            need=f"layer.0 to layer.{found.shape.num_layers - 1}",
            try_="--why layer.0",
            where="--why",
        )
    return why(planner, found, int(match[1]))


def _other(
    planner: "JointPlanner",
    budget: "Budget",
    options: JointOptions,
    typed: list[str],
    vocab_size: Callable[[Recipe], int],
) -> dict[str, str] | None:
    """The numbers of what is compared: another recipe planned in the same budget, or a plan file."""
    from tilewright.plan.joint import JointPlanner
    from tilewright.plan.plan_file import is_plan_file, read_plan

    if not options.compare:
        return None
    if is_plan_file(options.compare):
        file = read_plan(options.compare)
        file.check(planner.shape(planner.recipe))
        made = file.predicted
        return {
            "plan": Path(options.compare).name,
            "step": format_seconds(made["step_s"]),
            "device": format_bytes(made["device_peak_bytes"]),
            "host": format_bytes(made["host_bytes"]),
            **_settings(file.settings),
        }
    loaded = load_recipe(options.compare, typed)
    theirs = JointPlanner(
        loaded.recipe,
        vocab_size(loaded.recipe),
        planner.machine,
        planner.rates,
        planner.open_formats,
        planner.notes,
        planner.fixed,
    )
    plan = theirs.plan(budget)
    return {"plan": loaded.name} | (_numbers(plan) if plan else {"step": "does not fit"})


def _numbers(plan: "JointPlan") -> dict[str, str]:
    return {
        "parameters": format_count(plan.shape.num_parameters),
        "step": format_seconds(plan.step_s),
        "tokens/s": format_count(plan.tokens_per_s),
        "device": format_bytes(plan.peak_bytes),
        "host": format_bytes(plan.host_bytes),
        **_settings(plan.settings()),
    }


def _settings(found: Mapping[str, Any]) -> dict[str, str]:
    """Settings as people read them."""
    tile = "memory.loss_tile"
    return {name: format_bytes(value) if name == tile else str(value) for name, value in found.items()}


def _table(plan: "JointPlan") -> tuple[list[str], list[list[str]]]:
    from tilewright.plan.joint_plan import describe

    columns = ["layers", "number", "parameters", "states", "activations", "slices", "per layer"]
    rows = []
    for row in plan.rows:
        choice = row.choice
        slices = [f"MLP in {choice.mlp_tiles} tiles"] if choice.mlp_tiles > 1 else []
        slices += [f"attention by {choice.attention_block} rows"] if choice.attention_block else []
        kept = choice.kept_words if row.indices else "-"
        cells = [describe(row), str(row.count), choice.parameters, choice.states, kept]
        rows.append([*cells, ", ".join(slices) or "-", format_seconds(row.cost.seconds)])
    return columns, rows


def _print(
    plan: "JointPlan", changes: list[Any], other: dict[str, str] | None, options: JointOptions, idle: str
) -> None:
    from tilewright.plan.joint_words import verdict

    if options.largest:
        click.echo(
            f"The deepest model of this shape has {plan.shape.num_layers} layers, "
            f"{format_count(plan.shape.num_parameters)} parameters."
        )
    click.echo(f"{verdict(plan)}\n")
    setting = plan.setting
    click.echo(
        f"{plan.shape.family}, {format_count(plan.shape.num_parameters)} parameters on {plan.machine.device_name}; "
        f"{setting.executor}, {setting.num_micro} micro-batch{'es' if setting.num_micro > 1 else ''} of "
        f"{setting.micro_batch}, moments {setting.moments}, master {setting.master}\n"
    )
    show_table(*_table(plan))
    click.echo()
    owners = [owner for owner in next(iter(plan.phases.values())) if any(row[owner] for row in plan.phases.values())]
    rows = [
        [phase, *(_cell(sizes[owner]) for owner in owners), _cell(sum(sizes.values()))]
        for phase, sizes in plan.phases.items()
    ]
    show_table(["device", *owners, "sum"], rows)
    if plan.host:
        click.echo("\nhost: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.host.items() if size))
    if plan.disk_bytes:
        click.echo(f"disk: {format_bytes(plan.disk_bytes)}")
    spent = sorted(((name, value) for name, value in plan.seconds.items() if value > 1e-6), key=lambda item: -item[1])
    click.echo("time: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in spent))
    if changes:
        click.echo("\nWhat would be faster:")
        for change in changes:
            click.echo(f"  {change}")
    if other:
        mine = {"plan": "this recipe"} | _numbers(plan)
        click.echo()
        show_table(
            ["", mine["plan"], other["plan"]], [[k, v, other.get(k, "-")] for k, v in mine.items() if k != "plan"]
        )
    for note in (*([idle] if idle else []), *plan.notes):
        click.echo(f"note: {note}")


def _cell(size: float) -> str:
    return format_bytes(size) if size else "-"


def _json(
    plan: "JointPlan", changes: list[Any], other: dict[str, str] | None, curve: list["JointPlan"]
) -> dict[str, Any]:
    from tilewright.plan.joint_words import verdict

    return {
        "verdict": verdict(plan),
        "family": plan.shape.family,
        "num_parameters": plan.shape.num_parameters,
        "num_layers": plan.shape.num_layers,
        "machine": plan.machine.device_name,
        "device_budget": int(plan.budget.device),
        "host_budget": int(plan.budget.host),
        "peak_bytes": int(plan.peak_bytes),
        "peak_phase": plan.peak_phase,
        "host_bytes": int(plan.host_bytes),
        "disk_bytes": int(plan.disk_bytes),
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "settings": plan.settings(),
        "narrowed": dict(plan.narrowed),
        "rows": [
            {"class": row.name, "layers": list(row.indices), **vars(row.choice), "seconds": row.cost.seconds}
            for row in plan.rows
        ],
        "phases": {name: {owner: int(size) for owner, size in row.items()} for name, row in plan.phases.items()},
        "host": {owner: int(size) for owner, size in plan.host.items()},
        "seconds": dict(plan.seconds),
        "changes": [
            {"what": change.what, "keeps_result": change.keeps_result, "step_s": change.step_s} for change in changes
        ],
        "compared": other,
        "pareto": [
            {"peak_bytes": int(one.peak_bytes), "step_s": one.step_s, "narrowed": dict(one.narrowed)} for one in curve
        ],
        "notes": list(plan.notes),
    }


def _write_files(plan: "JointPlan", curve: list["JointPlan"], changes: list[Any], options: JointOptions) -> None:
    from tilewright.plan.plan_file import to_toml
    from tilewright.training.durable import write_whole

    try:
        if options.out:
            write_whole(Path(options.out), to_toml(plan))
            say(f"wrote {options.out}")
        if options.html:
            from tilewright.report.plan_page import render_plan

            write_whole(Path(options.html), render_plan(plan, curve, _table(plan), [str(change) for change in changes]))
            say(f"wrote {options.html}")
    except OSError as error:
        raise DataError(
            "The plan cannot be written.",
            got=str(error),
            need="a folder in which files can be made",
            try_="another path for --out and --html",
            where=options.out or options.html,
        ) from error
