"""Forward and backward passes of a step over a row of ranks, each of which holds stages of one model."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.models.base.protocols import LayerContext
from tilewright.ops.base.tensor_parts import local
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue
from tilewright.parallel.communicate.traffic import TrafficCounter, wire_name
from tilewright.parallel.launch import PIPELINES
from tilewright.parallel.pipeline.stage_base import MicroBatch, Staged
from tilewright.parallel.pipeline.torch_names import PassWatch, RaggedStage, Schedules
from tilewright.parallel.shard import keep_fp32_sums
from tilewright.precision.mixed.gradient_queues import attach


@dataclass
class MicroBatchResult:
    """The results of a micro-batch that this rank knows after its passes."""

    loss_sum: Tensor | None = None
    """Without a factor; on the rank of the last stage."""
    each: Tensor | None = None
    """The loss of each target, there too."""
    aux: Mapping[str, Tensor] | None = None


def unwatched(action: str, stage: int, number: int) -> AbstractContextManager[None]:
    """A watch over passes that does nothing."""
    return nullcontext()


class PipelineSteps:
    """Runs a rank's stages in the order of a schedule.

    Args:
        model: this rank's part.
        device: of it.
        watch: told of each pass of a stage.
        traffic: counts what stages send; None: a counter of its own.

    Raises:
        HardwareError: this torch has other pipelines.
    """

    def __init__(
        self,
        model: Staged,
        device: torch.device,
        watch: PassWatch = unwatched,
        *,
        traffic: TrafficCounter | None = None,
    ) -> None:
        PIPELINES.check()
        counter = TrafficCounter() if traffic is None else traffic

        def sent(tensor: Tensor) -> None:
            counter.sent("pp", "send", wire_name(tensor.dtype), tensor.nbytes)

        self._model, self._device = model, device
        pipeline = model.pipeline
        # Schedules that split backward compute gradients of weights later, out of a queue per stage.
        self.queues = [WeightGradientQueue() for _ in model.stages if pipeline.defers]
        """Of the stages' weight gradients, where the schedule computes them later."""
        for stage, queue in zip(model.stages, self.queues, strict=False):
            attach(stage, queue)
        # torch's stages, each with what to do when a pass ends: report it, count what was sent, queue a gradient.
        stages = [
            RaggedStage(
                stage,
                stage.index,
                pipeline.num_stages,
                device=device,
                group=model.row.handle,
                width=model.width,
                watch=watch,
                sent=sent,
                before_reduce=partial(keep_fp32_sums, stage),
                queue=queue,
            )
            for stage, queue in itertools.zip_longest(model.stages, self.queues)
        ]
        self._schedules = Schedules(pipeline.schedule, stages)

    def schedule_of(self, count: int) -> Any:
        """The schedule of torch's in which ranks pass so many micro-batches in a step."""
        return self._schedules.of(count)

    def run(self, microbatches: Sequence[Mapping[str, Tensor]], factor: float) -> list[MicroBatchResult]:
        """Run the passes of ranks, forward and backward over all of them: gradients of `factor` times the sum of their
        losses are added to the parameters of this rank's stages, which have none, over all micro-batches, and reduced
        where FSDP2 shards. Of ends that are tied over two ranks both have the sum of their gradients, in the same bits.

        Args:
            microbatches: on the device. All ranks in a row have the same.
            factor: of the loss.

        Raises:
            ConfigError: the schedule does not take so many.
        """
        self._model.pipeline.check_count(len(microbatches))
        results = [MicroBatchResult() for _ in microbatches]

        def finish(number: int, x_BSD: Tensor, context: LayerContext) -> Tensor:
            out = self._model.epilogue(x_BSD, context, microbatches[number])
            results[number] = MicroBatchResult(out.loss_sum.detach(), out.each, out.aux)
            return out.loss_sum * factor

        passing = [MicroBatch(batch, partial(finish, number)) for number, batch in enumerate(microbatches)]
        shapes = [self._model.stream_shape(batch["input_ids"]) for batch in microbatches]
        with ExitStack() as regions:
            for queue in self.queues:
                regions.enter_context(queue.region())
            self._schedules.run(shapes, self._model.stream_dtype, [{"micro_batch": one} for one in passing])
        add_other_end(self._model)
        for result, one in zip(results, passing, strict=True):
            result.aux = {**(result.aux or {}), **self._model.aux_metrics(one.counted)}
        return results


@torch.no_grad()
def add_other_end(model: Staged) -> None:
    """Sum the gradient of a tied parameter over the two ranks that hold its ends, after the passes. The two ranks send
    each other theirs, and add them in either order, which gives the same bits.

    Args:
        model: this rank's part. Zeros are sent where it has no gradient; frozen ends have none.
    """
    peer, group = model.other_end, model.row.handle
    for param in (param for param in model.shared if param.requires_grad):
        if param.grad is None:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
        own = local(param.grad)
        sent, found = own.contiguous(), torch.empty_like(own, memory_format=torch.contiguous_format)
        passing = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, found, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(passing):
            work.wait()
        own.add_(found)
