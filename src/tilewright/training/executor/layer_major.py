"""One optimizer step by layer groups of layers: the `Executor` whose parameters are updated during the backward pass.

The result is that of the standard executor, micro-batches of any size included. What differs is how a gradient is
clipped and what becomes of a bad one, because no moment holds the whole gradient:

exact   two backward passes: the first one gives the norm of the whole gradient, the second one updates. A bad step is
        found in the first one, so it has changed nothing.
delayed  one backward pass. What is known of this step is bounded by what is known of the one before
        (`optim.delayed_clip`). A bad loss or layer output is found before the first update. A gradient that turns out
        bad after some layer groups were updated is undone: by the rollback buffer that kept these layer groups' bytes,
        or, without one, by `UnrecoverableStepError`, upon which the run goes back to its newest checkpoint. Nothing is
        left half applied.

A step that finds no memory is taken back where nothing was updated, or where a rollback buffer keeps what was; else its
last pieces are computed again (`step_transaction`). `memory.layer_major.passes` computes; this file decides.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.core.memory_plan import MemoryPlan
from tilewright.data.batches.microbatches import (
    Batch,
    add_each_weighed,
    count_over,
    count_targets,
    mean_over,
    sums_of_rows,
    to_device,
)
from tilewright.memory.layer_major.apply_plan import PlanApplier
from tilewright.memory.layer_major.passes import LayerMajor
from tilewright.memory.layer_major.replay_random import Replay
from tilewright.memory.layer_major.rollback import RollbackBuffer
from tilewright.memory.offload.activations import ActivationStore
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.base.protocols import TrainableModel
from tilewright.models.layerwise.layer_view import LayerGroup, LayerGroups, LayerwiseModel
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.delayed_clip import DelayedClip
from tilewright.parallel.agree import any_of, sum_of
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.gradients import sum_gradients
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.training.executor.base import StepResult, keep_fp32_gradients
from tilewright.training.executor.standard import after_step
from tilewright.training.executor.step_transaction import (
    NOT_FINITE,
    BadSteps,
    PartialUpdateError,
    Stateful,
    StepTransaction,
    UnrecoverableStepError,
    others_wait,
    partial_update,
)
from tilewright.training.executor.summon_tensors import TensorAccess

Result = TypeVar("Result")


class _BadStep(Exception):
    """This step's numbers are bad; its text says how."""


