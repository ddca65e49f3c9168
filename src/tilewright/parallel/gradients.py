"""Gradients of a step, summed over ranks: replicas by all-reduce, shards as FSDP2 does it.

gradients = GradientReduction(model, params, group)
for index, batch in enumerate(microbatches):
    gradients.begin(last=index + 1 == len(microbatches))
    loss(batch).backward()
gradients.finish()  # the sum over all ranks is in param.grad, or in its parts
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.parallel.agree import sum_over
from tilewright.parallel.shard import fsdp_modules, keep_fp32_sums


class GradientReduction:
    """Sums gradients over the ranks of a run.

    Args:
        model: of which `params` are; sharded by `parallel.shard`, or the same on all ranks.
        params: trained parameters.
        group: ranks that read different data; None on one rank, where nothing happens.
        reduce_each: sum the gradients of a sharded model after each micro-batch: each rank keeps only its part of them
            from the first on. False: once per step, and whole gradients (4 bytes per parameter) until then, where
            there are several micro-batches.
    """

    def __init__(
        self, model: nn.Module, params: Sequence[Tensor], group: dist.ProcessGroup | None, *, reduce_each: bool = False
    ) -> None:
        self._group = group
        self._fsdp = list(fsdp_modules(model))
        self._model = model
        self._reduce_each = reduce_each
        self._whole = [param for param in params if not isinstance(param, DTensor)]
        if len(self._whole) < len(params) and not self._fsdp:
            raise ConfigError(
                "Sharded parameters in a model that is not sharded as a whole",
                got=f"{len(params) - len(self._whole)} DTensor parameters, and no module of FSDP2",
                need="torch's fully_shard on the model, or a replica of it on each rank",
                try_="tilewright.parallel.shard.shard(model, model.layers, mesh, Sharding())",
            )

    @property
    def sharded(self) -> bool:
        """Whether ranks hold parts of the model, and must run as many micro-batches as each other."""
        return bool(self._fsdp)

    def begin(self, *, last: bool) -> None:
        """Before the forward pass of a micro-batch.

        Args:
            last: of this step.
        """
        if self._fsdp:
            keep_fp32_sums(self._model)
        for module in self._fsdp:
            module.set_requires_gradient_sync(last or self._reduce_each, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)  # copies of a shard are summed once in any case

    def finish(self) -> None:
        """After the last backward pass."""
        sum_gradients(self._group, self._whole)


@torch.no_grad()
def sum_gradients(group: dist.ProcessGroup | None, params: Sequence[Tensor]) -> None:
    """Sum the gradients of replicated parameters over a group, in place; nothing with a group of None.

    A parameter that this rank did not use may be used on another, and has a gradient then; one that no rank used has
    none.

    Args:
        group: ranks.
        params: the same on all of them, in one order.
    """
    if group is None or not params:
        return
    used = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8, device=params[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    wanted = [param for param, is_used in zip(params, used.tolist(), strict=True) if is_used]
    for param in wanted:
        if param.grad is None:
            param.grad = torch.zeros_like(param, dtype=param.grad_dtype or param.dtype)
    sum_over(group, [param.grad for param in wanted if param.grad is not None])


def check_as_many(group: dist.ProcessGroup | None, microbatches: int, device: torch.device) -> None:
    """Ranks that hold parts of one model gather them together, so all run as many micro-batches.

    Raises:
        ConfigError: on all ranks, where one has another number.
    """
    if group is None:
        return
    bounds = torch.tensor([microbatches, -microbatches], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    most, least = bounds[0].item(), -bounds[1].item()
    if most != least:
        raise ConfigError(
            "Ranks of a sharded model with different numbers of micro-batches",
            got=f"{least} on one rank, {most} on another",
            need="the same number on each, some without targets if need be",
            try_="tilewright's `Stream`, which fills up ranks that have fewer rows",
        )
