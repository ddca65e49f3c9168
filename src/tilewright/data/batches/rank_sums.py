"""Sums of losses by domain over the ranks of a run: each adds up its own rows, all are asked where a number is needed.

A checkpoint has the sums of all, so it is gathered before one is written.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.data.batches.stream import Stream
from tilewright.data.mixing.domain_sums import DomainSums
from tilewright.parallel.agree import reduced_on, sum_over
from tilewright.parallel.world import World


class SumsOfRanks:
    """Sums of losses by domain over all ranks of a run, since they were last taken.

    Args:
        stream: whose rows they are of.
        world: of the run.
        device: of the run.
    """

    def __init__(self, stream: Stream, world: World, device: torch.device) -> None:
        self.stream, self.world, self.device = stream, world, device
        self._all, self._mine = DomainSums(stream.domains), DomainSums(stream.domains)
        self.told = True
        """Whether the model tells the losses of rows."""

    def after_step(self, step: Any, result: Any) -> None:
        """Add the rows of a step of this rank to the sums of losses, where `numbers` has not.

        Args:
            step: see `training.hooks.step_hook.Step`.
            result: see `training.executor.base.StepResult`.
        """
        if not step.due:
            self.add(result)

    def numbers(self, step: Any, result: Any) -> Mapping[str, Any]:
        """Sums over ranks as `train_domains`: mean loss and targets of each domain since the last row that has them;
        called on all."""
        self.add(result)
        taken = self.take()
        targets = taken.targets()
        found = {name: {"loss": loss, "tokens": targets[name]} for name, loss in taken.means().items()}
        return {"train_domains": found} if found else {}

    def add(self, result: Any) -> None:
        """Add this rank's losses by domain, of its rows of a step, to the sums."""
        if result.rows is None:
            self.told &= result.skipped is not None or not result.num_targets
            return
        losses, targets = (column.detach().cpu().numpy() for column in result.rows)
        self._mine.add(self.stream.row_domains, losses, targets)

    def take(self) -> DomainSums:
        """Take the sums of losses by domain over all ranks, which begin again; called on all ranks."""
        self.gather()
        taken, self._all = self._all, DomainSums(self.stream.domains)
        return taken

    def gather(self) -> None:
        """Gather the sums of losses by domain from all ranks; called on all ranks."""
        group = self.world.data.handle
        mine = torch.from_numpy(self._mine.counts)
        if group is not None:
            mine = mine.to(reduced_on(group, self.device))
            sum_over(group, [mine])
        self._all.counts += mine.cpu().numpy()
        self._mine = DomainSums(self.stream.domains)

    def phase(self, name: str) -> None:
        """Sum over all ranks when a run enters the phase of a checkpoint, which has the sums of all."""
        if name == "save":
            self.gather()

    def state_dict(self) -> dict[str, Any]:
        """The ranks' sums for a checkpoint: losses by domain that no row of metrics has yet."""
        return {"all": self._all.state_dict(), "mine": self._mine.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the ranks' sums of losses by domain from `state_dict()`."""
        self._all.load_state_dict(state["all"])
        self._mine.load_state_dict(state["mine"])
