"""A plan on the terminal, as JSON, and beside another one."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.cli.common import echo, show_table
from tilewright.core.units import format_bytes, format_count, format_seconds, ranges
from tilewright.planner.advice.describe_plan import kept_in_words
from tilewright.planner.advice.energy import PlannedEnergy, planned_energy
from tilewright.planner.cost.plan_rows import places
from tilewright.planner.plan import Plan
from tilewright.training.planning.advice import NOTHING, Advice
from tilewright.training.planning.minutes import expected_steps, length_in_words, long_run


def show(plan: Plan, told: Advice, other: Mapping[str, str] | None) -> None:
    """Print a plan: verdict, treatment of each kind of layer, bytes by owner and phase, seconds by part, notes.

    Args:
        plan: what is shown.
        told: what would make it faster, and why memory stays idle.
        other: numbers of what it is compared with.
    """
    echo(f"{plan.verdict}\n")
    setting = plan.setting
    echo(
        f"{plan.shape.family}, {format_count(plan.shape.num_parameters)} parameters on {plan.machine.device_name}; "
        f"{setting.executor}, {setting.num_micro} micro-batch{'es' if setting.num_micro > 1 else ''} of "
        f"{setting.micro_batch_size}, moments {setting.moments}, master {setting.master}\n"
    )
    show_table(*layer_table(plan))
    echo()
    if setting.shards.ranks > 1:
        echo(f"{setting.shards.words()}; bytes of one rank, below this table of the one that holds most\n")
        show_table(*rank_table(plan))
        echo()
    owners = [owner for owner in next(iter(plan.phases.values())) if any(row[owner] for row in plan.phases.values())]
    rows = [
        [phase, *(_cell(sizes[owner]) for owner in owners), _cell(sum(sizes.values()))]
        for phase, sizes in plan.phases.items()
    ]
    show_table(["device", *owners, "sum"], rows)
    if plan.host:
        echo("\nhost: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.host.items() if size))
    if plan.disk_bytes:
        echo(f"disk: {format_bytes(plan.disk_bytes)}")
    if plan.shape.unknown:
        echo("activations, what operations need while they run, and seconds are not known")
    spent = (
        []
        if plan.shape.unknown
        else sorted(((name, value) for name, value in plan.seconds.items() if value > 1e-6), key=lambda item: -item[1])
    )
    if spent:
        echo("time: " + ", ".join(f"{name} {format_seconds(value)}" for name, value in spent))
    if not plan.shape.unknown:
        echo(f"length: {length_in_words(plan.recipe, plan.step_s)}")
    if plan.setting.shards.ranks > 1:
        echo(f"communication: {communication(plan)}")
    if energy := _energy_of(plan):
        echo(f"energy: {energy.words}")
    if told.faster is not None:
        echo(f"\nFaster than what train does: {told.faster}")
    if told.changes and plan.state == "fits":  # else they are in the error
        echo("\nWhat would be faster:")
        for change in told.changes:
            echo(f"  {change}")
    if other:
        mine = {"plan": "this recipe"} | numbers(plan)
        echo()
        show_table(
            ["", mine["plan"], other["plan"]], [[k, v, other.get(k, "-")] for k, v in mine.items() if k != "plan"]
        )
    long = "" if plan.shape.unknown else long_run(plan.recipe.train, 0, plan.step_s)
    for note in (*(one for one in (told.idle, long) if one), *plan.notes):
        echo(f"note: {note}")


def _cell(size: float) -> str:
    return format_bytes(size) if size else "-"


def layer_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a plan's table of layers, a row for each kind."""
    columns = ["layers", "number", "parameters", "states", "activations", "chunks", "each takes"]
    known, rows = not plan.shape.unknown, []
    for row in plan.rows:
        choice = row.choice
        chunks = [f"MLP in {choice.mlp_chunks} chunks"] if choice.mlp_chunks > 1 else []
        chunks += [f"attention by {choice.attention_block} rows"] if choice.attention_block else []
        kept = kept_in_words(choice) if row.indices else "-"
        cells = [str(row), str(row.count), *places(plan.setting, row), kept]
        rows.append([*cells, ", ".join(chunks) or "-", format_seconds(plan.row_s(row)) if known else "-"])
    rows.append(["rest", *["-"] * 5, format_seconds(plan.rest_s) if known else "-"])
    return columns, rows


