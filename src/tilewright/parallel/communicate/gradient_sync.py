"""How a run's gradients are summed over its ranks, as `[parallel]` says it: which communicators there are, what they
count, and what they have lost.

    sync = GradientSync(world, recipe.parallel, kernels)
    sync.attach(model)                       # sharded: FSDP2 sends by it
    GradientReduction(..., communicator=sync.replicas)
    sync.begin(loss_scale); ...; sync.applied()   # around the passes of a step, and once the weights are new
"""

from datetime import timedelta

from torch import nn

from tilewright.core.config.recipe import ParallelSection
from tilewright.core.config.sections.parallel import WireName
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.feedback import ErrorFeedback
from tilewright.parallel.communicate.fsdp_exchanges import exchange_shards
from tilewright.parallel.communicate.sum_error import SumError
from tilewright.parallel.shard import is_sharded
from tilewright.parallel.world import Group, World


class GradientSync:
    """The synchronisation of gradients over a run's ranks, with its communicators. All ranks make it together.

    Args:
        world: of the run; what is sent is counted in its `traffic`.
        section: says the wire format, and whether what it loses is kept.
        kernels: make FP8 codes.
    """

    def __init__(self, world: World, section: ParallelSection, kernels: Kernels) -> None:
        self.feedback = ErrorFeedback() if section.grad_feedback else None
        self.errors = SumError(("data", "dp_replicate", "dp_shard", "efsdp")) if section.grad_sync_error else None
        """What the format loses, where that decides."""
        self._world, self._section, self._kernels = world, section, kernels
        self._made: list[AsyncCommunicator] = []
        self.replicas = self._of(world.data, "dp_replicate" if world.sizes.dp_shard == 1 else "data")
        """Sums gradients of parameters that all ranks of `data` hold whole."""

    def _of(self, group: Group, axis: str) -> AsyncCommunicator:
        timeout = timedelta(seconds=self._world.timeout_s) if self._world.timeout_s else None
        made = AsyncCommunicator(
            group.handle,
            axis=axis,
            wire=self._section.grad_sync,
            kernels=self._kernels,
            traffic=self._world.traffic,
            feedback=self.feedback,
            errors=self.errors,
            timeout=timeout,
        )
        self._made.append(made)
        return made

    @property
    def wire(self) -> WireName:
        """The wire format in which gradients are synchronised now."""
        return self.replicas.wire

    def widen(self, wire: WireName) -> None:
        """Send gradients in a wider format from the next step on; all ranks call it."""
        for communicator in self._made:
            communicator.widen(wire)

    @staticmethod
    def attached(world: World, section: ParallelSection, kernels: Kernels, model: nn.Module) -> "GradientSync | None":
        """Gradient sync of a model that is sharded, attached to it: see `attach`. None of one process, which sends
        nothing."""
        if world.size == 1:
            return None
        sync = GradientSync(world, section, kernels)
        sync.attach(model)
        return sync

    def attach(self, model: nn.Module) -> None:
        """Let FSDP2 send the gradients of a sharded model by this gradient sync; does nothing for a model that is not
        sharded."""
        if not is_sharded(model):
            return
        world = self._world
        exchange_shards(
            model,
            self._of(world.along("dp_shard"), "dp_shard"),
            experts=None if world.expert_mesh is None else self._of(world.expert_shards, "efsdp"),
            copies=None if world.sizes.dp_replicate == 1 else self._of(world.along("dp_replicate"), "dp_replicate"),
            coded=self._section.param_gather == "fp8",
        )

    def begin(self, loss_scale: float) -> None:
        """Begin gradient sync of a step: its passes begin, or begin again."""
        if self.errors is not None:
            self.errors.clear()
        if self.feedback is not None:
            self.feedback.forget()
            self.feedback.scale = loss_scale

    def owned_bytes(self) -> dict[str, int]:
        """Bytes of gradient sync by owner, that no parameter has (`memory.tracking`)."""
        return {} if self.feedback is None else {"gradients": self.feedback.nbytes}

    def applied(self) -> None:
        """Note that the summed gradients have changed the weights."""
        if self.feedback is not None:
            self.feedback.commit()
