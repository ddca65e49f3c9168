"""The declared inputs of a stage. One object gives a unit what it gets, and its fingerprint what that is.

So nothing can be read that does not count: an output, a file or a setting that is not declared is not handed over.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tilewright.data.engine.build_settings import DataBuild

if TYPE_CHECKING:
    from tilewright.data.engine.build_context import Context
    from tilewright.data.engine.build_files import Item

StageName = str | Callable[[DataBuild], str]
"""A stage, or which one it is under the settings of a build."""


def per_shard(c: "Context") -> int:
    """The number of units of a stage that has one per shard."""
    return c.num_shards


def one_unit(c: "Context") -> int:
    """The number of units of a stage that has one for all."""
    return 1


class StageInput(ABC):
    """Something that a unit of a stage reads."""

    @abstractmethod
    def identity(self, c: "Context", i: int) -> object:
        """Identity of a declared input: JSON that says which content it has for the unit `i`; every stage before is
        finished."""

    @abstractmethod
    def value(self, c: "Context", i: int) -> Any:
        """The value of a declared input that the unit gets. It travels to other processes, so it can be pickled."""

    def files(self, c: "Context", i: int) -> "list[Item]":
        """The user's files that a unit of the stage reads from this declared input. Each may kill the process that
        reads it."""
        return []

    def counts(self, c: "Context") -> bool:
        """True if a declared input is in the fingerprint."""
        return True


@dataclass(frozen=True)
class Same(StageInput):
    """The folder of the same unit of another stage.

    Args:
        stage: the stage.
        told: what is read is not what the unit hands on, but what it tells of itself: rejects and tensors
            (`unit_folders.TOLD`).
    """

    stage: StageName
    told: bool = False

    def identity(self, c: "Context", i: int) -> str:
        stage = named(self.stage, c)
        return c.told_one(stage, i) if self.told else c.one(stage, i)

    def value(self, c: "Context", i: int) -> Path:
        return c.folder(named(self.stage, c), i)


@dataclass(frozen=True)
class Only(StageInput):
    """The folder of the one unit of a stage."""

    stage: StageName

    def identity(self, c: "Context", i: int) -> str:
        return c.one(named(self.stage, c))

    def value(self, c: "Context", i: int) -> Path:
        return c.folder(named(self.stage, c))


@dataclass(frozen=True)
class Every(StageInput):
    """The folders of all units of a stage.

    Args:
        stage: the stage.
        units: how many it has.
        told: what they tell of themselves is read, too.
    """

    stage: StageName
    units: "Callable[[Context], int]" = per_shard
    told: bool = False

    def identity(self, c: "Context", i: int) -> object:
        stage, num = named(self.stage, c), self.units(c)
        return [c.every(stage, num), c.told(stage, num)] if self.told else c.every(stage, num)

    def value(self, c: "Context", i: int) -> "Folders":
        return Folders(c.units.root, named(self.stage, c), self.units(c))


@dataclass(frozen=True)
class FoundValue(StageInput):
    """A JSON value that is found as a stage begins: from settings, from the listing, from counts of finished units."""

    find: "Callable[[Context, int], Any]"

    def identity(self, c: "Context", i: int) -> object:
        return self.find(c, i)

    def value(self, c: "Context", i: int) -> Any:
        return self.find(c, i)


@dataclass(frozen=True)
class NoEffect(StageInput):
    """An input on which no output depends, and so no fingerprint: what an error says, or which of two libraries that
    give the same does the work."""

    find: "Callable[[Context, int], Any]"

    def identity(self, c: "Context", i: int) -> None:
        return None

    def value(self, c: "Context", i: int) -> Any:
        return self.find(c, i)


@dataclass(frozen=True)
class AddedSetting(StageInput):
    """A setting that a stage came to read when datasets had been built: at its default it is in no fingerprint, so that
    these stay finished.

    Args:
        name: `section.setting`.
    """

    name: str

    def identity(self, c: "Context", i: int) -> object:
        return self.value(c, i)

    def value(self, c: "Context", i: int) -> Any:
        return self._of(c.build)

    def counts(self, c: "Context") -> bool:
        return self._of(c.build) != self._of(DataBuild())

    def _of(self, build: DataBuild) -> Any:
        section, _, setting = self.name.partition(".")
        return getattr(getattr(build, section), setting)


@dataclass(frozen=True)
class Folders(Sequence[Path]):
    """Folders of the first `num` units of a stage, which are not listed one by one where they are sent."""

    root: Path
    stage: str
    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Path:  # type: ignore[override]
        if not 0 <= index < self.num:
            raise IndexError(index)
        return self.root / self.stage / f"{index:05}"

    def __iter__(self) -> Iterator[Path]:
        return (self[index] for index in range(self.num))


def named(stage: StageName, c: "Context") -> str:
    """The stage that is named by a declared input in a build."""
    return stage if isinstance(stage, str) else stage(c.build)


def declared_settings(build: DataBuild, names: Sequence[str]) -> SimpleNamespace:
    """The declared settings, of these names and no others: an attribute per section.

    Args:
        build: all of them.
        names: `section.setting`, or `section` for all of its settings.

    Example:
        >>> found = declared_settings(DataBuild(), ("limits", "read.max_chars"))
        >>> found.limits.depth, found.read.max_chars, hasattr(found.read, "source"), hasattr(found, "rules")
        (3, 65536, False, False)
    """
    found: dict[str, Any] = {}
    for name in names:
        section, _, setting = name.partition(".")
        whole = getattr(build, section)
        if not setting:
            found[section] = whole
        else:
            setattr(found.setdefault(section, SimpleNamespace()), setting, getattr(whole, setting))
    return SimpleNamespace(**found)


def settings_identity(build: DataBuild, names: Sequence[str]) -> dict[str, object]:
    """Identity of declared settings as JSON."""
    found: dict[str, object] = {}
    for name in names:
        section, _, setting = name.partition(".")
        values = getattr(build, section).model_dump(mode="json")
        found[name] = values[setting] if setting else values
    return found
