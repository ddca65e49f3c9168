"""The hook around the steps of a pipeline: its passes are measured, idle time is told by cause, a cost model
follows, and the documents of the next steps are placed by it.

Ranks bring together what they have measured; the first one fits and decides, and all have its decision. What the model
says is acted on where places would move by more than `LEAST`: each such change is an event with its numbers.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import nn

from tilewright.core.units import format_share
from tilewright.data.batches.stream import Stream
from tilewright.models.base.preference import rows_of
from tilewright.ops.base.documents import STARTS, document_starts
from tilewright.parallel.agree import gather
from tilewright.parallel.launch import on_first
from tilewright.parallel.pipeline.balance.assign import RowShape
from tilewright.parallel.pipeline.balance.balancer import Balanced
from tilewright.parallel.pipeline.balance.cost_model import CostModel, StageWork, names_of
from tilewright.parallel.pipeline.balance.fit_costs import CostFit
from tilewright.parallel.pipeline.balance.layer_forms import LayerForm, kinds_of
from tilewright.parallel.pipeline.balance.measured_step import (
    FILE,
    MeasuredStep,
    MicroBatchSize,
    RankStep,
    StageKind,
)
from tilewright.parallel.pipeline.balance.replay import beside_s
from tilewright.parallel.pipeline.balance.resplit import SplitCosts, SplitMove, worth
from tilewright.parallel.pipeline.stage_base import Staged
from tilewright.parallel.world import World
from tilewright.training.executor.base import StepResult
from tilewright.training.executor.pipeline import PipelineExecutor
from tilewright.training.hooks.step_hook import Step, StepHook

LEAST = 0.03
"""Share of a step's cost that another place would have by what was measured, from which on places follow it."""
OFTEN, EVERY = 20, 10
"""Steps that are each measured; from then on every so many."""
_HISTORY = 500
_ENDS = (True, False), (False, True)
SETTLED = 5
"""Steps that the cost model has followed before layers move by it."""


