"""One optimizer step over a row of ranks, each of which holds some layers: forward and backward passes of micro-batches
in the order of a pipeline schedule, and the update of the standard executor.

Gradient accumulation is the schedule's: all micro-batches of a step pass it, and their gradients are added up in the
parameters. torch's runtime drives FSDP2 inside a stage: nothing is reduced before the last pass, then all of it once;
`GradientReduction` sums what is not sharded. Losses are sums, known to the last stage and summed over the row; the norm
that is clipped is of the gradients of all stages.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from tilewright.data.batches.microbatches import (
    Batch,
    add_weighed,
    count_targets,
    mean_over,
    sum_dtype,
    sums_by_row,
    sums_of_rows,
    to_device,
)
from tilewright.models.base import preference
from tilewright.models.distill import loss as distill
from tilewright.parallel.agree import sum_over
from tilewright.parallel.communicate.traffic import wire_name
from tilewright.parallel.pipeline.balance.pass_times import PassClock
from tilewright.parallel.pipeline.rank_passes import PipelineSteps
from tilewright.parallel.pipeline.stage_base import Staged
from tilewright.parallel.world import World
from tilewright.training.executor.activation_policy import ActivationPolicy
from tilewright.training.executor.base import ExecutorInputs
from tilewright.training.executor.standard import (
    StandardAttempt,
    StandardExecutor,
    StepProgress,
    quantized_weights,
)

_VIOLATION = "moe_max_violation"


class PipelineExecutor(StandardExecutor):
    """The standard step with the passes of a pipeline.

    Args:
        model: this rank's part.
        optimizer: over its parameters.
        world: of the run.
        told: what the loss tells beside itself (`LossOutput.aux`), by name.
        options: see `StandardExecutor`.

    Raises:
        HardwareError: this torch has other pipelines.
    """

    def __init__(
        self, model: Staged, optimizer: torch.optim.Optimizer, *, world: World, told: Sequence[str] = (), **options: Any
    ) -> None:
        data, everyone = world.data.handle, world.everyone.handle
        super().__init__(cast(Any, model), optimizer, data=data, everyone=everyone, world=world, **options)
        self._world, self._staged, self._names_told = world, model, tuple(told)
        self._steps = PipelineSteps(model, self.device, self._watch, traffic=world.traffic)
        self._tell_pass: Callable[[str], AbstractContextManager[None]] = _untold
        """Told of each pass, open while it runs."""
        self.clock = PassClock(self.device)
        """Of the passes of this rank's stages in the last step."""
        if self.memory_tracker is not None:
            for queue in self._steps.queues:
                self.memory_tracker.count_beside(queue.owned_bytes)

    def schedule_of(self, count: int) -> Any:
        """The pipeline executor's schedule of torch's that steps of so many micro-batches run."""
        return self._steps.schedule_of(count)

    def _attempt(self, microbatches: Sequence[Batch], num_targets: int, scale: float) -> StandardAttempt:
        factor, aux = scale / max(num_targets, 1), dict[str, Tensor]()
        targets = [count_targets([batch]) for batch in microbatches]
        self.clock.begin()
        with self._told_of_passes():
            results = self._steps.run([to_device(batch, self.device) for batch in microbatches], factor)
        if (waited_s := self.clock.waited_s()) is not None:
            self._world.traffic.took("pp", "send", wire_name(self._staged.stream_dtype), waited_s, waited_s)
        loss_sum = torch.zeros((), dtype=sum_dtype(self.device), device=self.device)
        for result, count in zip(results, targets, strict=True):
            if result.loss_sum is not None:
                loss_sum += result.loss_sum
            add_weighed(aux, result.aux or {}, count)
        if self._names_told:
            self._tell_row(aux, self._names_told)
        told = [(result.each, batch) for result, batch in zip(results, microbatches, strict=True)]
        judged = self._judged(loss_sum, num_targets, scale)
        self.clock.until_now("gradients")
        return StandardAttempt(*judged, aux, sum(targets), self._rows_of_all(sums_of_rows(told), microbatches))

    def _rows_of_all(
        self, rows: tuple[Tensor, Tensor] | None, microbatches: Sequence[Batch]
    ) -> tuple[Tensor, Tensor] | None:
        """The last stage's values of each row, on all ranks of the pipeline."""
        counts = torch.cat([sums_by_row(torch.zeros(batch["labels"].shape), batch)[1] for batch in microbatches])
        sums = torch.zeros(1 + len(counts), device=self.device)
        if rows is not None:
            sums[0], sums[1:] = 1.0, rows[0]
        sum_over(self._world.row.handle, [sums])
        return (sums[1:], counts) if sums[0] else None

    def _tell_row(self, aux: dict[str, Tensor], names: Sequence[str]) -> None:
        """The last stage's outputs beside its loss, to all ranks of the pipeline: the others have nothing of it."""
        nothing = torch.zeros((), dtype=sum_dtype(self.device), device=self.device)
        sums = torch.stack([aux.get(name, nothing) for name in names])
        sum_over(self._world.row.handle, [sums])
        aux |= dict(zip(names, sums, strict=True))

    def _sum_over_ranks(self, loss_sum: Tensor) -> None:
        super()._sum_over_ranks(loss_sum)
        sum_over(self._world.row.handle, [loss_sum])

    def _told(self, attempt: StandardAttempt) -> dict[str, float]:
        """Means of experts' outputs over the pipeline's layers, of which stages have different numbers."""
        layers = self._staged.counting_layers
        if layers is None:
            return super()._told(attempt)
        sums = {_VIOLATION: attempt.aux.get(_VIOLATION, torch.zeros(())) * layers}
        others = replace(attempt, aux={name: value for name, value in attempt.aux.items() if name != _VIOLATION})
        of_layers = mean_over(self._world.everyone.handle, sums, attempt.targets * layers, "cpu")
        return super()._told(others) | of_layers

    def _apply(self, lr: float, progress: StepProgress) -> None:
        with self.clock.measure("update"):
            super()._apply(lr, progress)

    @contextmanager
    def _told_of_passes(self) -> Iterator[None]:
        """Open while the passes of a pipeline's step run."""
        heartbeat = self._world.heartbeat
        if heartbeat is None:
            yield
            return
        with heartbeat.passing() as self._tell_pass:
            yield

    @contextmanager
    def _watch(self, action: str, stage: int, number: int) -> Iterator[None]:
        """Watch a pass of a pipeline's stage: a phase of memory, and of this rank's record by the stage's name."""
        phase = "backward" if action == "backward of inputs" else action
        told = self._tell_pass(f"{action} of micro-batch {number + 1}, stage {stage + 1}")
        with told, self._phase(phase), self.clock.measure(action, stage, number):
            yield


def _untold(name: str) -> AbstractContextManager[None]:
    """Open while a pass of an unwatched run's pipeline runs; does nothing."""
    return nullcontext()


def pipeline_executor(inputs: ExecutorInputs) -> PipelineExecutor:
    """The pipeline executor of a run whose layers are on different ranks."""
    model = inputs.model
    assert isinstance(model, Staged), "cut by `parallelize`"
    recipe = inputs.recipe
    of_teacher = distill.TOLD if recipe.distill.teacher else ()
    return PipelineExecutor(
        model,
        inputs.optimizer,
        world=inputs.world,
        told=preference.TOLD if recipe.data.format == "preferences" else of_teacher,
        scaler=inputs.scaler,
        clip=inputs.clip,
        device=inputs.memory_tracker.device,
        memory_tracker=inputs.memory_tracker,
        control=inputs.control,
        policy=ActivationPolicy(model, inputs.plan_of(len(model.layers))),
        weights=quantized_weights(model, inputs.optimizer),
        sync=inputs.sync,
    )
