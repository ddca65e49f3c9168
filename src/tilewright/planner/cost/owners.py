"""Whose bytes a phase of a plan holds on the device, as the planner has its phases and as the memory tracker does."""

from collections.abc import Mapping, Sequence

from tilewright.core.config.executors import Capabilities
from tilewright.core.memory_plan import STEP_PHASES
from tilewright.planner.cost.choices import GlobalConfig, state_bytes
from tilewright.planner.cost.rows import PlanRow, bytes_of, weights_of
from tilewright.planner.cost.solve import Phase
from tilewright.planner.model.shape import ModelShape

OWNERS = ("parameters", "optimizer", "gradients", "activations", "buffers", "work", "process")


def owners_at(
    phase: Phase, shape: ModelShape, setting: GlobalConfig, rows: Sequence[PlanRow], cpu: bool
) -> dict[str, float]:
    """Device bytes of a phase by owner; `work` is what lives only while something runs, and pages that stay free."""
    found: dict[str, float] = dict.fromkeys(OWNERS, 0.0)
    for owner, size in phase.owners.items():
        found[owner if owner in found else "work"] += size  # a rollback buffer, a checkpoint's copy
    found["process"] += sum(row.cost.once for row in rows)
    for row in rows:
        cost, held = row.cost, 0.0
        for owner, (place, size) in zip(("parameters", "optimizer"), bytes_of(shape, setting, row), strict=True):
            here = size if place == "device" or (cpu and place == "host") else 0.0
            found[owner] += here
            held += here
        if row.indices and row.choice.parameters == "device":
            buffers = row.count * shape.class_of(row.indices[0]).buffers
            found["buffers"] += buffers
            held += buffers
        kept = row.count * cost.kept if row.name in phase.kept else 0.0
        gaps = kept * shape.gaps / (1 + shape.gaps) if setting.can.whole_model else 0.0
        gradients = row.count * cost.gradient if row.name in phase.gradients else 0.0
        spread = gradients * shape.spread / (1 + shape.spread)
        found["activations"] += max(0.0, row.count * cost.held - held)  # inputs in a CPU's host tier
        found["work" if phase.freed else "activations"] += kept - gaps
        found["gradients"] += gradients - spread
        found["work"] += gaps + spread
    if phase.transient != "none" and rows:
        running = max(rows, key=lambda row: row.cost.for_phase(phase.transient))
        size = running.cost.for_phase(phase.transient)
        if setting.can.offload:
            for owner, part in _staged(shape, setting, running, phase).items():
                found[owner] += part
                size -= part
        found["work"] += size
    return found


def _staged(shape: ModelShape, setting: GlobalConfig, row: PlanRow, phase: Phase) -> dict[str, float]:
    """Of what lives while a layer of the layer-major executor runs: copies of what lies elsewhere, and gradients."""
    weights, choice = weights_of(shape, row), row.choice
    group = min(setting.group, shape.num_layers) if row.indices else 1
    copies = group * (1 + setting.prefetch)
    found = {"parameters": copies * weights.stored if choice.parameters != "device" else 0.0}
    found["optimizer"] = copies * state_bytes(weights, setting) if choice.states != "device" else 0.0
    found["gradients"] = 4.0 * group * weights.trained if phase.transient == "backward" and not phase.passed else 0.0
    return found


def reserve_of(phases: Mapping[str, Mapping[str, float]]) -> int:
    """What a GPU holds of the process outside of its allocator."""
    return int(max(owners["process"] for owners in phases.values()))


def tracked(phases: Mapping[str, Mapping[str, float]], can: Capabilities, reserve: float) -> dict[str, dict[str, int]]:
    """Phases as the memory tracker of a run has them, by its owners.

    Args:
        phases: device bytes by owner at each phase of the planner.
        can: what the executor can do.
        reserve: bytes of the process that are outside of the allocator, left out.
    """
    named = {name: _by_tracker(owners, reserve) for name, owners in phases.items()}

    def largest(*prefixes: str) -> dict[str, int]:
        return max((owners for name, owners in named.items() if name.startswith(prefixes)), key=_sum)

    backward, forward = largest("backward"), largest("forward")
    if can.whole_model:
        forward = max(forward, named["loss"], key=_sum)
    else:  # the head's backward pass follows its loss at once
        backward = max(backward, named["loss"], key=_sum)
    step = largest(*STEP_PHASES[:-1])
    return {
        "load": named["load"],
        "forward": forward,
        "backward": backward,
        "update": named.get("update", step if can.whole_gradient else backward),
        "evaluate": named["evaluate"],
        "checkpoint": named["checkpoint"],
    }


def _by_tracker(owners: Mapping[str, float], reserve: float) -> dict[str, int]:
    named = {name: int(owners[name]) for name in ("parameters", "optimizer", "gradients", "activations", "buffers")}
    return named | {"other": int(owners["work"] + max(0.0, owners["process"] - reserve))}


def _sum(owners: Mapping[str, int]) -> int:
    return sum(owners.values())
