"""Experts that are spread over ranks move, at a checkpoint, to where the rows that they get are balanced
(`parallel.place_experts`). Only where an expert lives changes: losses and weights are those of a run that moves none,
but for the order of sums in the norm that clips. Where processes hold redundant ones, those that get most rows get
copies: sums over rows are in another order then.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.core.config.sections.parallel import ParallelSection
from tilewright.core.units import format_share
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.agree import sum_over
from tilewright.parallel.inside.experts.placement import LEAST, ExpertMove, Orders, by_rank, orders_of, usual, worth
from tilewright.parallel.inside.experts.rank_experts import places_of_mixtures
from tilewright.parallel.launch import on_first
from tilewright.parallel.world import World
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook

SETTLED = 20
"""Steps whose rows are counted before experts move by them."""
KEEPS = 0.99
"""Share of the rows that are remembered from step to step."""


class ExpertHook(StepHook):
    """Counts the rows of each expert, and asks for a new start where another placement is worth it.

    Args:
        model: of the run, its experts spread.
        world: of the run.
        section: `[parallel]`, with the present placement.
    """

    name = "experts"
    next_step = 1

    def __init__(self, model: Decoder, world: World, section: ParallelSection) -> None:
        self._model, self._world, self._section = model, world, section
        self._loads_LE: list[list[float]] = []
        self._steps, self._step_s = 0, 0.0
        self._last: Step | None = None

    def after_step(self, step: Step, result: StepResult) -> None:
        """Add up the rows that experts get in the step, over all ranks."""
        self._last, self.next_step = step, step.number + 1
        if result.skipped is not None:
            return
        load_LE = self._load_of_all_layers().cpu()
        before_LE = torch.tensor(self._loads_LE, dtype=torch.float64) if self._loads_LE else torch.zeros(1)
        self._loads_LE = (KEEPS * before_LE + load_LE).tolist()
        self._steps, self._step_s = self._steps + 1, result.seconds

    def _load_of_all_layers(self) -> torch.Tensor:
        """The load of the experts in this step [L, E] FP64, by layer of the whole model; a pipeline stage counts its
        own layers."""
        config, own = self._model.config, self._model.last_load_LE
        load_LE = torch.zeros(
            config.num_layers - config.num_dense_layers, config.num_experts,
            dtype=torch.float64, device=next(self._model.parameters()).device,
        )  # fmt: skip
        if own is not None:
            load_LE[places_of_mixtures(self._model)] = own.to(torch.float64)
        sum_over(self._world.row.handle, [load_LE])
        return load_LE

    def restart(self, steps_left: int, begin_s: float) -> Mapping[str, Any]:
        """Restart for another placement of experts, where it is worth a new start."""
        if self._steps < SETTLED:
            return {}

        def decide() -> ExpertMove | None:
            ranks = self._world.experts.size
            times = {"steps_left": steps_left, "step_s": self._step_s, "move_s": begin_s}
            return worth(self._loads_LE, self._orders(), ranks, **times)  # type: ignore[arg-type]

        move = on_first(self._world, decide)
        if move is None:
            return {}
        self._tell(move)
        return {"parallel.expert_order": tuple(expert for order in move.orders for expert in order)}

    def _orders(self) -> Orders:
        number, ranks, more = self._model.config.num_experts, self._world.experts.size, self._section.redundant_experts
        now = orders_of(self._section.expert_order, number + ranks * more)
        return now or (usual(number, ranks, more),) * len(self._loads_LE)

    def _tell(self, move: ExpertMove) -> None:
        assert self._last is not None, "steps were counted"
        pairs = zip(move.orders, self._orders(), strict=True)
        held = [zip(*(by_rank(order, self._world.experts.size) for order in pair), strict=True) for pair in pairs]
        moved = sum(len(set(now) - set(before)) for ranks in held for now, before in ranks)
        text = (
            f"{moved} experts move to other processes: the fullest process has {move.after:.2f} times the mean rows, "
            f"not {move.before:.2f} times (threshold {format_share(LEAST)} fewer), by the rows of {self._steps} steps"
        )
        self._last.recorder.event(
            self._last.number, "experts", text, moved=moved, before=move.before, after=move.after, threshold=LEAST
        )

    def state_dict(self) -> dict[str, Any]:
        """The experts' rows that were counted, as state."""
        return {"loads": self._loads_LE, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counted rows of experts."""
        self._loads_LE, self._steps = state["loads"], state["steps"]
