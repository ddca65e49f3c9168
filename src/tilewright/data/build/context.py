"""One build: its settings, what it reads, its units on disk, and what a stage is. Every process of a build has one.

The order and the inputs of the stages are in `plan`; what a stage does is in `stages`.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from tilewright.core.atomic_io import write_whole
from tilewright.data.build.config import DataBuild
from tilewright.data.build.inputs import Item, Listing, list_inputs
from tilewright.data.build.ranges import slice_of
from tilewright.data.build.stages.copies.exact import DROP, doc_of
from tilewright.data.build.stages.scores.references import list_references
from tilewright.data.build.units import Units, fingerprint_of
from tilewright.data.sources.contents import CONTENTS, Contents
from tilewright.data.sources.documents import Source

WORK = "work"
"""Folder of the units below the folder of a build."""

_KILLERS = "killers.json"


class Context:
    """A build in the folder `out`.

    Args:
        build: settings.
        out: the folder.
        installed: the installed text, where it has been listed already.
        num_shards: where it is known: a process that is given what it reads lists nothing.
    """

    def __init__(self, build: DataBuild, out: Path, installed: Source | None = None, num_shards: int | None = None):
        self.build, self.out = build, out
        self._installed, self._num_shards = installed, num_shards
        self.units = Units(out / WORK)
        self.contents = Contents(out / WORK / CONTENTS)
        self.build_id = uuid4().hex
        """Another one for each context, for what may be remembered as long as this one lives."""
        self._digests: dict[str, str] = {}

    @cached_property
    def listing(self) -> Listing:
        """What there is to read. Each rank lists it for itself; workers get the list."""
        return list_inputs(self.build.read, self._installed, self.contents)

    @cached_property
    def references(self) -> dict[str, Listing]:
        """What scores are learned from, by setting; all of it is there."""
        return list_references(self.build, self.listing.domains(), self.contents)

    @property
    def readable_references(self) -> dict[str, Listing]:
        """The same without the files that killed the process which read them; what identifies them is as it was."""
        bad = self.killers()
        return {
            name: replace(found, shards=[[item for item in shard if item.key not in bad] for shard in found.shards])
            for name, found in self.references.items()
        }

    def killers(self) -> dict[str, str]:
        """Content of the references that killed their readers -> their names."""
        path = self.out / WORK / _KILLERS
        return json.loads(path.read_bytes()) if path.exists() else {}

    def set_aside(self, items: Sequence[Item]) -> None:
        """Read these references no more."""
        found = self.killers() | {item.key: item.name for item in items}
        write_whole(self.out / WORK / _KILLERS, json.dumps(found, indent=1, sort_keys=True))

    @property
    def num_shards(self) -> int:
        return len(self.listing.shards) if self._num_shards is None else self._num_shards

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

    def told(self, stage: str, num: int | None = None) -> str:
        """Hash of what all shards of a stage, or `num` units, tell of themselves: rejects and tensors."""
        count = self.num_shards if num is None else num
        return fingerprint_of([self.told_one(stage, i) for i in range(count)])

    def told_one(self, stage: str, index: int) -> str:
        """The same of one unit."""
        return self.units.digest(stage, index, told=True)

    def count(self, stage: str, index: int, name: str) -> int:
        """A count of a finished unit."""
        receipt = self.units.receipt(stage, index)
        return 0 if receipt is None else receipt["counts"][name]

    def total(self, stage: str, count: str) -> int:
        """Sum of a count over all shards of a finished stage."""
        return sum(self.count(stage, i, count) for i in range(self.num_shards))

    def totals(self, stage: str, counts: str) -> dict[str, int]:
        """Sums over all shards of counts by name."""
        found: Counter[str] = Counter()
        for shard in range(self.num_shards):
            receipt = self.units.receipt(stage, shard)
            found.update({} if receipt is None else receipt["counts"][counts])
        return dict(sorted(found.items()))

    def drops(self, stage: str, num: int, shard: int) -> np.ndarray:
        """Records of a shard that go, by all units of a stage that searched for copies."""
        first, stop = (int(doc_of(s, np.zeros(1, np.int64))[0]) for s in (shard, shard + 1))
        found = [slice_of(folder / "drops.npy", first, stop, "doc") for folder in self.folders(stage, num)]
        return np.sort(np.concatenate([np.zeros(0, DROP), *found]), order="doc")


@dataclass(frozen=True)
class BuildStage:
    """One stage. `says` is what a progress bar shows; `count` gives the number of units once all stages before it are
    finished; `reads` what a unit's fingerprint is taken from; `run` fills a unit's folder and returns counts."""

    name: str
    says: str
    version: int
    count: Callable[[Context], int]
    reads: Callable[[Context, int], object]
    run: Callable[[Context, int, Path], Mapping[str, Any]]
    references: tuple[str, ...] = ()
    """Settings that name files which a unit reads beside the records."""

    def files(self, context: Context) -> list[Item]:
        """The files of these settings."""
        listings = [context.references[name] for name in self.references if name in context.references]
        return [item for listing in listings for shard in listing.shards for item in shard]

    def fingerprint(self, context: Context, index: int) -> str:
        return fingerprint_of([self.name, self.version, self.reads(context, index)])
