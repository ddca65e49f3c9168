"""What FSDP2's groups send, in a wire format and counted: by its public `set_custom_reduce_scatter` and
`set_custom_all_gather`, and `set_all_reduce_hook` for copies of the shards.

    exchange_shards(model, AsyncCommunicator(group, axis="dp_shard", wire="fp8", traffic=traffic))

Gradients are summed in the wire format. Parameters are gathered as they are, and counted. torch calls these in its own
streams on a GPU, and waits for each on a CPU.
"""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.traffic import Operation, whole_bytes, wire_name
from tilewright.parallel.communicate.transport import GroupTransport, all_gather_rows, reduce_scatter_rows
from tilewright.parallel.inside.experts.hold import expert_meshes
from tilewright.parallel.shard import fsdp_modules
from tilewright.precision.assign.gathered import param_groups


class _Counted:
    """A collective of one group's, as FSDP2 asks for it.

    Args:
        communicator: says how, and counts.
        name: of the group, for error feedback.
    """

    def __init__(self, communicator: AsyncCommunicator, name: str) -> None:
        self._communicator, self._name = communicator, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of what is sent, or comes."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _timed(self, operation: Operation, wire: str, tensor: Tensor, work: Any) -> Any:
        """What `work` returns; it is through then, but on a GPU, or where it is asynchronous."""
        began = time.perf_counter()
        found = work()
        if found is None and not tensor.is_cuda:
            took = time.perf_counter() - began
            self._communicator.traffic.took(self._communicator.axis, operation, wire, took, took)
        return found


class CountedAllGather(_Counted):
    """FSDP2's all-gather of a group's parameters."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather the ranks' parts."""
        wire, size = wire_name(input_tensor.dtype), whole_bytes("all_gather", output_tensor.nbytes, group.size())
        self._communicator.traffic.sent(self._communicator.axis, "all_gather", wire, size)
        options = {"group": group, "async_op": async_op}
        return self._timed(
            "all_gather", wire, output_tensor, lambda: all_gather_rows(output_tensor, input_tensor, **options)
        )


class WireReduceScatter(_Counted):
    """FSDP2's reduce-scatter of a group's gradients, which are FP32."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Sum the ranks' gradients; each gets its part. In a wire format only sums are there: `shard` asks for none
        but these."""
        communicator = self._communicator
        if not communicator.packs(input_tensor):
            wire = wire_name(input_tensor.dtype)
            size = whole_bytes("reduce_scatter", input_tensor.nbytes, group.size())
            communicator.traffic.sent(communicator.axis, "reduce_scatter", wire, size)
            options = {"op": op, "group": group, "async_op": async_op}
            return self._timed(
                "reduce_scatter",
                wire,
                input_tensor,
                lambda: reduce_scatter_rows(output_tensor, input_tensor, **options),
            )
        assert op == dist.ReduceOp.SUM, "gradients are sums"
        return self._timed(
            "reduce_scatter",
            communicator.wire,
            input_tensor,
            lambda: communicator.scatter_packed(GroupTransport(group), output_tensor, input_tensor, self._name),
        )


def exchange_shards(
    model: nn.Module,
    shards: AsyncCommunicator,
    *,
    experts: AsyncCommunicator | None = None,
    copies: AsyncCommunicator | None = None,
) -> None:
    """Let the groups of a sharded model send what they send by communicators, and count it.

    Args:
        model: from `parallel.shard`.
        shards: of the model.
        experts: shards of experts that are spread over other ranks; None where none are.
        copies: of the shards. In `fp32` FSDP2 sums their gradients itself and they are counted; in other formats the
            model is sharded over an axis alone, and what the hook of FSDP2 does is their sum. None: one copy.
    """
    spread = expert_meshes(model).keys()
    names = {module: name for name, module in model.named_modules()}
    for module in fsdp_modules(model):
        groups = param_groups(module)
        for place, group in enumerate(groups):
            of_experts = experts is not None and any(held.sharded_param in spread for held in group.fsdp_params)
            one, name = experts if of_experts else shards, f"{names.get(module, '')}.{place}"
            gather, reduce = CountedAllGather(one, name), WireReduceScatter(one, name)
            hook = None if copies is None else partial(_sum_copies, copies, f"{name}.copies")
            if len(groups) == 1:
                module.set_custom_all_gather(gather)  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
                if hook is not None:
                    module.set_all_reduce_hook(hook)
            else:  # FSDP2 has no public way where one module's parameters have two meshes
                group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook = gather, reduce, hook


def _sum_copies(copies: AsyncCommunicator, name: str, part: Tensor) -> None:
    if copies.packs(part):
        copies.async_all_reduce(part, name=name).wait()
    else:  # FSDP2 has summed it
        size = whole_bytes("all_reduce", part.nbytes, dist.get_world_size(copies.group))
        copies.traffic.sent(copies.axis, "all_reduce", wire_name(part.dtype), size)
