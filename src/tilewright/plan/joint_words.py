"""A joint plan in words: one sentence, what binds, one layer explained, the cheapest changes, the timeline.

Called by `cli.plan_joint` and `training.planned`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tilewright.core.config import Recipe
from tilewright.core.errors import FitError
from tilewright.core.units import format_bytes, format_count, format_seconds
from tilewright.plan.fixes import changed
from tilewright.plan.joint import JointPlanner
from tilewright.plan.joint_plan import Budget, JointPlan, Row, describe
from tilewright.plan.layer_cost import layer_cost
from tilewright.plan.options import choices

NUM_CHANGES = 3
WORTH = 1.03
"""Times as many tokens a second: what gains less is not worth a change, and is below what the rates are known to."""
NEAR = 0.97
"""Of what a plan may use of a budget: from here on it binds."""


def verdict(plan: JointPlan) -> str:
    """Whether it fits, how fast, and what binds, in a sentence."""
    speed = f"{format_seconds(plan.step_s)} a step, {format_count(plan.tokens_per_s)} tokens/s"
    host = f" and {format_bytes(plan.host_bytes)} of {format_bytes(plan.budget.host)} host memory" if plan.host else ""
    changed_formats = formats_of(plan)
    narrowed = f" with {changed_formats}, which changes what is learned" if changed_formats else ""
    most = max(plan.seconds, key=lambda name: plan.seconds[name])
    lacking = scarce_memory(plan)
    scarce = f"{' and '.join(lacking) or 'no memory'} {'are' if len(lacking) > 1 else 'is'} scarce"
    return (
        f"It fits{narrowed}: {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget.device)} on the device "
        f"(at {plan.peak_phase}){host}; {speed}; {scarce}, most time goes to {most}."
    )


def formats_of(plan: JointPlan) -> str:
    """Formats of the optimizer that the plan had to narrow; empty where it is the recipe's."""
    return ", ".join(f"{name} = {value}" for name, value in plan.narrowed.items())


def scarce_memory(plan: JointPlan) -> list[str]:
    """Memory that the plan uses up; empty where more would not make it faster."""
    near = NEAR * (1 - plan.recipe.plan.margin)
    found = ["device memory"] if plan.peak_bytes >= near * plan.budget.device else []
    return [*found, "host memory"] if plan.host and plan.host_bytes >= near * plan.budget.host else found


@dataclass(frozen=True)
class Change:
    """One change of recipe or machine, and the plan with it. `keeps_result`: the same losses up to rounding."""

    what: str
    keeps_result: bool
    plan: JointPlan | None

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.what}: does not fit either"
        learned = "" if self.keeps_result else "; changes what is learned"
        return (
            f"{self.what}: {format_seconds(self.plan.step_s)} a step, {format_count(self.plan.tokens_per_s)} tokens/s"
            f"{learned}"
        )


