"""One optimizer step in the plain way: autograd over micro-batches, one update.

The loss of a step is the mean over all its targets, whatever the micro-batches hold: targets are counted on the
host before the first forward pass, each micro-batch adds `loss_sum / total`, so uneven micro-batches give the gradient
of the whole batch. A step whose gradient is not finite or too large changes nothing but the loss scale (and generators,
which draw other numbers next time), and says so: buffers and notes of the model are as before.
A step that finds no memory changes nothing at all, and can be called again (`step_transaction`).
Which data comes, which learning rate, and what is written down is the matter of `run.Run`, which calls this.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.memory_plan import MemoryPlan
from tilewright.data.batches.microbatches import (
    Batch,
    add_weighed,
    count_over,
    count_targets,
    mean_over,
    sum_dtype,
    sums_of_rows,
    to_device,
)
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.base.protocols import TrainableModel
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.parallel.agree import OnAllRanksError, sum_over
from tilewright.parallel.communicate.gradient_sync import GradientSync
from tilewright.parallel.gradients import GradientReduction, check_as_many
from tilewright.parallel.pipeline.microbatch_plan import StepPlan
from tilewright.parallel.shard import in_parts
from tilewright.parallel.world import World
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.training.executor.activation_policy import ActivationPolicy
from tilewright.training.executor.base import (
    ExecutorInputs,
    StepResult,
    TensorAccess,
    keep_fp32_gradients,
)
from tilewright.training.executor.step_transaction import (
    NOT_FINITE,
    BadSteps,
    PartialUpdateError,
    Stateful,
    StepTransaction,
    others_wait,
    partial_update,
)


@dataclass(frozen=True)
class StandardAttempt:
    """A step as computed, its gradients in the parameters and not yet applied."""

    loss: float
    norm: float
    skipped: str | None
    aux: Mapping[str, Tensor]
    """Outputs of the model in addition to its loss, summed over the targets of this rank."""
    targets: int
    """Of this rank."""
    rows: tuple[Tensor, Tensor] | None


@dataclass
class StepProgress:
    """How far a step has got."""

    gradients: int | None = None
    """Parameters with a gradient when the update began. An update takes it away from each that it has changed where
    it cannot continue."""
    updated: bool = False
    """All weights are new."""


class StandardExecutor:
    """The executor of plain PyTorch: one backward pass per micro-batch, gradients accumulated, one update.

    Of several ranks those of `data` each pass micro-batches of their own; counts, losses and gradients are summed over
    them. `everyone` decides together: how many micro-batches there are, and whether memory is short. The model is the
    same on all ranks, or in parts (`parallel.shard`).

    Args:
        model: a module with `loss` and `after_step`.
        optimizer: over the model's parameters; its groups' rates are set at each step. Gradients of 16-bit parameters
            are kept in FP32: they are summed over micro-batches, divided by the loss scale and clipped there.
        scaler: dynamic loss scale, None for no scaling.
        clip: clipping, and the threshold above which a step is skipped.
        device: where batches are moved.
        memory_tracker: measures memory by phase, if given.
        control: redoes bad steps in wider formats, if given.
        policy: what the model's layers keep for backward, if that is to be read and changed.
        data: ranks that read different rows; None where this one reads all.
        everyone: all ranks; None on one rank.
        world: of a model in parts: ranks that read the same rows compare them in each step. None: nothing is compared.
        reduce_each: of a sharded model: sum gradients after each micro-batch, see `GradientReduction`.
        weights: 8-bit codes that the optimizer's steps renew.
        sync: how gradients are summed; None: as FP32.

    Raises:
        ConfigError: sharded parameters, and not by FSDP2.
    """

    def __init__(
        self,
        model: TrainableModel,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: DynamicScaler | None = None,
        clip: GradClip,
        device: torch.device | str = "cpu",
        memory_tracker: MemoryTracker | None = None,
        control: PrecisionController | None = None,
        policy: ActivationPolicy | None = None,
        data: dist.ProcessGroup | None = None,
        everyone: dist.ProcessGroup | None = None,
        world: World | None = None,
        reduce_each: bool = False,
        weights: QuantizedWeights | None = None,
        sync: GradientSync | None = None,
    ) -> None:
        self.access = TensorAccess()
        self.weights = weights
        self.control = control
        self._policy = policy
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.clip = clip
        self.device = torch.device(device)
        self.memory_tracker = memory_tracker
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._data, self._everyone = data, everyone
        self._reads = world if world is not None and world.size > world.data.size else None
        self._sync = sync
        replicas = None if sync is None else sync.replicas
        self._gradients = GradientReduction(
            model, self._params, data, everyone=everyone, reduce_each=reduce_each, communicator=replicas
        )
        self._sharded = self._gradients.sharded
        self._bad_steps = BadSteps(model)
        self.transaction = StepTransaction(
            model, self._params, self.device, [part for part in (clip, scaler, control) if part is not None]
        )
        keep_fp32_gradients(self._params)

    @property
    def memory_plan(self) -> MemoryPlan:
        """The standard executor's present plan of each layer. Of an executor that was made with `policy`."""
        assert self._policy is not None, "made without a policy"
        return self._policy.now

    def apply_memory_plan(self, memory_plan: MemoryPlan) -> None:
        """Standard executor, between steps: do this with each layer from now on; see
        `activation_policy.ActivationPolicy.apply`."""
        assert self._policy is not None, "made without a policy"
        self._policy.apply(memory_plan)

    def step(self, microbatches: Sequence[Batch], lr: float) -> StepResult:
        """Run one standard optimizer step: see `base.Executor.step`.

        Raises:
            NumericsError: without loss scaling, the third step in a row whose gradient is not finite. The weights
                are those of the last good step.
        """
        started, ran = time.perf_counter(), time.thread_time()
        progress = StepProgress()
        with self.transaction.rollback_on_oom(irrevocable=lambda error: self._final(error, progress)) as before:
            self._check_alike(microbatches)
            num_targets, num_tokens = count_over(self._data, microbatches, self.device)
            scale = self.scaler.scale_value if self.scaler is not None else 1.0
            # Forward and backward; with a controller a bad step is computed again in wider formats.
            if self.control is None or not num_targets:
                self._begin(scale)
                attempt, redone = self._attempt(microbatches, num_targets, scale), None
            else:
                attempt, redone = self._guarded(self.control, microbatches, num_targets, scale)
            with self._phase("update"):
                # The update, or nothing: then the statistics of the passes are put back.
                if attempt.skipped is None:
                    self._bad_steps.in_a_row = 0
                    self._apply(lr, progress)
                else:
                    before.forget_pass(self.clip)
                    self._bad_steps.watch(attempt.loss, attempt.norm, mended=self.scaler is not None)
                self.optimizer.zero_grad(set_to_none=True)
        told = self._told(attempt)
        seconds = time.perf_counter() - started
        return StepResult(
            attempt.loss,
            num_targets,
            num_tokens,
            attempt.norm,
            attempt.skipped,
            scale,
            seconds,
            told,
            redone,
            attempt.rows,
            time.thread_time() - ran,
        )

    def stateful(self) -> dict[str, Stateful]:
        """The standard executor's state: clipping and the loss scale."""
        found: dict[str, Stateful] = {"clip": self.clip}
        return found if self.scaler is None else found | {"scaler": self.scaler}

    def close(self) -> None:
        """Close the standard executor: nothing is held off the device."""

    def _guarded(
        self, control: PrecisionController, microbatches: Sequence[Batch], num_targets: int, scale: float
    ) -> tuple[StandardAttempt, str | None]:
        """A standard step, and why it was computed again in wider formats, if it was: where the controller finds it
        bad."""
        before = [(part, part.state_dict()) for part in (self.clip, self.scaler) if part is not None]
        attempts: list[StandardAttempt] = []

        def compute() -> tuple[float, float]:
            for part, state in before if attempts else ():
                part.load_state_dict(state)
            self._begin(scale)
            attempts.append(self._attempt(microbatches, num_targets, scale))
            return attempts[-1].loss, attempts[-1].norm

        redone, skipped = control.run_guarded(compute)
        return replace(attempts[-1], skipped=attempts[-1].skipped or skipped), redone

    def _check_alike(self, microbatches: Sequence[Batch]) -> None:
        """Raise where ranks that meet in the passes of a standard step would not run the same ones."""
        if self._reads is not None:
            StepPlan.of(microbatches).check(self._reads)
        elif self._sharded:
            check_as_many(self._everyone, len(microbatches), self.device)

    def _told(self, attempt: StandardAttempt) -> dict[str, float]:
        """Outputs of the model in a standard step, over all ranks."""
        return mean_over(self._data, attempt.aux, attempt.targets, self.device)

    def _begin(self, scale: float) -> None:
        """Begin an attempt of a standard step, which may be another one of the same step, or follow one that was
        skipped."""
        if self._sync is not None:
            self._sync.begin(scale)

    def _attempt(self, microbatches: Sequence[Batch], num_targets: int, scale: float) -> StandardAttempt:
        """Try a standard step: forward and backward over all micro-batches. The gradient of the mean loss is left in
        `param.grad`, summed over the ranks and clipped."""
        factor = scale / max(num_targets, 1)
        aux: dict[str, Tensor] = {}
        told: list[tuple[Tensor | None, Batch]] = []
        targets = [count_targets([batch]) for batch in microbatches]
        loss_sum = torch.zeros((), dtype=sum_dtype(self.device), device=self.device)
        gradients = self._gradients if self._sharded or self._everyone is not None else None
        with nullcontext() if gradients is None else gradients.passes(self.device):
            for index, host_batch in enumerate(microbatches):
                last = index + 1 == len(microbatches)
                if gradients is not None:
                    gradients.begin(last=last)
                batch = to_device(host_batch, self.device)
                with self._phase("forward"):
                    output = self.model.loss(batch)
                with self._phase("backward"):
                    (output.loss_sum * factor).backward()
                    if last and gradients is not None:
                        gradients.passed()
                loss_sum += output.loss_sum.detach()
                add_weighed(aux, output.aux, targets[index])
                told.append((output.each, host_batch))
        judged = self._judged(loss_sum, num_targets, scale)
        return StandardAttempt(*judged, aux, sum(targets), sums_of_rows(told))

    def _judged(self, loss_sum: Tensor, num_targets: int, scale: float) -> tuple[float, float, str | None]:
        """Sum loss and gradients of a standard step over ranks. Returns the mean loss, the norm, and a reason not to
        update."""
        with self._phase("update"):
            self._sum_over_ranks(loss_sum)
            loss = float(loss_sum) / max(num_targets, 1)
            if not num_targets:
                return loss, 0.0, "the batch holds no targets"
            return loss, *self._judge(loss, 1.0 / scale)

    def _sum_over_ranks(self, loss_sum: Tensor) -> None:
        """Sum the loss of a standard step over ranks, in place, and the gradients."""
        if self._sharded or self._everyone is not None:
            sum_over(self._data, [loss_sum])
            self._gradients.finish()

    def _judge(self, loss: float, inv_scale: float) -> tuple[float, str | None]:
        """Judge a standard step: unscale and clip the gradient, move the loss scale; the gradient's norm, and a reason
        not to apply it."""
        result = self.clip(self._params, inv_scale)
        overflow = not (math.isfinite(result.norm) and math.isfinite(loss))
        if self.scaler is not None:
            self.scaler.update(overflow)
        if overflow:
            return result.norm, "overflow" if self.scaler is not None else NOT_FINITE
        return result.norm, result.skip

    def _apply(self, lr: float, progress: StepProgress) -> None:
        """Update the weights at the end of a standard step, and what is computed from them."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        progress.gradients = self._num_gradients()
        self._update()
        progress.updated = True
        if self._sync is not None:
            self._sync.applied()
        after_step(self.model, self._data, self.transaction.retry_on_oom)

    def _update(self) -> None:
        optimizer = self.optimizer
        if not isinstance(optimizer, DeepSeekAdam) or optimizer.meets_ranks:
            optimizer.step()  # nothing is known of what it does half-way, or ranks wait for each other in it
            return
        before = optimizer.num_updates

        def go_on() -> None:
            if optimizer.num_updates > before:  # weights are new already, a hook has failed
                optimizer.zero_grad(set_to_none=True)
            optimizer.step()

        self.transaction.retry_on_oom(go_on)

    def _num_gradients(self) -> int:
        return sum(param.grad is not None for param in self._params)

    def _final(self, error: BaseException, progress: StepProgress) -> PartialUpdateError | None:
        """The error of a standard step that got so far and cannot be taken back; None where it can."""
        if self._everyone is not None:
            return None if isinstance(error, OnAllRanksError) else others_wait(error)
        if progress.updated:
            return partial_update(error, "the weights are new, and what follows from them is missing")
        if progress.gradients is None:
            return None
        done = progress.gradients - self._num_gradients()
        if not done and isinstance(self.optimizer, DeepSeekAdam):
            return None
        return partial_update(error, f"some of {progress.gradients} parameters were updated")

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self.memory_tracker.phase(name) if self.memory_tracker is not None else nullcontext()


def after_step(
    model: TrainableModel, data: dist.ProcessGroup | None, retry: Callable[[Callable[[], None]], None]
) -> None:
    """Call `model.after_step` behind a standard step; a model for one rank need not take a group.

    Args:
        model: whose weights are new.
        data: ranks that read different rows. They meet in it, and so repeat nothing.
        retry: calls a piece again where an allocator finds no memory.
    """
    retry(model.after_step) if data is None else model.after_step(data)


def standard_executor(inputs: ExecutorInputs) -> StandardExecutor:
    """The standard executor of a run."""
    model, optimizer, world = inputs.model, inputs.optimizer, inputs.world
    return StandardExecutor(
        model,
        optimizer,
        scaler=inputs.scaler,
        clip=inputs.clip,
        device=inputs.memory_tracker.device,
        memory_tracker=inputs.memory_tracker,
        control=inputs.control,
        policy=ActivationPolicy(model, inputs.plan_of(len(model.layers) or 1)),
        data=world.data.handle,
        everyone=world.everyone.handle,
        world=world,
        reduce_each=inputs.recipe.parallel.reduce_each,
        weights=quantized_weights(model, optimizer),
        sync=inputs.sync,
    )


def quantized_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> QuantizedWeights | None:
    """The standard executor's FP8 data of whole weights, made once per step; None where ranks hold parts: each pass
    quantises what it has gathered.

    Args:
        model: converted.
        optimizer: whose steps make them.
    """
    return None if in_parts(model) else QuantizedWeights(model, optimizer)
