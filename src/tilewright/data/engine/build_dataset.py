"""Runs a build: stage after stage, only the units that are not finished, then the dataset's files under their names.

A build can be killed at any moment and started again. Two builds cannot run in one folder; ranks of one can.
"""

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import tokenizers

from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import DataError
from tilewright.data.common.progress import ProgressBar
from tilewright.data.dataset.open_built import DATASET, FORMAT
from tilewright.data.dataset.remote.shard_index import INDEX
from tilewright.data.engine.build_context import WORK, Context
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.executors.build_executor import UnitExecutor
from tilewright.data.engine.unit_folders import cannot_make, fingerprint_of, link_or_copy
from tilewright.data.sources.source_parts import Source
from tilewright.data.stages.all_stages import SHARDS, STAGES
from tilewright.data.stages.chat.render_conversations import TEMPLATE
from tilewright.data.stages.encode_records import ENCODER_CHOICE, encoder_of
from tilewright.data.stages.text.user_filters import FILTERS

PARTS = ("tokens", "records", "rejects", "media", SHARDS)
"""Folders of a dataset; `media` only where tensors are asked for, shards only where they are."""
_README = """---
configs:
- config_name: records
  default: true
  data_files:
{splits}
- config_name: rejects
  data_files: rejects/*.parquet
---

Built by `tilewright data build` from data.toml. `records` is the text, one row per run of tokens, with the file and the
bytes that it is from; `rejects` is what was dropped, by which rule; `tokens` is what `tilewright train` reads.
"""


def build_dataset(
    build: DataBuild, out: Path, executor: UnitExecutor, progress: ProgressBar, installed: Source | None = None
) -> dict[str, Any]:
    """Run a build of the dataset in the folder `out`, from where an earlier one stopped.

    Args:
        build: settings.
        out: the folder.
        executor: runs the units.
        progress: shows a phase per stage.
        installed: the installed text, where it has been listed already.

    Returns:
        What `dataset.json` holds, with `units`: how many were made now and how many were finished before.

    Raises:
        DataError: nothing usable, a folder that cannot be written, or a full disk.
        HardwareError: a process was killed for memory.
    """
    context = Context(build, out, installed)
    made = finished = 0
    with _locked(out, alone=executor.is_first):
        progress.phase("listing files")
        context.references  # noqa: B018  and the listing, before anything is written: what is not there is said at once
        FILTERS.inputs["filters"].value(context, 0)
        if build.chat.is_on:
            TEMPLATE.inputs["given"].value(context, 0)
        if executor.is_first:
            context.contents.save()
        context.units.clean(executor.mark)
        for stage in STAGES:
            count = stage.units(context)
            units = [(index, stage.fingerprint(context, index)) for index in range(count)]
            todo = [unit for unit in units if not context.units.is_done(stage.name, *unit)]
            progress.phase(stage.says, len(todo))
            made, finished = made + len(todo), finished + len(units) - len(todo)
            for index, _ in todo:
                context.units.forget(stage.name, index)
            executor.run(context, stage, todo, progress.advance)
            if executor.is_first:
                context.units.remove_beyond(stage.name, count)
        content = _publish(context) if executor.is_first else {}
    return content | {"units": {"made": made, "finished before": finished}}


@contextlib.contextmanager
def _locked(out: Path, *, alone: bool) -> Iterator[None]:
    """Lock the folder of a build's run: the first process holds it and cleans up after earlier ones."""
    try:
        (out / WORK).mkdir(parents=True, exist_ok=True)
        with (out / WORK / "lock").open("w") as file:
            if alone:
                _lock(file, out)
            yield
    except (OSError, MemoryError) as error:
        raise cannot_make(out, error) from error


def _lock(file: IO[str], out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            "Another data build runs in this folder",
            where=str(out),
            got="a lock held by another process",
            need="one build per folder at a time",
            try_="wait for it, or another --out",
        ) from None


def _publish(context: Context) -> dict[str, Any]:
    """Publish what a build's run made: give the dataset's files their names below `out`; nothing is done where they
    have them."""
    out, source = context.out, context.folder("dataset")
    folders = {part: (context.folder(SHARDS) if part == SHARDS else source) / part for part in PARTS}
    # 1. What made the dataset: the encoder, and a digest of each stage's units.
    encoder = f"tokenizers {tokenizers.__version__} (conversations)"
    if ENCODER_CHOICE.units(context):
        encoder = encoder_of(context.folder(ENCODER_CHOICE.name))
    stages = {}
    for stage in STAGES:
        receipts = [context.units.receipt(stage.name, i) for i in range(stage.units(context))]
        stages[stage.name] = [receipt["digest"] for receipt in receipts if receipt is not None]
    # 2. dataset.json says so. Where it is there, with all folders, nothing is left to do.
    content = {
        "format": FORMAT,
        "fingerprint": context.one("dataset"),
        "files": (context.units.receipt("dataset", 0) or {})["files"],
        "shards": ((context.units.receipt(SHARDS, 0) or {}).get("files") or {}).get(INDEX),
        "summary": json.loads((source / "tokens" / "summary.json").read_bytes()) | {"encoder": encoder},
        "settings": context.build.model_dump(mode="json"),
        "stages": {name: fingerprint_of(digests) for name, digests in stages.items()},
    }
    path, parts = out / DATASET, [part for part in PARTS if folders[part].is_dir()]
    if path.exists() and json.loads(path.read_bytes()) == content and all((out / part).is_dir() for part in parts):
        return content
    # 3. Without dataset.json the folder is no dataset: it goes first and comes last, so that a kill leaves no half of
    # one.
    path.unlink(missing_ok=True)
    for part in PARTS:
        if (out / part).exists():
            shutil.rmtree(out / part)
        if part in parts:
            shutil.copytree(folders[part], out / part, copy_function=link_or_copy)
    splits = sorted(
        {file.name.partition("-")[0] for file in (out / "records").iterdir()}, key=["train", "holdout", "media"].index
    )
    lines = "\n".join(f"  - split: {split}\n    path: records/{split}-*.parquet" for split in splits)
    (out / "README.md").write_text(_README.format(splits=lines))
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False))
    return content