class PipelineHook(StepHook):
    """Measures a pipeline, and balances its documents.

    Args:
        model: this rank's part.
        executor: of the run.
        world: of the run.
        stream: of the run.
        balance: whether its documents are placed by cost.
        resplit: whether layers move over stages.
        limit_bytes: that the run may use on this rank's device.
    """

    name = "pipeline"
    next_step = 1

    def __init__(
        self,
        model: Staged,
        executor: PipelineExecutor,
        world: World,
        stream: Stream,
        *,
        balance: bool,
        resplit: bool,
        limit_bytes: int,
    ) -> None:
        self._executor, self._world, self._stream = executor, world, stream
        self._pipeline, self._balance = model.pipeline, balance
        kinds, last = _agreed_kinds(model, world), model.pipeline.num_stages - 1
        self._kinds = [kind for of_stage in kinds.values() for kind in of_stage]
        self._stages = {i: StageKind(Counter(found), i == 0, i == last) for i, found in kinds.items()}
        self._resplit, self._step_s, self._usual = resplit, 0.0, MicroBatchSize(0, 0)
        self._limit_bytes = limit_bytes
        prior = _prior(model, kinds, world)
        self._fit = CostFit(prior, world.size)
        layers = sum((Counter(stage.layers) for stage in self._stages.values()), Counter())
        self._now = Balanced(
            prior, tuple(sorted(layers.items())), (1.0,) * world.data.size, RowShape.of(model.pipeline)
        )
        self._history: list[dict[str, Any]] = []
        self._first: dict[str, Any] | None = None
        self._compiled = False
        if balance:
            stream.assign_with(self._now)

    def after_step(self, step: Step, result: StepResult) -> None:
        """Fit the pipeline's cost model to the step, and assign the documents of later steps by it."""
        passes, parts = self._executor.clock.taken()
        self.next_step = step.number + (1 if step.number < OFTEN else EVERY)
        world, sizes = self._world, [size_of(batch) for batch in step.microbatches]
        mine = RankStep(world.data.rank, world.row.rank, passes, parts, sizes, world.tensor.rank)
        measured = MeasuredStep(gather(self._world.everyone.handle, mine))
        compiles, self._compiled = not self._compiled, True
        if compiles or not all(rank.passes for rank in measured.ranks):
            return  # the first step of a process is no measure, nor one that is not computed

        self._step_s, self._usual = result.seconds, _usual(measured)

        def decide() -> tuple[dict[str, Any], Balanced, float]:
            self._fit.learn(measured.stage_seconds(self._stages))
            return self._fit.state_dict(), *self._proposed(measured)

        state, proposed, moved = on_first(self._world, decide)
        self._fit.load_state_dict(state)
        if moved and self._balance:
            self._place(step, proposed, moved)
        if self._world.is_first:
            self._note(step, measured)

    def _proposed(self, measured: MeasuredStep) -> tuple[Balanced, float]:
        """Places of documents in the pipeline by what is known now, and the share of a step's cost that they put
        elsewhere; 0: too little."""
        documents = self._stream.documents if self._balance else None
        if documents is None or not len(documents.lengths_N):
            return self._now, 0.0
        count = len(documents.assignment[0])
        found = replace(
            self._now,
            model=self._fit.model,
            speeds=self._data_speeds(measured),
            each_s=beside_s(measured.rows),
            count=count,
        )
        return found, found.differs(self._now, documents.lengths_N, LEAST)

    def _data_speeds(self, measured: MeasuredStep) -> tuple[float, ...]:
        """The speed of each data rank of a pipeline: that of the slowest rank in its row, on a usual micro-batch."""
        usual = _usual(measured)
        slowest: dict[int, float] = {}
        for number, rank in enumerate(measured.ranks):
            stages = self._pipeline.stages_of(rank.row_rank)
            seconds = sum(self._fit.model.seconds(self._stages[stage].work(usual)) for stage in stages)
            slowest[rank.data_rank] = max(slowest.get(rank.data_rank, 0.0), seconds / self._fit.speeds[number])
        fastest = min(slowest.values())
        return tuple(fastest / slowest[row] for row in sorted(slowest))

    def restart(self, steps_left: int, begin_s: float) -> Mapping[str, Any]:
        """Restart a pipeline with another split of the layers, where measured seconds say that it is worth a new
        start."""
        if not self._resplit or self._fit.steps < SETTLED:
            return {}
        place = (self._world.data.rank, self._world.row.rank)
        ranks = gather(self._world.everyone.handle, (place, self._held(), self._bytes()))
        now = tuple(sum(stage.layers.values()) for _, stage in sorted(self._stages.items()))

        def decide() -> SplitMove | None:
            most = min((int(held * room) for _, held, room in ranks), default=0)
            speeds = [[1.0] * self._pipeline.pp for _ in range(self._world.data.size)]
            for ((row, rank), _, _), speed in zip(ranks, self._fit.speeds, strict=True):
                speeds[row][rank] = min(speed, speeds[row][rank])
            model, size = self._fit.model, self._usual
            seconds = [
                model.seconds(StageWork({kind: 1}, size.tokens, size.pairs)) - model.each_s for kind in self._kinds
            ]
            ends = [model.seconds(StageWork({}, size.tokens, size.pairs, *which)) - model.each_s for which in _ENDS]
            rank_of = [self._pipeline.rank_of(stage) for stage in range(self._pipeline.num_stages)]
            most = max(most, max(held for _, held, _ in ranks))
            rows = [SplitCosts(seconds, rank_of, of_row, *ends, most=most) for of_row in speeds]
            left = {"steps_left": steps_left, "step_s": self._step_s, "move_s": begin_s}
            return worth(rows, now, by_speed=self._balance, **left)

        move = on_first(self._world, decide)
        return {} if move is None else {"parallel.split": move.split}

    def _held(self) -> int:
        """Layers that this rank of the pipeline holds."""
        return sum(sum(self._stages[i].layers.values()) for i in self._pipeline.stages_of(self._world.row.rank))

    def _bytes(self) -> float:
        """How many times the bytes that this rank of the pipeline uses there are."""
        tracker = self._executor.memory_tracker
        peak = tracker.peak_bytes if tracker is not None else 0
        return self._limit_bytes / peak if peak else 1.0

    def _place(self, step: Step, proposed: Balanced, moved: float) -> None:
        before, self._now = self._now, proposed
        self._stream.assign_with(proposed)
        text = (
            f"documents are placed by measured seconds from step {step.number + 1} on: {format_share(moved)} of a "
            f"step's cost lies elsewhere (threshold {format_share(LEAST)}); data ranks' speeds "
            f"{', '.join(f'{speed:.2f}' for speed in proposed.speeds)}"
        )
        step.recorder.event(
            step.number, "balance", text, moved=moved, threshold=LEAST, speeds=list(proposed.speeds),
            speeds_before=list(before.speeds), coefficients=dict(zip(names_of(proposed.model.kinds),
            proposed.model.coefficients, strict=True)), each_s=proposed.each_s, error=_finite(self._fit.error),
        )  # fmt: skip

    def _note(self, step: Step, measured: MeasuredStep) -> None:
        idle = measured.idle()
        counts = {len(rank.sizes) for rank in measured.ranks}
        row = {"step": step.number, "idle": idle.share, "causes": idle.causes, "microbatches": max(counts)}
        self._history = [*self._history[-_HISTORY:], row | {"error": _finite(self._fit.error)}]
        last = row | {"ranks": measured.to_json()}
        self._first = self._first or last
        if step.due or self._first is last:
            model = dict(zip(names_of(self._fit.model.kinds), self._fit.model.coefficients, strict=True))
            fitted = {"seconds": model, "speeds": self._fit.speeds, "error": _finite(self._fit.error)}
            step.folder.write_json(
                FILE, {"first": self._first, "last": last, "history": self._history, "model": fitted}
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the pipeline's hook: the cost model, and the assignment of documents that follows from it."""
        return {"fit": self._fit.state_dict(), "places": self._now.to_json(), "next_step": self.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the pipeline's hook."""
        self._fit.load_state_dict(state["fit"])
        self._now = self._now.from_json(state["places"])
        self.next_step = state["next_step"]
        if self._balance:
            self._stream.assign_with(self._now)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def size_of(batch: Mapping[str, torch.Tensor]) -> MicroBatchSize:
    """Sizes behind a micro-batch's cost in the pipeline's hook; without `segments` a row is one document. Both answers
    of a pair are rows.

    Example:
        >>> ids = torch.zeros(1, 5, dtype=torch.int64)
        >>> size_of({"input_ids": ids, "segments": torch.tensor([[0, 0, 1, 1, 1]])})
        MicroBatchSize(tokens=5, pairs=13)
    """
    batch = rows_of(batch)
    ids_BS = batch["input_ids"]
    if STARTS not in batch and "segments" not in batch:
        return MicroBatchSize(ids_BS.numel(), ids_BS.numel() * ids_BS.shape[-1])
    starts_N1 = batch[STARTS] if STARTS in batch else document_starts(batch["segments"])
    lengths_N = torch.diff(starts_N1).long()
    return MicroBatchSize(ids_BS.numel(), int((lengths_N * lengths_N).sum()))


def _usual(measured: MeasuredStep) -> MicroBatchSize:
    """The usual micro-batch of a pipeline: the mean of a step's."""
    sizes = [size for rank in measured.ranks for size in rank.sizes]
    tokens, pairs = (sum(found) // max(1, len(sizes)) for found in zip(*map(astuple, sizes), strict=True))
    return MicroBatchSize(tokens, pairs)


def _agreed_kinds(model: Staged, world: World) -> dict[int, list[str]]:
    """Agree on the kind of each layer of each stage for the pipeline's hook; all ranks call it."""
    mine = {stage.index: [LayerForm.of(layer) for layer in stage.layers] for stage in model.stages}
    found: dict[int, list[LayerForm]] = {}
    for of_rank in gather(world.everyone.handle, mine):
        found |= of_rank
    kinds = iter(kinds_of(form for _, forms in sorted(found.items()) for form in forms))
    return {stage: list(itertools.islice(kinds, len(forms))) for stage, forms in sorted(found.items())}


def _prior(model: Staged, kinds: Mapping[int, list[str]], world: World) -> CostModel:
    """Make the pipeline's first cost model, in proportion to the FLOPs of matmuls (all experts counted) and of
    attention. All ranks call it."""
    mine = {
        kind: _matrices(layer)
        for stage in model.stages
        for kind, layer in zip(kinds[stage.index], stage.layers, strict=True)
    }
    ends = sum(_matrices(stage.ends) for stage in model.stages if stage.is_last)
    found: dict[str, int] = {}
    head = 0
    for of_rank, of_ends in gather(world.everyone.handle, (mine, ends)):
        found |= of_rank
        head = max(head, of_ends)
    names = tuple(sorted(found))
    of_layers = [float(size) for name in names for size in (found[name], model.width)]
    return CostModel(names, (*of_layers, 0.0, float(head), 0.0))


def _matrices(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.dim() > 1)