def rank_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a plan's table of ranks and their parts of the model."""
    rows = []
    for row in plan.ranks:
        sizes = row.parameters, row.gradients, row.optimizer
        rows.append([ranges(row.ranks), *(format_bytes(size) for size in (*sizes, sum(sizes)))])
    return ["ranks", "parameters", "gradients", "optimizer", "sum"], rows


def communication(plan: Plan) -> str:
    """Describe a plan's communication: bytes that a rank exchanges in a step, by collective, and their seconds if
    known."""
    sent = plan.traffic
    kinds = {"all-gather": sent.gather, "reduce-scatter": sent.scatter, "all-reduce": sent.reduce}
    kinds |= {"all-to-all": sent.exchange}
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds.items() if size)
    known = format_seconds(plan.seconds["communication"]) if "communication" in plan.seconds else "seconds not known"
    return f"{known}, {format_bytes(sent.total)} a step ({sizes})"


def _energy_of(plan: Plan) -> PlannedEnergy | None:
    return None if plan.shape.unknown else planned_energy(plan, expected_steps(plan.recipe, plan.step_s))


def numbers(plan: Plan) -> dict[str, str]:
    """Output of a plan's numbers, by which plans are compared."""
    return {
        "parameters": format_count(plan.shape.num_parameters),
        "step": "not known" if plan.shape.unknown else format_seconds(plan.step_s),
        "tokens/s": "not known" if plan.shape.unknown else format_count(plan.tokens_per_s),
        "device": format_bytes(plan.peak_bytes),
        "host": format_bytes(plan.host_bytes),
        **settings_in_words(plan.settings()),
    }


def settings_in_words(found: Mapping[str, Any]) -> dict[str, str]:
    """Output of a plan's settings in words, with their units."""
    tile = "memory.loss_chunk_bytes"
    return {name: format_bytes(value) if name == tile else str(value) for name, value in found.items()}


def to_json(
    plan: Plan, told: Advice = NOTHING, other: Mapping[str, str] | None = None, curve: Sequence[Plan] = ()
) -> dict[str, Any]:  # fmt: skip
    """Convert a plan's tables to plain types for JSON; None for what is not known."""
    # With a part of the model unknown, times are left out and the peak is a lower bound, `least_bytes`.
    known, faster, energy = not plan.shape.unknown, told.faster, _energy_of(plan)
    return {
        "verdict": plan.verdict,
        "state": plan.state,
        "unknown": plan.shape.unknown,
        "family": plan.shape.family,
        "energy": energy and energy.to_json(),
        "num_parameters": plan.shape.num_parameters,
        "num_layers": plan.shape.num_layers,
        "machine": plan.machine.device_name,
        "device_budget": int(plan.budget.device),
        "host_budget": int(plan.budget.host),
        "peak_bytes": int(plan.peak_bytes) if known else None,
        "least_bytes": int(plan.peak_bytes),
        "peak_phase": plan.peak_phase,
        "host_bytes": int(plan.host_bytes),
        "disk_bytes": int(plan.disk_bytes),
        "step_s": plan.step_s if known else None,
        "steps": expected_steps(plan.recipe, plan.step_s) if known else plan.recipe.train.steps or None,
        "tokens_per_s": plan.tokens_per_s if known else None,
        "settings": plan.settings(),
        "narrowed": dict(plan.narrowed),
        "rows": [
            {"class": row.name, "layers": list(row.indices), **vars(row.choice), "seconds": row.cost.seconds}
            for row in plan.rows
        ],
        "ranks": [{**vars(row), "ranks": list(row.ranks)} for row in plan.ranks],
        "phases": {name: {owner: int(size) for owner, size in row.items()} for name, row in plan.phases.items()},
        "host": {owner: int(size) for owner, size in plan.host.items()},
        "seconds": dict(plan.seconds),
        "communication_bytes": int(plan.traffic.total),
        "changes": [
            {"what": str(change), "settings": dict(change.settings), "keeps_result": change.keeps_result}
            | {"step_s": change.plan.step_s}
            for change in told.changes
        ],
        "faster": None
        if faster is None
        else {
            "step_s": faster.plan.step_s,
            "settings": dict(faster.settings),
            "peak_bytes": int(faster.plan.peak_bytes),
        },
        "compared": other,
        "pareto": [
            {"peak_bytes": int(one.peak_bytes), "step_s": one.step_s, "narrowed": dict(one.narrowed)} for one in curve
        ],
        "idle": told.idle,
        "notes": list(plan.notes),
    }
