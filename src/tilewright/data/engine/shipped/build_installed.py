"""The `installed` source as a data build: the shipped data.toml with the settings of a run, built into the cache.

The build's own folder is beside the cache entry until that is whole, so that a preparation that was killed goes on
where it was. The entry is the dataset without the units that it was made of.
"""

import shutil
from pathlib import Path

from tilewright.data.common.progress import ProgressBar
from tilewright.data.dataset.open_built import DATASET
from tilewright.data.engine.build_dataset import PARTS, build_dataset
from tilewright.data.engine.build_settings import DataBuild, load_data_toml
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.engine.unit_folders import link_or_copy
from tilewright.data.sources.installed_text import InstalledText
from tilewright.data.stages.all_stages import SHARDS, STAGES
from tilewright.data.stages.chat.render_conversations import RENDER, TEMPLATE
from tilewright.data.stages.text.user_filters import FILTERS

SETTINGS = Path(__file__).with_name("installed.toml")
_BYTES_PER_PROCESS = 4_000_000  # a process takes a second to start, which is what it reads and encodes 4 MB in


def installed_build(
    *, domains: tuple[str, ...], max_bytes: int, holdout: float, vocab_size: int, tokenizer: str, seed: int
) -> DataBuild:
    """The build of the `installed` source: shipped settings with those of a run. Arguments as in `prepare`."""
    shipped = load_data_toml(SETTINGS)
    read, split, tokens = shipped.read, shipped.split, shipped.tokenizer
    most = max_bytes * read.max_bytes // split.max_bytes  # 0 where there is no limit
    path = str(Path(tokenizer).expanduser().absolute()) if tokenizer else ""
    return shipped.model_copy(
        update={
            "read": read.model_copy(update={"domains": domains, "max_bytes": most, "seed": seed}),
            "split": split.model_copy(update={"holdout": holdout, "max_bytes": max_bytes, "seed": seed}),
            "tokenizer": tokens.model_copy(update={"path": path} | ({} if tokenizer else {"vocab_size": vocab_size})),
        }
    )


def build_key(build: DataBuild) -> str:
    """The cache key of the shipped build of installed text: what its content depends on besides the files: its
    settings, and the version of each stage."""
    settings = build.model_dump(mode="json")
    settings["tokenizer"].pop("path")  # its content counts, not where it is
    off = (SHARDS, FILTERS.name, TEMPLATE.name, RENDER.name)  # there are none
    for name in (SHARDS, FILTERS.name, "chat"):
        settings.pop(name)
    return repr((settings, [(stage.name, stage.version) for stage in STAGES if stage.name not in off]))


def build_entry(
    folder: Path, build: DataBuild, installed: InstalledText, unfinished: Path, processes: int, *, progress: ProgressBar
) -> None:
    """The cache entry of the shipped build of installed text: fill `folder` with the dataset that is built in the
    folder `unfinished`, which stays.

    Args:
        folder: of the entry.
        build: settings.
        installed: the files of the installed text.
        unfinished: where an earlier build of the same may have stopped.
        processes: at most so many; fewer where there is little text.
        progress: shows the phases.

    Raises:
        DataError: nothing usable, or a folder that cannot be written.
        HardwareError: a process was killed for memory.
    """
    useful = 1 + build.read.max_bytes // _BYTES_PER_PROCESS if build.read.max_bytes else processes
    with LocalExecutor(min(processes, useful)) as executor:
        build_dataset(build, unfinished, executor, progress, installed.source())
    for part in (part for part in PARTS if (unfinished / part).is_dir()):
        shutil.copytree(unfinished / part, folder / part, copy_function=link_or_copy)
    shutil.copyfile(unfinished / DATASET, folder / DATASET)
