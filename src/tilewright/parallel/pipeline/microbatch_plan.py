"""The plan of a step: how many micro-batches there are, and what is in them. Checked before anything is sent.

Ranks that hold other layers or other parts of matrices read the same rows. Others would be mixed in silence, or, in
another shape, fill a receive buffer in part or end the process (gloo); so plans are compared at the start of each step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.models.distill.loss import MADE
from tilewright.parallel.agree import named_ranks
from tilewright.parallel.world import World


@dataclass(frozen=True)
class StepPlan:
    """The micro-batches of a step on one rank of a pipeline.

    Example:
        >>> one, other = ({"input_ids": torch.tensor([[token, 8]])} for token in (3, 4))
        >>> StepPlan.of([one, one]).count, StepPlan.of([one]) == StepPlan.of([other])
        (2, False)
    """

    count: int
    """Micro-batches."""
    digest: int
    """Of their shapes and values. Without what a teacher has added."""

    @staticmethod
    def of(microbatches: Sequence[Mapping[str, Tensor]]) -> "StepPlan":
        """The plan of a step's micro-batches, which are on the host."""
        digest = xxhash.xxh3_64()
        for batch in microbatches:
            for name in sorted(batch.keys() - MADE):
                tensor = batch[name].detach().cpu().contiguous()
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return StepPlan(len(microbatches), digest.intdigest() >> 1)  # of 63 bits, for a tensor of int64

    def check(self, world: World) -> None:
        """Check a plan of micro-batches: raise where ranks do not plan the same step: another number of them anywhere,
        or other batches on ranks that read the same. All ranks call it, once per step; in a loop of your own, before
        the first pass.

        Args:
            world: of the run.

        Raises:
            ConfigError: the same on all ranks.
        """
        group = world.everyone.handle
        assert group is not None, "of several ranks"
        # One collective, before any other: ranks with different plans would wait for each other forever.
        mine = torch.tensor([world.data.rank, self.count, self.digest])
        found = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(found, mine, group=group)
        ranks = [of_rank.tolist() for of_rank in found]
        counts = sorted({count for _, count, _ in ranks})
        # 1. The same number everywhere.
        if len(counts) > 1:
            raise ConfigError(
                "Ranks of one model with different numbers of micro-batches",
                got=f"{counts[0]} on one rank, {counts[-1]} on another",
                need="the same number on each, some without targets if need be",
                try_="tilewright's `Stream`, which fills up ranks that have fewer rows",
            )
        # 2. The same content on ranks that hold one copy of the model; other rows read other data.
        of_rows: dict[int, dict[int, list[int]]] = {}
        for rank, (row, _, digest) in enumerate(ranks):
            of_rows.setdefault(row, {}).setdefault(digest, []).append(rank)
        for members in of_rows.values():
            if len(members) > 1:
                raise ConfigError(
                    "Ranks of one copy of the model that do not read the same micro-batches",
                    got=f"other rows or shapes on {' than on '.join(map(named_ranks, members.values()))}",
                    need="the same on all ranks that hold other layers (pp) or other parts of matrices (tp): nothing "
                    "was sent in this step",
                    try_="data and versions that are the same on all machines; "
                    "a stream made with `rank=world.data.rank, world=world.data.size`",
                )
