"""More of a plan in words: one layer explained, what it takes to fit, the timeline."""

from collections.abc import Sequence
from dataclasses import replace

from tilewright.core.errors import FitError
from tilewright.core.memory_plan import LayerMemory
from tilewright.core.units import format_budget, format_bytes, format_count, format_seconds
from tilewright.planner.cost.layer_choices import choices
from tilewright.planner.cost.layer_cost import layer_cost
from tilewright.planner.cost.plan_rows import PlanRow
from tilewright.planner.cost.rank_share import Shards
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner


def no_plan(planner: Planner, budget: Budget, changes: Sequence[str]) -> FitError:
    """Describe a run without a plan: the smallest budgets that have one, its needs, and changes that make the run fit.

    Args:
        planner: may choose what the command may.
        budget: in which nothing fits.
        changes: from `recipe_changes.cheapest_changes`.
    """
    # Three smallest plans: in the given budget, and with host or disk as large as it takes.
    least = planner.smallest(budget)
    with_host = planner.smallest(replace(budget, host=float("inf"))) if budget.links.host else None
    with_disk = planner.smallest(replace(budget, disk=float("inf"))) if budget.links.disk else None
    enough_host = least is not None
    least = least or with_host
    each = Shards.of(planner.recipe).of_each
    given = f"{format_bytes(budget.device)} on the device{each}"
    given += f" and {format_bytes(budget.host)} on the host" if budget.links.host else ""
    given += f" and {format_bytes(budget.disk)} on the disk" if budget.links.disk else ""
    margin = planner.recipe.plan.margin
    given += f", of which plan.margin leaves {margin:.0%} free" if margin else ""
    if least is None:
        return FitError("Run does not fit", got=given, need="a smaller model", try_="\n".join(changes) or "--largest")
    formats = "".join(f", {name} = {value}" for name, value in least.narrowed.items())
    why = "" if enough_host else "; the host's memory is what is missing first"
    other = ""
    # Another tier is worth a line if it saves a tenth of the device.
    if enough_host and with_host is not None and with_host.least_device < 0.9 * least.least_device:
        other = f"\nor {_budgets(with_host)}"
    if with_disk is not None and with_disk.least_device < 0.9 * least.least_device:
        other += f"\nor {_budgets(with_disk)}"
    return FitError(
        "Run does not fit",
        got=f"{given}{why}",
        need=f"{_budgets(least)}{each} for the smallest plan: {least.setting.executor}, micro_batch_size "
        f"{least.setting.micro_batch_size}{formats}; {format_seconds(least.step_s)} a step{other}",
        try_="\n".join(changes) or "a smaller model; --largest names the deepest that fits",
    )


def _budgets(plan: Plan) -> str:
    """Describe the least budgets in which a plan is accepted, its margin included."""
    found = f"{format_budget(plan.least_device)} on the device"
    found += f" and {format_budget(plan.least_host)} on the host" if plan.host else ""
    return found + (f" and {format_budget(plan.least_disk)} on the disk" if plan.disk_bytes else "")


def why(planner: Planner, plan: Plan, layer: int) -> list[str]:
    """Explain one layer's plan: the decision, its cost, and the memory that each faster choice would need and lacks."""
    row = plan.row_of(layer)
    found = plan.shape.class_of(layer)
    lines = [
        f"layer {layer} is one of {row.count} of class {row.name} that are treated alike ({row})",
        f"  {format_count(found.num_parameters)} parameters, {_bytes(row)}",
        f"  {in_words(row.choice)}: {format_seconds(row.cost.seconds)} of a step",
    ]
    # What the best plan leaves free at its peak is what a faster choice may take.
    device = plan.budget.device - plan.peak_bytes
    host = plan.budget.host - plan.host_bytes
    others = []
    for choice in choices(
        found, plan.setting, plan.shape, plan.recipe, plan.budget.links, planner.fixed.of(found.indices)
    ):
        cost = layer_cost(found, choice, plan.setting, plan.shape, plan.recipe, planner.rates, plan.budget.links)
        # Below a thousandth of a layer's time choices count as equal.
        if cost.seconds < 0.999 * row.cost.seconds:
            others.append((cost.seconds, choice, cost))
    if not others:
        return [*lines, "  no choice is faster"]
    lines.append(f"  faster for one layer alone, with {format_bytes(device)} of device memory left at the peak:")
    # The six fastest, each with what it needs more than the chosen one.
    for took, choice, cost in sorted(others, key=lambda item: item[0])[:6]:
        more = cost.held + cost.kept - row.cost.held - row.cost.kept
        needs = [f"{format_bytes(more)} more on the device"] if more > 0 else []
        work = max(cost.forward, cost.backward) - max(row.cost.forward, row.cost.backward)
        needs += [f"{format_bytes(work)} more while it runs"] if work > 0 else []
        more_host = cost.host - row.cost.host
        needs += (
            [f"{format_bytes(more_host)} more on the host, where {format_bytes(host)} are left"]
            if more_host > 0
            else []
        )
        lines.append(f"    {in_words(choice)}: {format_seconds(took)}; needs {' and '.join(needs) or 'nothing more'}")
    return lines


def kept_in_words(choice: LayerMemory) -> str:
    """The tensors of a layer that backward finds, in words."""
    waits = "" if choice.inputs == "device" else f", inputs on {choice.inputs}"
    return choice.activations + waits


def in_words(choice: LayerMemory) -> str:
    """Describe all that a plan does with one layer, in words."""
    words = [f"parameters {choice.parameters}", f"states {choice.states}", kept_in_words(choice)]
    words += [f"MLP in {choice.mlp_chunks} tiles"] if choice.mlp_chunks > 1 else []
    words += [f"attention by {choice.attention_block} rows"] if choice.attention_block else []
    return ", ".join(words)


def _bytes(row: PlanRow) -> str:
    cost = row.cost
    parts = [("held on the device", cost.held), ("kept for backward", cost.kept), ("on the host", cost.host)]
    parts += [("on the disk", cost.disk), ("while it runs", max(cost.forward, cost.backward))]
    parts += [("once for all layers like it", cost.once)]
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in parts if size)


def timeline(plan: Plan) -> list[tuple[str, dict[str, float]]]:
    """Draw the memory timeline of a step: device bytes by owner, layer by layer: forward up, loss, backward down,
    update."""
    layers = [plan.row_of(layer).cost for layer in range(plan.shape.num_layers)]
    load = plan.phases["load"]
    fixed = {name: load[name] for name in ("parameters", "optimizer", "process")}
    standard = plan.setting.can.whole_gradient
    # Embedding and head have no layer: their gradients alone are in the timeline.
    ends = [row.cost for row in plan.rows if not row.indices]
    all_gradients = sum(cost.gradient for cost in [*layers, *ends])
    many = plan.setting.num_micro > 1
    # Of one micro-batch gradients appear layer by layer; of several all are there from the second one on.
    points, kept, gradients = [], 0.0, all_gradients if standard and many else 0.0

    def add(name: str, work: float) -> None:
        points.append((name, fixed | {"gradients": gradients, "activations": kept, "work": work}))

    add("load", 0.0)
    for i, cost in enumerate(layers):
        kept += cost.kept
        add(f"forward {i}", cost.forward)
    loss = plan.phases["loss"]
    add("loss", loss["work"])
    if standard and not many:
        gradients = sum(cost.gradient for cost in ends)
    for i, cost in reversed(list(enumerate(layers))):
        add(f"backward {i}", cost.backward)
        kept -= cost.kept
        gradients += cost.gradient if standard and not many else 0.0
    if standard:
        add("update", 0.0)
    return points
