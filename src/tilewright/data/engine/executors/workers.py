"""The work of a worker process of a build: one unit, or one file to see whether it is that which kills its process."""

import os
from pathlib import Path
from types import SimpleNamespace

from tilewright.data.engine.build_files import Item
from tilewright.data.engine.build_stage import UnitWork
from tilewright.data.engine.unit_folders import Units
from tilewright.data.stages.read_records import read_item


def make_unit(root: str, stage: str, index: int, fingerprint: str, work: UnitWork, prefix: str = "") -> None:
    """The worker's job: make one unit of the build whose units are in the folder `root`.

    Args:
        root: the folder.
        stage, index, fingerprint: the unit.
        work: fills its folder.
        prefix: of what is unfinished, before the number of this process.
    """
    units = Units(Path(root))
    units.mark = f"{prefix}{os.getpid()}"
    units.make(stage, index, fingerprint, work)


def try_item(settings: SimpleNamespace, item: Item) -> None:
    """The worker's trial of an item: read one file with the settings of the stage that reads it, and keep nothing of
    it."""
    for _ in read_item(item, settings):
        pass
