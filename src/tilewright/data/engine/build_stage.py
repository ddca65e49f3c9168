"""One stage of a build: what it is called, what it reads, and the function that makes one of its units.

Stages declare themselves in `stages`, each beside its function; `all_stages` has their order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_files import Item
from tilewright.data.engine.declared_inputs import StageInput, declared_settings, settings_identity
from tilewright.data.engine.unit_folders import fingerprint_of

Run = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class UnitWork:
    """The work that makes one unit: all that it reads is in here, and nothing else of the build. It can be pickled."""

    run: Run
    index: int
    settings: SimpleNamespace
    inputs: Mapping[str, Any]

    def __call__(self, folder: Path) -> Mapping[str, Any]:
        """Fill the folder of a stage's unit; returns counts."""
        return self.run(self.index, self.settings, folder, **self.inputs)


@dataclass(frozen=True)
class BuildStage:
    """One stage of a data build: its name, its inputs, and the function that makes a unit.

    Args:
        name: also of the folder of its units.
        says: what a progress bar shows.
        version: goes up with every change of code that changes what a unit holds.
        units: how many units there are, once all stages before are finished; 0 where the stage is off.
        run: fills the folder of a unit and returns counts: `run(index, settings, folder, **inputs)`. A function of a
            module, since other processes call it.
        settings: those that `run` gets: "section.setting", or "section" for all of a section.
        inputs: the others, by the name of the argument.
        versions: of libraries whose output may be another one in another version.
    """

    name: str
    says: str
    version: int
    units: Callable[[Context], int]
    run: Run
    settings: tuple[str, ...] = ()
    inputs: Mapping[str, StageInput] = field(default_factory=dict)
    versions: Callable[[], Sequence[str]] = tuple

    def fingerprint(self, c: Context, i: int) -> str:
        """Hash of everything that the unit `i` of a build stage depends on."""
        inputs = {name: one.identity(c, i) for name, one in self.inputs.items() if one.counts(c)}
        return fingerprint_of(
            [self.name, self.version, settings_identity(c.build, self.settings), inputs, *self.versions()]
        )

    def work(self, c: Context, i: int) -> UnitWork:
        """The work that makes the unit `i` of a build stage."""
        inputs = {name: one.value(c, i) for name, one in self.inputs.items()}
        return UnitWork(self.run, i, declared_settings(c.build, self.settings), inputs)

    def files(self, c: Context, i: int) -> list[Item]:
        """Files of the user that a stage's unit reads; each may kill the process that does."""
        return [item for one in self.inputs.values() for item in one.files(c, i)]
