"""What a worker process of a build runs: one unit, or one file to see whether it is that which kills its process."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewright.data.build.config import DataBuild
from tilewright.data.build.context import Context
from tilewright.data.build.inputs import Item
from tilewright.data.build.plan import stage_named
from tilewright.data.build.stages.read import read_item, read_shard


def make_unit(
    setting: str,
    out: str,
    num_shards: int,
    build_id: str,
    stage: str,
    index: int,
    fingerprint: str,
    items: list[Item] | None,
    prefix: str = "",
) -> None:
    """Make one unit of the build with settings `setting` (JSON) in the folder `out`.

    Args:
        setting, out, num_shards: the build.
        build_id: another one for each build: what a worker knows of the units on disk holds for one build only.
        stage, index, fingerprint: the unit.
        items: what a unit of the first stage reads.
        prefix: of what is unfinished, before the number of this process.
    """
    context = _context(setting, out, num_shards, build_id)
    context.units.mark = f"{prefix}{os.getpid()}"

    def work(folder: Path) -> Mapping[str, Any]:
        return (
            stage_named(stage).run(context, index, folder)
            if items is None
            else read_shard(items, context.build, folder)
        )

    context.units.make(stage, index, fingerprint, work)


@lru_cache(maxsize=1)
def _context(setting: str, out: str, num_shards: int, build_id: str) -> Context:
    return Context(DataBuild.model_validate_json(setting), Path(out), num_shards=num_shards)


def try_item(setting: str, item: Item) -> None:
    """Read one item, and keep nothing of it."""
    for _ in read_item(item, DataBuild.model_validate_json(setting)):
        pass
