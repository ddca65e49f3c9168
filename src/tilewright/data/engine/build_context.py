"""One build: its settings, what it reads, and its units on disk. The process that gives out the units has one.

The order of the stages is in `all_stages`; what a stage is, in `engine.build_stage`.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewright.data.engine.build_files import Item, Listing, list_inputs
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.reference_files import list_references
from tilewright.data.engine.unit_folders import Units, fingerprint_of
from tilewright.data.sources.content_hash import CONTENTS, Contents
from tilewright.data.sources.source_parts import Source

WORK = "work"
"""Folder of the units below the folder of a build."""


class Context:
    """The context of a data build in the folder `out`: its settings, what it reads, and its units.

    Args:
        build: settings.
        out: the folder.
        installed: the installed text, where it has been listed already.
    """

    def __init__(self, build: DataBuild, out: Path, installed: Source | None = None):
        self.build, self.out = build, out
        self._installed = installed
        self.units = Units(out.absolute() / WORK)
        self.contents = Contents(out / WORK / CONTENTS)
        self._digests: dict[str, str] = {}
        self._set_aside: set[Item] = set()
        self._once: dict[str, Any] = {}

    @cached_property
    def listing(self) -> Listing:
        """Listing of a build: the files that it reads. Each rank lists them for itself; workers are handed their
        part."""
        return list_inputs(self.build.read, self._installed, self.contents)

    @cached_property
    def references(self) -> dict[str, Listing]:
        """References of a build that scores are learned from, by setting; all of them are there."""
        return list_references(self.build, self.listing.domains(), self.contents)

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """The result of the first call of `find` in a build's context; the same for the whole build."""
        if name not in self._once:
            self._once[name] = find()
        return self._once[name]

    def set_aside(self, items: Iterable[Item]) -> None:
        """Hand these files to no unit of this build any more: they killed the processes that read them."""
        self._set_aside |= set(items)

    def is_set_aside(self, item: Item) -> bool:
        """True if `set_aside` of the build got this file."""
        return item in self._set_aside

    @property
    def num_shards(self) -> int:
        return len(self.listing.shards)

    def folder(self, stage: str, index: int = 0) -> Path:
        return self.units.folder(stage, index)

    def one(self, stage: str, index: int = 0) -> str:
        """Hash in the build's context of what a finished unit gave."""
        return self.units.digest(stage, index)

    def every(self, stage: str, num: int | None = None) -> str:
        """Hash in the build's context of what all units of a stage gave."""
        if stage not in self._digests:
            count = self.num_shards if num is None else num
            self._digests[stage] = fingerprint_of([self.one(stage, i) for i in range(count)])
        return self._digests[stage]

    def told(self, stage: str, num: int | None = None) -> str:
        """Hash of what all shards of a build's stage, or `num` units, report of themselves: rejects and tensors."""
        count = self.num_shards if num is None else num
        return fingerprint_of([self.told_one(stage, i) for i in range(count)])

    def told_one(self, stage: str, index: int) -> str:
        """Hash of what one unit of a build's stage reports of itself."""
        return self.units.digest(stage, index, told=True)

    def count(self, stage: str, index: int, name: str) -> int:
        """A count of a finished unit in the build's context."""
        receipt = self.units.receipt(stage, index)
        return 0 if receipt is None else receipt["counts"][name]

    def total(self, stage: str, count: str) -> int:
        """Sum of a count over all shards of a finished stage, in the build's context."""
        return sum(self.count(stage, i, count) for i in range(self.num_shards))

    def totals(self, stage: str, counts: str) -> dict[str, int]:
        """Sums over all shards of counts by name, in the build's context."""
        found: Counter[str] = Counter()
        for shard in range(self.num_shards):
            receipt = self.units.receipt(stage, shard)
            found.update({} if receipt is None else receipt["counts"][counts])
        return dict(sorted(found.items()))
