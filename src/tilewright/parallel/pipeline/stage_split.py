"""Which layers are in which stage, which stages on which rank, and how many micro-batches a schedule takes. No torch.

A stage is a range of layers; the first one has the prologue too, the last one the epilogue. A rank has one stage, or
`virtual` of them (interleaved): stage i is on rank i % pp, so the first stage is on the first rank, the last on the
last. Or two of them (V): down the ranks and up again, so the first rank has the first stage and the last one.

Layers are dealt out by what they and the model's ends cost, by their number where that is not known. What a plan counts
on, and a run then holds, is the split for the costs that the planner knows (`planner.advice.pipeline_rank_memory`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.core.config.sections.parallel import (
    DEFERRING,
    INTERLEAVED,
    V_SCHEDULES,
    ParallelSection,
    ScheduleName,
)
from tilewright.core.errors import ConfigError
from tilewright.parallel.pipeline.balance.resplit import SplitCosts, best_split

_AS_MANY: tuple[ScheduleName, ...] = ("1f1b", "dualpipe_v")
"""As many micro-batches as stages, at least."""


@dataclass(frozen=True)
class Pipeline:
    """How a model is cut into pipeline stages, and in what order they work.

    Example:
        >>> Pipeline(pp=2, schedule="interleaved", virtual=2).stages_of(1)
        [1, 3]
    """

    pp: int
    """Ranks in a row."""
    schedule: ScheduleName = "1f1b"
    virtual: int = 1
    """Stages per rank."""
    layers: tuple[int, ...] = ()
    """Of each stage; empty: by what they cost."""
    reverse: bool = False
    """The ranks in the other order: the last stage is on the first rank, where the order of ranks has it on the last.
    """

    @staticmethod
    def of(section: ParallelSection) -> "Pipeline":
        """The split of a recipe's pipeline."""
        return Pipeline(section.pp, section.schedule, section.stages_per_process, section.split)

    @property
    def is_v(self) -> bool:
        """True for a split in a V: a rank has two stages, as far from the first one as from the last: the first rank
        has both ends."""
        return self.schedule in V_SCHEDULES

    @property
    def defers(self) -> bool:
        """True if the split's schedule defers weight gradients: they are computed later than those of inputs."""
        return self.schedule in DEFERRING

    @property
    def num_stages(self) -> int:
        """Number of stages into which the pipeline's split divides the whole model."""
        return self.pp * self.virtual

    def stages_of(self, rank: int) -> list[int]:
        """Numbers of a rank's stages in the pipeline's split, in the order of the layers.

        Example:
            >>> [Pipeline(2, "zbv", 2).stages_of(rank) for rank in range(2)]
            [[0, 3], [1, 2]]
        """
        place = self._turned(rank)
        if self.is_v:
            return [place, self.num_stages - 1 - place]
        return list(range(place, self.num_stages, self.pp))

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage in the pipeline's split.

        Example:
            >>> [Pipeline(3, reverse=turned).rank_of(2) for turned in (False, True)]
            [2, 0]
        """
        return self._turned(min(stage, self.num_stages - 1 - stage) if self.is_v else stage % self.pp)

    def _turned(self, place: int) -> int:
        return self.pp - 1 - place if self.reverse else place

    def split(self, num_layers: int, costs: Sequence[int] = (), ends: tuple[int, int] = (0, 0)) -> list[range]:
        """Split layers over stages: as the recipe says, else so that the rank with most work has the least possible
        (`balance.resplit`). If an even split does that as well, it is taken: as many layers in each stage, one more in
        the first ones.

        Args:
            num_layers: of the model.
            costs: of each of them, in any unit; empty or all 0: nothing is known, and ends do not count either.
            ends: of the embedding and the head, in the same unit.

        Raises:
            ConfigError: fewer layers than stages, or what is said is of other stages or layers.

        Example:
            >>> Pipeline(pp=4).split(6), Pipeline(pp=2, layers=(4, 2)).split(6)
            ([range(0, 2), range(2, 4), range(4, 5), range(5, 6)], [range(0, 4), range(4, 6)])
            >>> Pipeline(pp=2).split(6, costs=(5, 5, 2, 2, 2, 2))
            [range(0, 2), range(2, 6)]
            >>> Pipeline(pp=2).split(6, costs=(1, 1, 1, 1, 1, 1), ends=(0, 2))
            [range(0, 4), range(4, 6)]
        """
        if num_layers < self.num_stages:
            each = f", {self.virtual} per process" if self.virtual > 1 else ""
            raise ConfigError(
                "Fewer layers than stages of the pipeline",
                got=f"{num_layers} layers, {self.num_stages} stages ({self.pp} processes{each})",
                need="at least one layer per stage",
                try_=self._fitting(num_layers),
                where="parallel.pp",
            )
        self._check_split(num_layers)
        bounds = (0, *itertools.accumulate(self.layers or self._dealt_out(num_layers, costs, ends)))
        return [range(*pair) for pair in itertools.pairwise(bounds)]

    def _dealt_out(self, num_layers: int, costs: Sequence[int], ends: tuple[int, int]) -> tuple[int, ...]:
        """Split layers over stages where the recipe says nothing."""
        least, more = divmod(num_layers, self.num_stages)
        even = tuple(least + (stage < more) for stage in range(self.num_stages))
        if not any(costs):
            return even
        ranks = [self.rank_of(stage) for stage in range(self.num_stages)]
        found = SplitCosts(costs, ranks, (1.0,) * self.pp, first=ends[0], last=ends[1])
        return min(even, best_split(found), key=found.slowest_s)

    def _check_split(self, num_layers: int) -> None:
        found = self.layers
        if not found or (len(found) == self.num_stages and min(found) > 0 and sum(found) == num_layers):
            return
        even = replace(self, layers=()).split(num_layers)
        raise ConfigError(
            "Split of layers over stages that is not one of this model",
            got=f"parallel.split = {list(found)}: {len(found)} stages, {sum(found)} layers",
            need=f"{self.num_stages} stages of at least one layer, {num_layers} layers in all",
            try_=f"--parallel.split [{','.join(str(len(one)) for one in even)}], or [] for one by what layers cost",
            where="parallel.split",
        )

    def _fitting(self, num_layers: int) -> str:
        if self.pp * 2 <= num_layers and not self.is_v:
            return f"--parallel.virtual_stages {num_layers // self.pp}"
        ways = f"--parallel.pp {num_layers}" if num_layers > 1 else "--parallel.pp 1"
        return ways if self.virtual == 1 else f"{ways} --parallel.schedule 1f1b"

    def takes(self, microbatches: int) -> bool:
        """True if the schedule of a split can run so many micro-batches in a step.

        Example:
            >>> [count for count in range(1, 9) if Pipeline(pp=3, schedule="interleaved", virtual=2).takes(count)]
            [1, 2, 3, 4, 5, 6, 8]
        """
        if self.schedule in _AS_MANY:
            return microbatches >= self.num_stages
        if self.schedule in INTERLEAVED:  # torch's takes them in rounds of about pp each, all of one size
            return microbatches > 0 and microbatches % max(1, microbatches // self.pp) == 0
        return microbatches > 0

    def check_count(self, microbatches: int, rows: int = 0, ranks: int = 1) -> None:
        """Raise where the schedule of a split cannot run so many micro-batches in a step.

        Args:
            microbatches: of a step, on each rank that reads different rows.
            rows: of each of them, for a setting to try; 0: no setting is named.
            ranks: that read different rows.

        Raises:
            ConfigError: it cannot.
        """
        if self.takes(microbatches):
            return
        most = microbatches + 2 * self.num_stages + 2
        fit = next(count for count in range(microbatches + 1, most) if self.takes(count))
        rounds = f"rounds of the same size, about {self.pp} each"
        needs = f"at least {self.num_stages}" if self.schedule in _AS_MANY else rounds
        way = f"--train.global_batch_size {fit * rows * ranks}" if rows else f"{fit} micro-batches"
        raise ConfigError(
            f'Number of micro-batches that schedule "{self.schedule}" does not take',
            got=f"{microbatches} micro-batches per step and process, parallel.pp = {self.pp}",
            need=f"{needs}: {fit} would do",
            try_=f'{way}, or parallel.schedule = "gpipe", which takes any number',
            where="parallel.schedule",
        )
