"""Interface of executors to a run, and the parts that they are made from.

A step is computed by `Executor.step` alone. The rest is what only the executor knows of a run's state: where tensors
have their bytes (`TensorAccess`), what of a step goes into a checkpoint, and what is to be given back.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tilewright.core.config.executors import Capabilities
from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import MemoryPlan, memory_plan_of
from tilewright.data.batches.microbatches import Batch, count_targets, count_tokens
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.parallel.communicate.gradient_sync import GradientSync
from tilewright.parallel.world import World
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.training.executor.step_transaction import Stateful, StepTransaction
from tilewright.training.executor.summon_tensors import TensorAccess


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, over all ranks."""

    loss: float
    """Mean loss a target, in nats, before the update."""
    num_targets: int
    """Targets that the loss is the mean of."""
    num_tokens: int
    """Tokens read, padding left out (images: rows)."""
    grad_norm: float
    """Global norm of the true gradient, before clipping."""
    skipped: str | None
    """Why the update was not applied; None where it was."""
    loss_scale: float
    """Loss scale that this step used, 1 without scaling."""
    seconds: float
    aux: Mapping[str, float] = field(default_factory=dict)
    """Outputs of the model in addition to its loss: means over the step's targets, over all ranks."""
    redone: str | None = None
    """Why the step was computed a second time, in wider formats; None where it was not."""
    rows: tuple[Tensor, Tensor] | None = None
    """Of each row, or whole document, that this rank read the sum of its targets' losses and their number, each [R], in
    the order of its micro-batches; the sums on its device, the numbers on the host. None where the model tells sums of
    batches only."""
    processor_s: float = 0.0
    """Of `seconds` those in which the calling thread had a processor; in the rest it waited for other programs, a disk,
    a device or other ranks. 0 where they are not counted."""

    @classmethod
    def left_out(cls, microbatches: Sequence[Batch]) -> "StepResult":
        """The result of an executor's step that is not computed, because it was lost before."""
        why = "its gradient turned bad half-way before, so it is left out"
        return cls(math.nan, count_targets(microbatches), count_tokens(microbatches), math.nan, why, 1.0, 0.0)


def keep_fp32_gradients(params: Iterable[Tensor]) -> None:
    """Keep gradients of 16-bit parameters in FP32, in which micro-batches are summed, unscaled and clipped."""
    for param in params:
        if param.dtype in (torch.float16, torch.bfloat16):
            param.grad_dtype = torch.float32


class Executor(Protocol):
    """Runs optimizer steps. Implementations differ in what is in memory when, never in the result."""

    transaction: StepTransaction
    """The transaction by which a step happens whole or not at all."""
    access: TensorAccess
    """The model's and optimizer's tensors, wherever this executor stores them."""
    weights: QuantizedWeights | None
    """Codes of the weights of layers with 8-bit matmuls, made once a step. Of weights that do not stay on the device,
    and where they are sharded (None), the codes are made in each pass."""

    @property
    def memory_plan(self) -> MemoryPlan:
        """The executor's present plan of each layer."""
        ...

    def apply_memory_plan(self, memory_plan: MemoryPlan) -> None:
        """Change the executor's memory plan between steps. No number of the run changes. On an error nothing is
        changed.

        Raises:
            ConfigError: this executor cannot do it, or not while the run continues.
            FitError: a tier has not so much room.
            HardwareError: the disk fails.
            RuntimeError: the device has not so much memory.
        """
        ...

    def step(self, microbatches: Sequence[Batch], lr: float) -> StepResult:
        """Run forward, backward and the update over this rank's micro-batches, at learning rate `lr`.

        Raises:
            torch.OutOfMemoryError, RuntimeError, MemoryError: an allocator found no memory. Nothing has changed: the
                same call may be made again.
            PartialUpdateError: the same in the middle of the update, which could not be brought to its end.
        """
        ...

    def stateful(self) -> Mapping[str, Stateful]:
        """Parts of a checkpoint that are this executor's, beside the tensors of model and optimizer, by name."""
        ...

    def close(self) -> None:
        """Close the executor: free threads, files and memory off the device."""
        ...


@dataclass(frozen=True)
class ExecutorInputs:
    """Parts that an executor is made from.

    Args:
        recipe: reads `[memory]`, `[optim]` and `[parallel]`.
        model: converted and cut. Its parameters are vacant where there are `values`, for an executor that can offload.
        optimizer: over them, without states.
        memory_plan: what is done with each layer; None: what the recipe says, of as many layers as there are.
        clip, scaler, control: of the run; without loss scaling or switched formats None.
        memory_tracker: measures by phase.
        kernels: implementations of the operations.
        world: the processes of the run.
        folder: of the disk tier.
        values: first values of vacant parameters.
        sync: how gradients are summed over the ranks; None: as FP32.
    """

    recipe: Recipe
    model: Model
    optimizer: DeepSeekAdam
    memory_plan: MemoryPlan | None
    clip: GradClip
    scaler: DynamicScaler | None
    control: PrecisionController | None
    memory_tracker: MemoryTracker
    kernels: Kernels
    world: World
    folder: Path
    values: InitialValues | None = None
    sync: GradientSync | None = None

    def plan_of(self, num_layers: int) -> MemoryPlan:
        """The executor's plan of each of so many layers."""
        return self.memory_plan or memory_plan_of(self.recipe, num_layers)


@dataclass(frozen=True)
class ExecutorKind:
    """An executor that a run can be given: `train(loaded, executor=...)`."""

    capabilities: Capabilities
    """A recipe that asks for more is refused."""
    make: Callable[[ExecutorInputs], Executor]
    """The executor of a run, before its first step."""
