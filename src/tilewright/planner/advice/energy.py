"""The energy of a plan: joules of all its steps, and the FLOPs of a token's matmuls; with the assumption."""

from dataclasses import dataclass
from typing import Any

from tilewright.core.units import J_PER_KWH, format_kwh, format_seconds
from tilewright.planner.advice.step_gemms import step_gemms, total_flops
from tilewright.planner.machine.gpu_specs import board_watts
from tilewright.planner.plan import Plan

_MANY = 2**20
"""Tokens that FLOPs are counted over: experts have shares of them."""
_TRAINED, _ADAPTED = 3, 2
"""Forward passes that a matmul of a training step is as long as: with, and without the gradient of its weight."""


@dataclass(frozen=True)
class PlannedEnergy:
    """Planned energy of all steps of a run.

    Args:
        watts: of each unit, for all of the time.
        units: GPUs, or machines.
        boards: units are GPUs, and the watts the most that their maker says a board takes; else they are machines, and
            the watts the recipe's.
        seconds: of all steps.
    """

    watts: float
    units: int
    boards: bool
    seconds: float

    @property
    def joules(self) -> float:
        """Planned energy of all units, in J."""
        return self.units * self.watts * self.seconds

    @property
    def assumed(self) -> str:
        """The assumption behind the planned energy, in words.

        Example:
            >>> PlannedEnergy(65.0, 1, False, 90.0).assumed
            '1 x 65 W per machine (energy.assume_watts), for all of 1m30s'
        """
        whose = "the most that the maker says a board takes" if self.boards else "per machine (energy.assume_watts)"
        beside = "; without host and cooling" if self.boards else ""
        comma = "," if self.boards else ""
        return f"{self.units} x {self.watts:g} W{comma} {whose}, for all of {format_seconds(self.seconds)}{beside}"

    @property
    def words(self) -> str:
        """The planned energy and its assumption in a line."""
        return f"{'at most ' if self.boards else ''}{format_kwh(self.joules)}: {self.assumed}"

    def to_json(self) -> dict[str, Any]:
        """The planned energy in JSON types."""
        told = {"kwh": self.joules / J_PER_KWH, "watts": self.watts, "assumed": self.assumed}
        return told | {"boards" if self.boards else "machines": self.units}


def planned_energy(plan: Plan, steps: int, machines: int = 1) -> PlannedEnergy | None:
    """Predict the energy of a plan's steps from the published power of its GPUs, else from the recipe's. None if
    neither is known, or seconds are not.

    Args:
        plan: of a run.
        steps: of the run.
        machines: of the run.
    """
    if plan.shape.unknown:
        return None
    seconds, watts = steps * plan.step_s, board_watts(plan.machine)
    if watts is not None:
        return PlannedEnergy(watts, plan.stages * plan.setting.shards.processes, True, seconds)
    assumed = plan.recipe.energy.assume_watts
    return PlannedEnergy(assumed, machines, False, seconds) if assumed else None


def flops_per_token(plan: Plan) -> float | None:
    """FLOPs per token of the matmuls of training, for the energy record. Attention and recomputation are left out; None
    for a model of unknown shapes."""
    if plan.shape.unknown:
        return None
    shape, recipe = plan.whole or plan.shape, plan.recipe
    others = sum(  # of no linear layer: experts in one tensor, convolutions
        layers.count * flops
        for layers in (*shape.classes, shape.rest)
        for _, flops in layers.others.values()
    ) / shape.seq_len  # fmt: skip
    linear = total_flops(step_gemms(shape, [_MANY], ())) / _MANY
    return (linear + (_ADAPTED if recipe.lora.rank else _TRAINED) * others) * recipe.parallel.tp
