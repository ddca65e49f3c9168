"""Memory plans in words, and the next tighter ones where no planner knows a model."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

from tilewright.core.memory_plan import Activations, LayerMemory, MemoryPlan

_TIGHTER: dict[Activations, tuple[Activations, ...]] = {
    "keep": ("selective", "attention", "recompute"),
    "selective": ("attention", "recompute"),
    "matmuls": ("attention", "recompute"),  # not a step of its own: little less than `selective`
    "attention": ("recompute",),
    "recompute": (),
}


def words(memory_plan: MemoryPlan) -> str:
    """Describe a memory plan in words: how many layers are treated how.

    Example:
        >>> words(MemoryPlan.uniform(3))
        '3 keep'
        >>> words(MemoryPlan.uniform(2, activations="recompute", inputs="disk", states="host"))
        '2 recompute (inputs disk, states host)'
    """
    counts = Counter(_layer(layer) for layer in memory_plan.layers)
    return ", ".join(f"{count} {text}" for text, count in counts.items())


def _layer(layer: LayerMemory) -> str:
    away = [(name, getattr(layer, name)) for name in ("inputs", "parameters", "states")]
    told = ", ".join(f"{name} {tier}" for name, tier in away if tier != "device")
    return f"{layer.activations} ({told})" if told else layer.activations


def loosest(memory_plan: MemoryPlan) -> bool:
    """True where a memory plan is the loosest: everything is kept, and all of it on the device.

    Example:
        >>> loosest(MemoryPlan.uniform(2)), loosest(MemoryPlan.uniform(2, states="disk"))
        (True, False)
    """
    home = all((one.parameters, one.states, one.inputs) == ("device",) * 3 for one in memory_plan)
    return home and all(layer.activations == "keep" for layer in memory_plan.layers)


def tighter(memory_plan: MemoryPlan, modes: Collection[str] = tuple(_TIGHTER)) -> Iterator[MemoryPlan]:
    """Yield tighter memory plans, each of which keeps less for backward than the one before, with these modes.

    Example:
        >>> [words(found) for found in tighter(MemoryPlan.uniform(2))]
        ['2 selective', '2 attention', '2 recompute']
    """
    present = {layer.activations for layer in memory_plan.layers}
    kept: list[Activations] = [mode for mode in _TIGHTER if mode in present]
    loosest = kept[0] if kept else "recompute"
    for mode in _TIGHTER[loosest]:
        if mode not in modes:
            continue
        layers = [replace(layer, activations=_tightest(layer.activations, mode)) for layer in memory_plan.layers]
        yield replace(memory_plan, layers=tuple(layers))


def _tightest(one: Activations, other: Activations) -> Activations:
    order = list(_TIGHTER)
    return max(one, other, key=order.index)
