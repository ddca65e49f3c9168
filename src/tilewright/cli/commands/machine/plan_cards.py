"""`tilewright plan RECIPE --on h100,h200,4090`: one recipe on several published GPUs, ranked by time or by energy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tilewright.cli.common import echo, gc_paused, print_json, show_table
from tilewright.core.errors import ConfigError, FitError, UnknownFitError
from tilewright.core.units import J_PER_KWH, format_bytes, format_joules, format_kwh, format_seconds

if TYPE_CHECKING:
    from tilewright.core.config.load import Loaded
    from tilewright.planner.plan import Plan, State
    from tilewright.training.planning.plan_request import PlanRequest

By = Literal["time", "energy"]
_OF_ONE = ("largest", "why", "compare", "out", "html", "world", "nodes", "link")
_LEFT_OUT = "without host and cooling"


@dataclass(frozen=True)
class CardPlan:
    """A recipe on one GPU.

    Args:
        name: as in `--on`.
        plan: None where nothing fits.
        seconds, joules: of all steps; joules are the most that the boards take.
        tokens: of all steps.
        state: of the run there.
        reason: that nothing fits, or that it is not known.
    """

    name: str
    plan: "Plan | None" = None
    seconds: float = 0.0
    joules: float = 0.0
    tokens: int = 0
    state: "State" = "does not fit"
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The plan on a card (GPU) in JSON types."""
        if self.plan is None:
            return {"on": self.name, "state": self.state, "reason": self.reason}
        numbers = {"step_s": self.plan.step_s, "seconds": self.seconds, "kwh": self.joules / J_PER_KWH}
        numbers |= {"joules_per_token": self.joules / self.tokens, "peak_bytes": int(self.plan.peak_bytes)}
        return {"on": self.name, "state": self.state, **numbers}


def names_of(on: str, by: str, options: Mapping[str, Any]) -> list[str]:
    """Names of the cards (GPUs) that a recipe's plans are ranked on; none if one plan is asked for.

    Args:
        on: of `--on`, names with commas between them.
        by: of `--by`; "": not given.
        options: all others.

    Raises:
        ConfigError: options that contradict each other, or a name twice.
    """
    names = [name.strip().lower() for name in on.split(",")] if "," in on else []
    if by and not names:
        raise ConfigError(
            "--by without several GPUs",
            got=f"--by {by} and --on {on}" if on else f"--by {by}, and no --on",
            need="GPUs that a recipe is ranked on",
            try_=f"--on h100,h200 --by {by}",
            where="--by",
        )
    given = [name for name in _OF_ONE if options.get(name)]
    if names and given:
        raise ConfigError(
            f"--{given[0]} is of the plan of one machine",
            got=f"--{given[0]} and --on {on}",
            need="one of them",
            try_=f"--on {names[0]} --{given[0]} ..., or --on {on} without it",
            where=f"--{given[0]}",
        )
    if "" in names:
        raise ConfigError(
            "GPU without a name in --on",
            got=on,
            need="a name on both sides of each comma",
            try_=f"--on {','.join(filter(None, names)) or 'h100,h200'}",
            where="--on",
        )
    if len(set(names)) < len(names):
        raise ConfigError(
            "GPU twice in --on", got=on, need="each name once", try_=f"--on {','.join(dict.fromkeys(names))}",
            where="--on",
        )  # fmt: skip
    return names


def plan_cards(loaded: "Loaded", names: Sequence[str], by: By, request: "PlanRequest", *, as_json: bool) -> None:
    """Plan on each card (GPU), and show them, the best first.

    Args:
        loaded: the recipe.
        names: of published GPUs.
        by: what they are ranked by.
        request: budgets, and what is looked for.
        as_json: instead of a table.

    Raises:
        ConfigError: a machine that is not published, or budgets that are not right.
        FitError: the recipe fits none of them.
        UnknownFitError: the memory that it takes cannot be predicted.
    """
    found = sorted(
        (_on(loaded, name, request) for name in names),
        key=lambda row: (row.plan is None, row.joules if by == "energy" else row.seconds),
    )
    if as_json:
        print_json({"by": by, "plans": [row.to_json() for row in found]})
    else:
        _show(loaded, found, by)
    if all(row.state == "not known" for row in found):
        raise UnknownFitError(
            "Memory of this run cannot be predicted",
            got=found[0].reason,
            need="a model whose shapes are known before it runs",
            try_="tilewright train RECIPE --dry-run --plan.enforce false, on one of them",
            where="--on",
        )
    if all(row.plan is None for row in found):
        raise FitError(
            f"{loaded.name} fits none of these GPUs",
            got="; ".join(f"{row.name}: {row.reason}" for row in found),
            need="one that it fits",
            try_="a GPU with more memory, or --train.micro_batch_size of fewer rows",
            where="--on",
        )


def _on(loaded: "Loaded", name: str, request: "PlanRequest") -> CardPlan:
    with gc_paused():
        from tilewright.planner.advice.energy import planned_energy
        from tilewright.training.planning.minutes import expected_steps
        from tilewright.training.planning.plan_request import asked_for, plan_for

    of_card = replace(request, on=name)
    try:
        plan = plan_for(*asked_for(loaded, of_card, quiet=True), of_card)
    except FitError as error:
        return CardPlan(name, reason=error.problems[0].got)
    if plan.state != "fits":
        return CardPlan(name, state=plan.state, reason=plan.verdict)
    steps = expected_steps(plan.recipe, plan.step_s)
    energy = planned_energy(plan, steps)
    assert energy is not None, "published GPUs have their power"
    return CardPlan(name, plan, energy.seconds, energy.joules, steps * plan.tokens_per_step, plan.state)


def _show(loaded: "Loaded", found: Sequence[CardPlan], by: By) -> None:
    fitting = [row for row in found if row.plan is not None]
    if fitting:
        first = fitting[0]
        number = format_seconds(first.seconds) if by == "time" else f"at most {format_kwh(first.joules)}"
        echo(f"Least {by}: {first.name}, {number} for all steps of {loaded.name}.\n")
    columns = ["on", "device", "step", "all steps", "at most", "per token", "settings"]
    show_table(columns, [_row(row) for row in found])
    echo(
        f"\nnote: energy is the most that the maker says a board takes, for all of the planned time, {_LEFT_OUT}; "
        "seconds are from published peaks and guessed shares of them (tilewright plan --on NAME names both)"
    )


def _row(row: CardPlan) -> list[str]:
    plan = row.plan
    if plan is None:
        return [row.name, row.state, *["-"] * 5]
    settings = ", ".join(f"{name.partition('.')[2]} {value}" for name, value in plan.narrowed.items())
    memory = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget.device)}"
    energy = (format_kwh(row.joules), format_joules(row.joules / row.tokens))
    return [row.name, memory, format_seconds(plan.step_s), format_seconds(row.seconds), *energy, settings or "as asked"]