def candidates(recipe: Recipe, budget: Budget, found: JointPlan | None) -> Iterator[tuple[str, bool, Recipe, Budget]]:
    """Changes worth trying: (words, same losses, recipe, budget)."""
    settings: list[tuple[dict[str, Any], bool]] = []
    if recipe.train.checkpoint_inputs == "exact":
        settings.append(({"train.activation_checkpoint": "full", "train.checkpoint_inputs": "fp8"}, False))
    layer_major = found is None or found.setting.executor == "layer_major"
    if layer_major and recipe.optim.clip == "exact" and recipe.optim.clip_norm:
        settings.append(({"optim.clip": "lagged"}, False))
    if layer_major and recipe.optim.clip == "lagged" and recipe.memory.undo == "journal":
        settings.append(({"memory.undo": "checkpoint"}, True))
    if found is None or not found.narrowed:
        if recipe.optim.moments != "8bit":
            settings.append(({"optim.moments": "8bit"}, False))
        if recipe.optim.master == "fp32" and recipe.precision.mode == "bf16_mixed":
            settings.append(({"optim.master": "stochastic", "optim.moments": "8bit"}, False))
    if recipe.precision.mode == "bf16_mixed":
        settings.append(({"precision.mode": "fp8_tile"}, False))
    if found is None and recipe.train.batch_size > 1:
        settings.append(({"train.batch_size": recipe.train.batch_size // 2}, False))
    if found is None and recipe.data.seq_len >= 256:
        settings.append(({"data.seq_len": recipe.data.seq_len // 2}, False))
    for values, keeps in settings:
        words = " ".join(f"--{name} {value}" for name, value in values.items())
        yield words, keeps, changed(recipe, values), budget
    yield "half as much device memory again", True, recipe, replace(budget, device=1.5 * budget.device)
    if budget.links.host:
        yield "twice the host memory", True, recipe, replace(budget, host=2 * budget.host)


def cheapest_changes(planner: JointPlanner, budget: Budget, found: JointPlan | None) -> list[Change]:
    """The changes that gain most time a token; where nothing fits, those that make it fit."""
    tried = []
    for words, keeps, recipe, other in candidates(planner.recipe, budget, found):
        other_planner = planner if recipe is planner.recipe else planner.with_recipe(recipe)
        plan = other_planner.plan(other)
        if plan is not None and (found is None or plan.tokens_per_s > WORTH * found.tokens_per_s):
            tried.append(Change(words, keeps, plan))
    tried.sort(key=lambda change: -change.plan.tokens_per_s if change.plan else 0.0)
    return tried[:NUM_CHANGES]


def no_plan(planner: JointPlanner, budget: Budget) -> FitError:
    """The smallest plan there is and what it takes, and changes that make the run fit."""
    least = planner.smallest(budget)
    with_host = planner.smallest(replace(budget, host=float("inf"))) if budget.links.host else None
    with_disk = planner.smallest(replace(budget, disk=float("inf"))) if budget.links.disk else None
    enough_host = least is not None
    least = least or with_host
    changes = [str(change) for change in cheapest_changes(planner, budget, None)]
    given = f"{format_bytes(budget.device)} on the device"
    given += f" and {format_bytes(budget.host)} on the host" if budget.links.host else ""
    given += f" and {format_bytes(budget.disk)} on the disk" if budget.links.disk else ""
    margin = planner.recipe.plan.margin
    given += f", of which plan.margin leaves {margin:.0%} free" if margin else ""
    if least is None:
        return FitError(
            "This run does not fit.", got=given, need="a smaller model", try_="\n".join(changes) or "--largest"
        )
    formats = "".join(f", {name} = {value}" for name, value in least.narrowed.items())
    host = f" and {format_bytes(least.host_bytes)} on the host" if least.host else ""
    why = "" if enough_host else "; the host's memory is what is missing first"
    other = ""
    if enough_host and with_host is not None and with_host.peak_bytes < 0.9 * least.peak_bytes:
        device, host_needed = format_bytes(with_host.peak_bytes), format_bytes(with_host.host_bytes)
        other = f"\nor {device} on the device and {host_needed} on the host"
    if with_disk is not None and with_disk.peak_bytes < 0.9 * least.peak_bytes:
        device, disk_needed = format_bytes(with_disk.peak_bytes), format_bytes(with_disk.disk_bytes)
        other += f"\nor {device} on the device and {disk_needed} on the disk"
    return FitError(
        "This run does not fit.",
        got=f"{given}{why}",
        need=f"the smallest plan takes {format_bytes(least.peak_bytes)} on the device{host}: {least.setting.executor}, "
        f"micro_batch {least.setting.micro_batch}{formats}; {format_seconds(least.step_s)} a step{other}",
        try_="\n".join(changes) or "a smaller model; --largest names the deepest that fits",
    )


def why(planner: JointPlanner, plan: JointPlan, layer: int) -> list[str]:
    """One layer: what was decided, what it costs, and what each faster choice would need that is not there."""
    row = plan.row_of(layer)
    found = plan.shape.class_of(layer)
    lines = [
        f"layer {layer} is one of {row.count} of class {row.name} that are treated alike ({describe(row)})",
        f"  {format_count(found.num_parameters)} parameters, {_bytes(row)}",
        f"  {row.choice}: {format_seconds(row.cost.seconds)} of a step",
    ]
    device = plan.budget.device - plan.peak_bytes
    host = plan.budget.host - plan.host_bytes
    others = []
    for choice in choices(
        found, plan.setting, plan.shape, plan.recipe, plan.budget.links, planner.fixed.of(found.indices)
    ):
        cost = layer_cost(found, choice, plan.setting, plan.shape, plan.recipe, planner.rates, plan.budget.links)
        if cost.seconds < 0.999 * row.cost.seconds:
            others.append((cost.seconds, choice, cost))
    if not others:
        return [*lines, "  no choice is faster"]
    lines.append(f"  faster for one layer alone, with {format_bytes(device)} of device memory left at the peak:")
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
        lines.append(f"    {choice}: {format_seconds(took)}; needs {' and '.join(needs) or 'nothing more'}")
    return lines


def _bytes(row: Row) -> str:
    cost = row.cost
    parts = [("held on the device", cost.held), ("kept for backward", cost.kept), ("on the host", cost.host)]
    parts += [("on the disk", cost.disk), ("while it runs", max(cost.forward, cost.backward))]
    parts += [("once for all layers like it", cost.once)]
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in parts if size)


def timeline(plan: JointPlan) -> list[tuple[str, dict[str, float]]]:
    """Device bytes by owner through one step, layer by layer: forward up, loss, backward down, update."""
    layers = [plan.row_of(layer).cost for layer in range(plan.shape.num_layers)]
    load = plan.phases["load"]
    fixed = {name: load[name] for name in ("parameters", "optimizer", "process")}
    standard = plan.setting.executor == "standard"
    ends = [row.cost for row in plan.rows if not row.indices]
    all_gradients = sum(cost.gradient for cost in [*layers, *ends])
    many = plan.setting.num_micro > 1
    moments, kept, gradients = [], 0.0, all_gradients if standard and many else 0.0

    def add(name: str, work: float) -> None:
        moments.append((name, fixed | {"gradients": gradients, "activations": kept, "work": work}))

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
    return moments
