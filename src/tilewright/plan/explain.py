"""A plan in words: one sentence, and a table of plain text."""

from typing import TYPE_CHECKING

from tilewright.core.units import format_bytes, format_count, format_seconds
from tilewright.memory.table import phase_table

if TYPE_CHECKING:
    from tilewright.plan.cost import Plan


def plan_verdict(plan: "Plan") -> str:
    """Whether it fits, at which phase the peak is and whose, and how fast a step is, in a sentence."""
    needs, budget = format_bytes(plan.peak_bytes + plan.reserve_bytes), format_bytes(plan.budget_bytes)
    if plan.state == "not known":
        return f"It is not known whether the run fits: {plan.unknown}. It takes more than {needs} of {budget}."
    if plan.unknown:
        return (
            f"The run does not fit: it takes more than {needs} of {budget}, and how much is not known ({plan.unknown})."
        )
    owners = plan.phases[plan.peak_phase]
    largest = max(owners, key=lambda owner: owners[owner])
    verb = "The run fits" if plan.fits else "The run does not fit"
    text = f"{verb}: {needs} of {budget} at the peak ({plan.peak_phase}, mostly {largest})"
    ceiling, part = plan.bound_by
    speed = f"{format_count(plan.tokens_per_s)} tokens/s, bound by {ceiling} ({part})"
    return f"{text}; a step takes about {format_seconds(plan.step_s)}, {speed}."


def plan_table(plan: "Plan") -> str:
    """Verdict, bytes by owner and phase, seconds by part, notes, and fixes where it does not fit."""
    lines = [plan.verdict, "", f"{format_count(plan.num_parameters)} parameters on {plan.device}", ""]
    lines += phase_table(plan.phases)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.other_parts.items() if size)
    lines += [f"  other: {parts}"] if parts else []
    lines += [f"  outside the allocator: {format_bytes(plan.reserve_bytes)}"] if plan.reserve_bytes else []
    if plan.unknown:
        lines.append("  activations, and what operations need while they run, are not in these bytes")
    else:
        lines += ["", *_seconds(plan)]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.fixes:
        lines += ["", "What makes it fit, cheapest first:" if plan.fixes[0].fits else "Nothing fits; closest:"]
        lines += [f"  {fix}" for fix in plan.fixes]
    return "\n".join(lines)


def _seconds(plan: "Plan") -> list[str]:
    """Seconds by part, the most first."""
    lines = [f"{'seconds':<12}{'of a step':>12}{'share':>8}"]
    for name, seconds in sorted(plan.seconds.items(), key=lambda item: -item[1]):
        if seconds:
            lines.append(f"{name:<12}{format_seconds(seconds):>12}{seconds / plan.step_s:>8.0%}")
    return [*lines, f"{'sum':<12}{format_seconds(plan.step_s):>12}{format_count(plan.tokens_per_s):>10} tokens/s"]