@dataclass
class _Attempt:
    """A layer-major step so far."""

    factor: float
    """Of the summed loss: one over the number of targets."""
    targets: Sequence[int]
    """Of each micro-batch of this rank."""
    loss_sum: float = math.nan
    norms: dict[Tensor, Tensor] = field(default_factory=dict)
    """Length of each parameter's gradient so far, on the device."""
    skipped: str | None = None
    updated: list[LayerGroup] = field(default_factory=list)
    aux: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of the model in addition to its loss, summed over the targets of this rank."""

    def norm(self, order: Sequence[Tensor] | None = None) -> float:
        """Norm of the gradient so far in a layer-major step, in this order of the parameters. Waits for the device."""
        lengths = [self.norms[param] for param in order or self.norms if param in self.norms]
        return float(torch.linalg.vector_norm(torch.stack(lengths))) if lengths else 0.0


class LayerMajorExecutor:
    """Runs optimizer steps layer group by layer group. See `base.Executor`.

    Args:
        model: what `view` shows; `after_step` is called on it.
        view: the model layer by layer.
        layer groups: its parameters, as they are updated together.
        optimizer: over the model's parameters. Gradients of 16-bit parameters are kept in FP32.
        clip: bounds, and the threshold above which a step is skipped.
        delayed: clip by what was known a step before, in one backward pass.
        rollback_buffer: keeps what a delayed step changes; None: a bad one raises `UnrecoverableStepError`.
        device: where batches are moved.
        inputs: keeps layer inputs; by default on the device.
        residence: brings layer groups to the device; by default they live there.
        weights: 8-bit codes to refresh after updates.
        memory_tracker: measures memory by phase, if given.
        memory_plan: what is done with each layer; `inputs` and `offloader` are as it says. None: all is recomputed.
        data: ranks that read different rows; a layer group's gradient is summed over them. None on one rank.
        everyone: all ranks; None on one rank.
        communicator: sums gradients over `data`; None: one of this executor alone.

    Raises:
        ConfigError: see `memory.layer_major.apply_plan.by_group`.
    """

    def __init__(
        self,
        model: TrainableModel,
        view: LayerwiseModel,
        layer_groups: LayerGroups,
        optimizer: DeepSeekAdam,
        *,
        clip: GradClip,
        delayed: bool = False,
        rollback_buffer: RollbackBuffer | None = None,
        device: torch.device | str = "cpu",
        inputs: ActivationStore | None = None,
        offloader: ParamOffloader | None = None,
        weights: QuantizedWeights | None = None,
        memory_tracker: MemoryTracker | None = None,
        memory_plan: MemoryPlan | None = None,
        data: dist.ProcessGroup | None = None,
        everyone: dist.ProcessGroup | None = None,
        communicator: AsyncCommunicator | None = None,
    ) -> None:
        self.model = model
        self._data, self._everyone, self._communicator = data, everyone, communicator or AsyncCommunicator(data)
        self.optimizer = optimizer
        self.clip = clip
        self.device = torch.device(device)
        self.memory_tracker = memory_tracker
        self.weights = weights
        self.rollback_buffer = rollback_buffer
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self.delayed = DelayedClip(clip, self._params, self.device) if delayed else None
        self.transaction = StepTransaction(model, self._params, self.device, [clip])
        self.run = LayerMajor(
            view,
            layer_groups,
            inputs=inputs or ActivationStore("device", self.device),
            offloader=offloader or ParamOffloader(model, layer_groups, optimizer, self.device),
            replay=Replay(self.device),
            phase=self._phase,
            device=self.device,
            retry=self.transaction.retry_on_oom,
        )
        self._policy = PlanApplier(self.run, memory_plan, weights)
        self._bad_steps = BadSteps(model)
        self.access = TensorAccess(view, layer_groups, self.run.offloader)
        keep_fp32_gradients(self._params)

    def step(self, microbatches: Sequence[Batch], lr: float) -> StepResult:
        """Run one layer-major optimizer step: see `base.Executor`.

        Raises:
            NumericsError: the third step in a row whose gradient is not finite. The weights are those of the last good
                step.
            UnrecoverableStepError, PartialUpdateError: a bad gradient, or out of memory, after the first update, and
                no rollback buffer. The weights are of no use.
        """
        started, ran = time.perf_counter(), time.thread_time()
        num_targets, num_tokens = count_over(self._data, microbatches, self.device)
        if not num_targets:
            return StepResult(0.0, 0, num_tokens, 0.0, "the batch holds no targets", 1.0, time.perf_counter() - started)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        attempt = _Attempt(1.0 / num_targets, [count_targets([batch]) for batch in microbatches])
        delayed = self.delayed.now() if self.delayed is not None else None
        try:
            with self.transaction.rollback_on_oom(irrevocable=lambda error: self._final(error, attempt)) as before:
                batches = [to_device(batch, self.device) for batch in microbatches]
                norm = self._lagged(batches, attempt) if self.delayed is not None else self._exact(batches, attempt)
                self.run.end()
                loss = attempt.loss_sum / num_targets
                if attempt.skipped is None:
                    self._bad_steps.in_a_row = 0
                    after_step(self.model, self._data, self._finish)
                else:
                    before.forget_pass(self.clip)
                    self._bad_steps.watch(loss, norm)
        except (RuntimeError, MemoryError):
            if self.delayed is not None and delayed is not None:
                self.delayed.back_to(delayed)
            raise
        finally:
            self.run.end()
        if self.rollback_buffer is not None:
            self.rollback_buffer.commit()
        self.run.offloader.flush()
        add_each_weighed(attempt.aux, self.run.told, attempt.targets)
        data = self._data if attempt.skipped is None else None  # one that is left out may have had nothing to tell
        aux = mean_over(data, attempt.aux, sum(attempt.targets), self.device)
        seconds, ran = time.perf_counter() - started, time.thread_time() - ran
        rows = sums_of_rows(zip(self.run.each, microbatches, strict=False))  # a step that ended early has none
        return StepResult(loss, num_targets, num_tokens, norm, attempt.skipped, 1.0, seconds, aux, None, rows, ran)

    @property
    def memory_plan(self) -> MemoryPlan:
        """The layer-major executor's present plan of each layer."""
        return self._policy.now

    def apply_memory_plan(self, memory_plan: MemoryPlan) -> None:
        """Layer-major, between steps: do this with each layer from now on; see `PlanApplier.apply`."""
        self._policy.apply(memory_plan)

    def stateful(self) -> dict[str, Stateful]:
        """The layer-major executor's state: clipping, and the norms of the last step that delayed clipping uses."""
        return {"clip": self.clip, **({"delayed": self.delayed} if self.delayed is not None else {})}

    def close(self) -> None:
        """Close the layer-major executor: free threads, files and memory. What is stored off the device is lost."""
        self.run.inputs.close()
        self.run.offloader.close()
        if self.rollback_buffer is not None:
            self.rollback_buffer.close()

    # ---- exact: the norm first ----

    def _exact(self, batches: Sequence[Batch], attempt: _Attempt) -> float:
        finite = self._forward(batches, attempt)
        attempt.loss_sum = self._sum(
            self.run.backward(attempt.factor, lambda part: self._measure(part, attempt), last=not finite)
        )
        norm = attempt.norm(self._params)
        result = self.clip.decide(norm)
        good = finite and math.isfinite(norm) and math.isfinite(attempt.loss_sum)
        attempt.skipped = result.skip if good else NOT_FINITE
        if attempt.skipped is None:
            self.run.backward(attempt.factor, lambda part: self._apply(part, result.factor, attempt))
        return norm

    def _apply(self, part: LayerGroup, factor: float, attempt: _Attempt) -> None:
        params, grads = self._gradients(part)
        with self._phase("update"), torch.no_grad():
            self.clip.clamp(grads)
            if factor != 1.0 and grads:
                torch._foreach_mul_(grads, factor)
            attempt.updated.append(part)
            self._update(part, params, grads)

    # ---- delayed: updates on the way ----

    def _lagged(self, batches: Sequence[Batch], attempt: _Attempt) -> float:
        assert self.delayed is not None
        before = self.delayed.now()
        if self.rollback_buffer is not None:
            self.rollback_buffer.begin()
        try:
            if not self._forward(batches, attempt):
                raise _BadStep(NOT_FINITE)
            attempt.loss_sum = self._sum(
                self.run.backward(
                    attempt.factor, lambda part: self._apply_lagged(part, attempt), after_loss=self._check_finite
                )
            )
        except _BadStep as bad:
            self._take_back(attempt, str(bad))
            self.delayed.back_to(before)
        else:
            self.delayed.end(self._finish(attempt.norm))
        return self._finish(attempt.norm) if attempt.norms else math.nan

    def _apply_lagged(self, part: LayerGroup, attempt: _Attempt) -> None:
        assert self.delayed is not None
        with self._phase("update"), torch.no_grad():
            params, grads = self._gradients(part)
            norms = self._finish(lambda: self._ready(part, attempt))
            self._finish(lambda delayed=self.delayed: delayed(params, grads, norms))
            attempt.updated.append(part)
            self._update(part, params, grads)

    def _ready(self, part: LayerGroup, attempt: _Attempt) -> Tensor:
        """Layer-major, before the first change: is the gradient good, and are the layer group's bytes kept."""
        params, _ = _with_gradients(part)
        norms = self._measure_sum(part, attempt)
        norm = attempt.norm()
        if not math.isfinite(norm):
            raise _BadStep(NOT_FINITE)
        if norm > self.clip.threshold:
            raise _BadStep(f"gradient norm {norm:.3g} is above clip_threshold {self.clip.threshold:.3g}")
        if self.rollback_buffer is not None:
            self.optimizer.init_states(params)
            self.rollback_buffer.save(part, self._tensors(params))
        return norms

    def _take_back(self, attempt: _Attempt, why: str) -> None:
        """Take a layer-major step back, as if it had not happened."""
        attempt.skipped = why
        if not attempt.updated:
            return
        if self.rollback_buffer is None:
            raise UnrecoverableStepError(
                "Non-finite gradient during backward, after some layers were updated",
                got=f"{why}, after {len(attempt.updated)} of {len(list(self.run.layer_groups))} groups were updated",
                need="a finite gradient, or a checkpoint to go back to",
                try_='memory.rollback = "buffer", or optim.clip = "two_pass"',
            )
        self._roll_back(attempt)

    def _roll_back(self, attempt: _Attempt) -> None:
        buffer = self.rollback_buffer
        assert buffer is not None
        self._finish(lambda: buffer.rollback(self.run.offloader))
        for part in attempt.updated:
            self._refresh(part)
        attempt.updated.clear()

    def _final(self, error: BaseException, attempt: _Attempt) -> PartialUpdateError | None:
        """The error of a layer-major step that found no memory; None where nothing was updated, or it is undone."""
        if self._everyone is not None:
            return others_wait(error)
        if not attempt.updated:
            return None
        if self.rollback_buffer is None:
            groups = sum(1 for _ in self.run.layer_groups)
            return partial_update(error, f"{len(attempt.updated)} of {groups} layer groups were updated")
        self._roll_back(attempt)
        return None

    # ---- both ----

    def _finish(self, work: Callable[[], Result]) -> Result:
        """Finish a layer-major step: `StepTransaction.finish`; kept graphs are freed where memory runs out."""
        return self.transaction.retry_on_oom(work, self.run.free_saved_graphs)

    def _forward(self, batches: Sequence[Batch], attempt: _Attempt) -> bool:
        finite = self.run.forward(batches)
        add_each_weighed(attempt.aux, self.run.aux_metrics(), attempt.targets)
        return not any_of(self._everyone, not finite, self.device)

    def _sum(self, value: float) -> float:
        return sum_of(self._data, value, self.device)

    def _check_finite(self, loss_sum: float) -> None:
        if not math.isfinite(self._sum(loss_sum)):
            raise _BadStep(NOT_FINITE)

    def _gradients(self, part: LayerGroup) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of a layer group in a layer-major step: `_with_gradients`, once they are summed over the ranks."""
        sum_gradients(self._communicator, part.trained)
        return _with_gradients(part)

    @torch.no_grad()
    def _measure(self, part: LayerGroup, attempt: _Attempt) -> Tensor:
        """The norm of a layer group's gradients: `_measure_sum`, of the sum over the ranks."""
        self._gradients(part)
        return self._measure_sum(part, attempt)

    @torch.no_grad()
    def _measure_sum(self, part: LayerGroup, attempt: _Attempt) -> Tensor:
        """Measure the norms of a layer group's gradients, one per tensor; elements are clamped first if the recipe says
        so."""
        params, grads = _with_gradients(part)
        if not grads:
            return torch.zeros(0, device=self.device)
        norms = torch.stack(torch._foreach_norm(grads))
        if self.clip.elements and bool(norms.isfinite().all()):  # an overflow must stay one
            self.clip.clamp(grads)
            norms = torch.stack(torch._foreach_norm(grads))
        attempt.norms |= dict(zip(params, norms.unbind(), strict=True))
        return norms

    def _update(self, part: LayerGroup, params: list[Tensor], grads: list[Tensor]) -> None:
        """Layer-major update of a layer group whose gradients are in `.grad`."""
        self._finish(lambda: self.optimizer.step_params(*_with_gradients(part)))
        self._refresh(part)

    def _refresh(self, part: LayerGroup) -> None:
        if (weights := self.weights) is not None:
            self._finish(lambda: weights.refresh(part.modules))

    def _tensors(self, params: list[Tensor]) -> list[Tensor]:
        """All tensors that a layer-major update of these parameters changes."""
        return [tensor for param in params for tensor in (param, *self.optimizer.state[param].values())]

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self.memory_tracker.phase(name) if self.memory_tracker is not None else nullcontext()


def _with_gradients(part: LayerGroup) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a layer-major group that have a gradient, and these."""
    params: list[Tensor] = [param for param in part.trained if param.grad is not None]
    return params, [param.grad for param in params if param.grad is not None]
