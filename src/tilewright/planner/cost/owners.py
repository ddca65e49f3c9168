"""Whose bytes a phase of a plan holds on the device, as the planner has its phases and as the memory tracker does."""

from collections.abc import Mapping, Sequence

from tilewright.core.config.executors import Capabilities
from tilewright.core.memory_plan import STEP_PHASES
from tilewright.planner.cost.plan_rows import PlanRow
from tilewright.planner.cost.solve_layers import Phase

OWNERS = ("parameters", "optimizer", "gradients", "activations", "buffers", "work", "process")


def owners_at(phase: Phase, rows: Sequence[PlanRow]) -> dict[str, float]:
    """Device bytes of a plan's phase by owner; `work` is what lives only while something runs, and pages that stay
    free.

    They are what no choice changes, the holdings of all layers that are there then, and of one that runs.
    """
    found: dict[str, float] = dict.fromkeys(OWNERS, 0.0)
    for owner, size in phase.owners.items():
        found[owner if owner in found else "work"] += size  # a rollback buffer, a checkpoint's copy
    for row in rows:
        there = {"always"} | ({"kept"} if row.name in phase.kept else set())
        there |= {"gradients"} if row.name in phase.gradients else set()
        for one in row.cost.holdings:
            if one.life == "once":
                found[one.owner] += one.bytes
            elif one.life in there and one.place == "device":
                freed = phase.freed and one.life == "kept"
                found["work" if freed else one.owner] += row.count * one.bytes
    if phase.transient != "none" and rows:
        running = max(rows, key=lambda row: row.cost.for_phase(phase.transient))
        for one in running.cost.holdings:
            if one.life == phase.transient:  # gradients that were added up are free pages
                found["work" if phase.passed and one.owner == "gradients" else one.owner] += one.bytes
    return found


def on_host(rows: Sequence[PlanRow]) -> dict[str, float]:
    """Bytes of a plan's layers in the host's memory by owner."""
    found = {"parameters": 0.0, "optimizer": 0.0}
    inputs = 0.0
    for row in rows:
        for one in row.cost.holdings:
            if one.place != "host":
                continue
            if one.owner == "activations":
                inputs += row.count * one.bytes
            else:
                found[one.owner] = found.get(one.owner, 0.0) + row.count * one.bytes
    return found | {"inputs": inputs}


def reserve_of(phases: Mapping[str, Mapping[str, float]]) -> int:
    """The bytes of the owner "reserve": those that the process takes on a GPU outside of its allocator."""
    return int(max(owners["process"] for owners in phases.values()))


def tracked(phases: Mapping[str, Mapping[str, float]], can: Capabilities, reserve: float) -> dict[str, dict[str, int]]:
    """Bytes by phase and owner as the memory tracker of a run has them, by its owners.

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
