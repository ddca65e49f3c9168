"""The plan of a step: how many micro-batches pass a row of ranks, and in which shapes. Checked before anything is sent.

A receive buffer has the shape of the plan. A rank that sends another shape would fill it in part, in silence, or end
the process (gloo); so the plans of a row are compared at the start of each step, with what is in the batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.models.distill.loss import MADE
from tilewright.parallel.world import World


@dataclass(frozen=True)
class StepPlan:
    """Of one rank.

    Example:
        >>> StepPlan.of([{"input_ids": torch.zeros(2, 8, dtype=torch.int64)}]).shapes
        ((2, 8),)
    """

    shapes: tuple[tuple[int, ...], ...]
    """Rows and positions [B, S] of each micro-batch."""
    digest: int
    """Of the batches' shapes and values: ranks in a row read the same. Without what a teacher has added."""

    @staticmethod
    def of(microbatches: Sequence[Mapping[str, Tensor]]) -> "StepPlan":
        """The plan of a step's micro-batches, which are on the host."""
        digest = xxhash.xxh3_64()
        for batch in microbatches:
            for name in sorted(batch.keys() - MADE):
                tensor = batch[name].detach().cpu().contiguous()
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        shapes = tuple(tuple(batch["input_ids"].shape) for batch in microbatches)
        return StepPlan(shapes, digest.intdigest() >> 1)  # of 63 bits, for a tensor of int64

    def check(self, world: World) -> None:
        """Raise where ranks do not plan the same step: another number of micro-batches anywhere, or other batches on
        ranks in a row. All ranks call it, once per step.

        Raises:
            ConfigError: the same on all ranks.
        """
        group = world.everyone.handle
        assert group is not None, "of several ranks"
        mine = torch.tensor([world.data.rank, len(self.shapes), self.digest])
        found = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(found, mine, group=group)
        ranks = [of_rank.tolist() for of_rank in found]
        counts = sorted({count for _, count, _ in ranks})
        if len(counts) > 1:
            raise ConfigError(
                "Ranks of a pipeline with different numbers of micro-batches",
                got=f"{counts[0]} on one rank, {counts[-1]} on another",
                need="the same number on each, some without targets if need be",
                try_="tilewright's `Stream`, which fills up ranks that have fewer rows",
            )
        of_rows: dict[int, dict[int, list[int]]] = {}
        for rank, (row, _, digest) in enumerate(ranks):
            of_rows.setdefault(row, {}).setdefault(digest, []).append(rank)
        for members in of_rows.values():
            if len(members) > 1:
                raise ConfigError(
                    "Ranks of a pipeline that do not read the same micro-batches",
                    got="; ".join(f"ranks {', '.join(map(str, of))} read the same" for of in members.values()),
                    need="the same rows, in the same shapes, on all stages of a copy: nothing was sent in this step",
                    try_="data and versions that are the same on all machines; "
                    "a stream made with `rank=world.data.rank, world=world.data.size`",
                )
