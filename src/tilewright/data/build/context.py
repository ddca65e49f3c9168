"""One build: its settings, what it reads, and its units on disk. Every process of a build has one of these.

The order and the inputs of the stages are in `plan`; what a stage does is in `stages`.
"""

from functools import cached_property
from pathlib import Path

import numpy as np

from tilewright.data.build.config import DataBuild
from tilewright.data.build.inputs import Listing, list_inputs
from tilewright.data.build.ranges import slice_of
from tilewright.data.build.stages.copies.exact import DROP, doc_of
from tilewright.data.build.units import Units, fingerprint_of

WORK = "work"
"""Folder of the units below the folder of a build."""


class Context:
    """A build in the folder `out`."""

    def __init__(self, build: DataBuild, out: Path):
        self.build, self.out = build, out
        self.units = Units(out / WORK)
        self._digests: dict[str, str] = {}

    @cached_property
    def listing(self) -> Listing:
        """What there is to read. Every process lists it for itself."""
        return list_inputs(self.build.read)

    @property
    def num_shards(self) -> int:
        return len(self.listing.shards)

    def folder(self, stage: str, index: int = 0) -> Path:
        return self.units.folder(stage, index)

    def folders(self, stage: str, num: int | None = None) -> list[Path]:
        """Folders of all units of a stage; `num` of them, else one per shard."""
        return [self.folder(stage, i) for i in range(self.num_shards if num is None else num)]

    def one(self, stage: str, index: int = 0) -> str:
        """Hash of what a finished unit gave."""
        return self.units.digest(stage, index)

    def every(self, stage: str, num: int | None = None) -> str:
        """Hash of what all units of a stage gave."""
        if stage not in self._digests:
            count = self.num_shards if num is None else num
            self._digests[stage] = fingerprint_of([self.one(stage, i) for i in range(count)])
        return self._digests[stage]

    def told(self, stage: str) -> str:
        """Hash of what all shards of a stage tell of themselves: rejects."""
        return fingerprint_of([self.units.digest(stage, i, told=True) for i in range(self.num_shards)])

    def total(self, stage: str, count: str) -> int:
        """Sum of a count over all shards of a finished stage."""
        receipts = (self.units.receipt(stage, i) for i in range(self.num_shards))
        return sum(receipt["counts"][count] for receipt in receipts if receipt is not None)

    def drops(self, stage: str, num: int, shard: int) -> np.ndarray:
        """Records of a shard that go, by all units of a stage that searched for copies."""
        first, stop = (int(doc_of(s, np.zeros(1, np.int64))[0]) for s in (shard, shard + 1))
        found = [slice_of(folder / "drops.npy", first, stop, "doc") for folder in self.folders(stage, num)]
        return np.sort(np.concatenate([np.zeros(0, DROP), *found]), order="doc")
