"""All of torch's pipelining that has no public name, in one place: a stage whose micro-batches differ in shape, and a
step of them. A canary test asks for each name.

torch (2.13) takes shapes from the first micro-batch, and keeps one receive buffer of that shape per micro-batch
(pytorch #126600, #159942). Here a stage is given static metadata, so that no micro-batch is run to find them out, and
each buffer is made when it is received into, in its micro-batch's shape, and dropped after its backward pass: what is
in memory is what is under way. Nothing more is sent for it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _Action, _ComputationType

from tilewright.core.config.sections.parallel import ScheduleName
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue


class InterleavedDeferred(ScheduleInterleaved1F1B):
    """torch's interleaved schedule, each backward pass in two: what the stage before waits for is sent, and weight
    gradients are computed at once behind it. As many micro-batches are under way."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        found: list[_Action | None] = []
        for action in super()._calculate_single_rank_operations(rank):
            if action is None or action.computation_type != _ComputationType.FULL_BACKWARD:
                found.append(action)
                continue
            parts = _ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT
            found += [_Action(action.stage_index, part, action.microbatch_index) for part in parts]
        return found


SCHEDULES: dict[ScheduleName, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_deferred": InterleavedDeferred,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
PRIVATE_OF_STAGE = ("args_recv_info", "grad_recv_info", "chunks", "_runtime_validate")
PRIVATE_OF_INTERLEAVED = ("_calculate_single_rank_operations",)
PRIVATE_OF_SCHEDULE = ("_step_microbatches", "_has_backward", "_internal_losses")


class PassWatch(Protocol):
    """Told what a stage does next; what it returns is open while the stage does it."""

    def __call__(self, action: str, stage: int, number: int) -> AbstractContextManager[None]: ...


class RaggedStage(PipelineStage):
    """torch's stage, with a receive buffer per micro-batch that is made when it is needed.

    Args:
        module: called with what was received and `micro_batch=`; gives what is sent, or the loss.
        index, num_stages: its place in the row.
        device: of what is received.
        group: ranks in a row.
        width: of the residual stream.
        watch: told of each pass.
        sent: told of each tensor that is sent to another rank.
        before_reduce: called before FSDP2 reduces the gradients of the step.
        queue: of the module's layers, where their weight gradients wait; None: they are computed with the others.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None,
        width: int,
        watch: PassWatch,
        sent: Callable[[Tensor], None],
        before_reduce: Callable[[], None],
        queue: WeightGradientQueue | None = None,
    ) -> None:
        stream = torch.empty(1, 1, width, device="meta", requires_grad=True)
        ids, loss = torch.empty(1, device="meta"), torch.empty((), device="meta", requires_grad=True)
        first, last = index == 0, index == num_stages - 1
        super().__init__(
            module,
            index,
            num_stages,
            device,
            input_args=ids if first else stream,
            output_args=loss if last else stream,
            group=group,
            dw_builder=None if queue is None else queue.builder,
        )
        self._runtime_validate = False  # TORCH_DISTRIBUTED_DEBUG=DETAIL would ask for the one static shape
        self._watch, self._sent, self._before_reduce = watch, sent, before_reduce
        self._shapes: Sequence[torch.Size] = ()
        self._dtype = torch.float32

    def begin(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> None:
        """Begin a step of torch's pipelining: the shape [B, S, D] of what passes between stages for each
        micro-batch."""
        self._shapes, self._dtype = shapes, dtype
        self.chunks = len(shapes)
        self.has_backward = True
        self.clear_runtime_states()
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            for info in infos:
                info.buffer = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffer(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffer(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._told(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._told(super().get_bwd_send_ops(bwd_chunk_id))

    def _told(self, steps: list[dist.P2POp]) -> list[dist.P2POp]:
        for step in steps:
            self._sent(step.tensor)
        return steps

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._watch("forward", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        with self._watch("backward" if full_backward else "backward of inputs", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None  # its gradient is on its way, and holds what it needs

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._watch("backward of weights", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self._before_reduce()
        super().perform_reduce_grad(grad_scale_factor)

    def _make_buffer(self, infos: dict[int, Any], chunk: int) -> None:
        for info in infos[chunk]:
            if not info.is_root_arg:
                info.buffer = torch.empty(self._shapes[chunk], dtype=self._dtype, device=self.device)


class Schedules:
    """torch's schedules over a rank's stages, one object per number of micro-batches.

    Args:
        name: of the schedule.
        stages: of this rank.
    """

    def __init__(self, name: ScheduleName, stages: Sequence[RaggedStage]) -> None:
        self._make, self._stages = SCHEDULES[name], list(stages)
        self._single = issubclass(self._make, PipelineScheduleSingle)
        self._made: dict[int, Any] = {}

    def run(self, shapes: Sequence[torch.Size], dtype: torch.dtype, kwargs: Sequence[dict[str, Any]]) -> None:
        """Run a schedule of torch's pipelining: forward and backward passes of a step. All ranks in a row call it, with
        as many micro-batches.

        Args:
            shapes: of the residual stream, per micro-batch.
            dtype: of the stream.
            kwargs: for this rank's modules, per micro-batch.

        Raises:
            Exception: what a module raised, as it was raised.
        """
        count = len(shapes)
        schedule = self._made.pop(count, None)  # one that a step has left half-way is not used again
        if schedule is None:
            schedule = self._new(count)
        for stage in self._stages:
            stage.begin(shapes, dtype)
        targets: list[Tensor | None] = [None] * count
        try:
            schedule._step_microbatches(None, list(kwargs), targets, None, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch's is a dump of the arguments, under which ours is
        schedule._internal_losses.clear()
        self._made[count] = schedule

    def of(self, count: int) -> Any:
        """The schedule of torch's pipelining that steps of so many micro-batches run."""
        if count not in self._made:
            self._made[count] = self._new(count)
        return self._made[count]

    def _new(self, count: int) -> Any:
        stages = self._stages[0] if self._single else self._stages
        schedule = self._make(stages, n_microbatches=count, loss_fn=_as_it_is, scale_grads=False)
        initialize = schedule._initialize_stage if self._single else schedule._initialize_stages
        initialize((), {}, None)  # in the step it would put its own buffers in the place of ours
        return schedule


def _as_it_is(output: Tensor, target: None) -> Tensor:
    """Return the output as the loss: the last stage computes the loss itself, where torch's pipelining expects a loss
    function."""
    return output
