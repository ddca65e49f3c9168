"""A joint plan in the words of a plain one: `plan.json`, the report and the dry run know one kind of plan.

Called by `training.planned`.
"""

from collections.abc import Mapping

from tilewright.plan.cost import Plan
from tilewright.plan.joint_plan import JointPlan
from tilewright.plan.roofline import binding

_PARTS = {"products": "matmul", "recompute": "matmul"}
_WAITING = ("link",)
"""Parts that no ceiling of the machine bounds."""


def plain(found: JointPlan) -> Plan:
    """Bytes by owner at the phases that the ledger measures, seconds, and what binds."""
    cuda = found.machine.device == "cuda"
    reserve = max(owners["process"] for owners in found.phases.values()) if cuda else 0.0
    named = {name: _owned(owners, reserve) for name, owners in found.phases.items()}
    backward = _largest(named, "backward")
    phases = {
        "load": named["load"],
        "forward": max(named["forward"], named["loss"], key=_sum),
        "backward": backward,
        "update": named.get("update", backward),
        "evaluate": named.get("evaluate", named["loss"]),
        "checkpoint": named["checkpoint"],
    }
    seconds = dict.fromkeys(_PARTS.values(), 0.0)
    for name, value in found.seconds.items():
        key = _PARTS.get(name, name)
        seconds[key] = seconds.get(key, 0.0) + value
    computing = {name: value for name, value in seconds.items() if name not in _WAITING}
    work = max(owners["work"] for owners in found.phases.values())
    return Plan(
        device=found.machine.device,
        num_parameters=found.shape.num_parameters,
        phases=phases,
        other_parts={"process": int(found.phases["load"]["process"]), "work": int(work)},
        budget_bytes=int(found.budget.device),
        reserve_bytes=int(reserve),
        seconds=seconds,
        tokens_per_step=found.tokens_per_step,
        bound_by=binding(computing),
        notes=found.notes,
    )


def _owned(owners: Mapping[str, float], reserve: float) -> dict[str, int]:
    """By the ledger's owners."""
    named = {name: int(owners[name]) for name in ("parameters", "optimizer", "gradients", "activations", "buffers")}
    return named | {"other": int(owners["work"] + max(0.0, owners["process"] - reserve))}


def _sum(owners: Mapping[str, int]) -> int:
    return sum(owners.values())


def _largest(phases: Mapping[str, Mapping[str, int]], prefix: str) -> Mapping[str, int]:
    return max((owners for name, owners in phases.items() if name.startswith(prefix)), key=_sum)
