"""Units of work on disk: a folder per (stage, unit), whole or not there, with a receipt of what it was made from.

A unit is built in a folder of another name and renamed. Its receipt holds a fingerprint (of the stage's version and
settings and of the outputs that it read), the sizes and hashes of its files, counts, and seconds. A unit with the
fingerprint that it would get now is finished and never runs again; any other is made again. Because fingerprints are
taken from the content of inputs, a stage that gives the same bytes as before invalidates nothing.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from tilewright.core.atomic_io import hash_file
from tilewright.core.errors import DataError, HardwareError, TilewrightError, is_of_machine, machine_error
from tilewright.core.units import format_bytes
from tilewright.memory.tracking.malloc import trim_malloc

RECEIPT = "receipt.json"
TOLD = ("rejects.parquet", "encoder.json", "histograms.json", "arrays.parquet", "pixels.npy", "log_mel.npy")
"""Files that tell what a unit did, and tensors of media. Only the stages for these and the last one read them, so that
only these run again for them."""


class Units:
    """The units of work of a build below one folder.

    Args:
        root: the folder; made where it is missing.
    """

    def __init__(self, root: Path):
        self.root = root
        self.mark = str(os.getpid())
        """In the names of unfinished units, so that processes do not meet in one."""
        self._known: dict[tuple[str, int], dict[str, Any]] = {}

    def folder(self, stage: str, index: int) -> Path:
        """The folder of a unit of the build."""
        return self.root / stage / f"{index:05}"

    def receipt(self, stage: str, index: int) -> dict[str, Any] | None:
        """The receipt of a unit's folder whose files are all there in their sizes, or None."""
        known = self._known.get((stage, index))
        if known is not None:
            return known
        folder = self.folder(stage, index)
        try:
            receipt = json.loads((folder / RECEIPT).read_bytes())
            if any((folder / name).stat().st_size != size for name, (size, _) in receipt["files"].items()):
                return None
        except (FileNotFoundError, ValueError, KeyError):
            return None
        self._known[stage, index] = receipt
        return receipt

    def forget(self, stage: str, index: int) -> None:
        """Forget a unit's receipt: look at the folder on disk again when it is asked for next: another process may have
        written it."""
        self._known.pop((stage, index), None)

    def digest(self, stage: str, index: int, *, told: bool = False) -> str:
        """Digest of what a finished unit's folder hands on; `told`: of what it reports of itself."""
        receipt = self.receipt(stage, index)
        assert receipt is not None, f"{stage} {index} is read before it is finished"
        return receipt["told" if told else "digest"]

    def is_done(self, stage: str, index: int, fingerprint: str) -> bool:
        """True if the unit's folder is finished as it would be made now."""
        receipt = self.receipt(stage, index)
        return receipt is not None and receipt["fingerprint"] == fingerprint

    def make(self, stage: str, index: int, fingerprint: str, work: Callable[[Path], Mapping[str, Any]]) -> None:
        """Make a unit's folder: run `work`, which fills it and returns counts, and publish it.

        Raises:
            TilewrightError: the disk is full, the folder cannot be written, too many files are open, or there is no
                memory. Units that are finished stay.
        """
        final = self.folder(stage, index)
        part = final.with_name(f"{final.name}.part-{self.mark}")
        # 1. The work, in a folder that no reader takes for a unit.
        try:
            part.mkdir(parents=True)
            started = time.perf_counter()
            counts = dict(work(part))
            # 2. The receipt: sizes and hashes, with a digest for stages that read results and one for those that read
            # reports.
            files = {p.relative_to(part).as_posix(): p for p in sorted(part.rglob("*")) if p.is_file()}
            listed = {name: [path.stat().st_size, hash_file(path)] for name, path in files.items()}
            receipt = {
                "fingerprint": fingerprint,
                "digest": fingerprint_of({name: file for name, file in listed.items() if name not in TOLD}),
                "told": fingerprint_of({name: file for name, file in listed.items() if name in TOLD}),
                "files": listed,
                "counts": counts,
                "seconds": round(time.perf_counter() - started, 4),
            }
            (part / RECEIPT).write_text(json.dumps(receipt, indent=1, sort_keys=True))
            # 3. Published by a rename: a unit is whole or not there.
            if final.exists():
                shutil.rmtree(final)
            part.rename(final)
        except (OSError, MemoryError) as error:
            raise cannot_make(self.root, error) from error
        except ImportError as error:
            raise _cannot_load(error) from error
        finally:
            if part.exists():
                shutil.rmtree(part, ignore_errors=True)
            _give_back()
        self.forget(stage, index)

    def clean(self, mark: str) -> None:
        """Clean the units' folder: remove what processes with this mark ("*": any) left that were killed."""
        for left in self.root.glob(f"*/*.part-{mark}"):
            shutil.rmtree(left, ignore_errors=True)

    def remove_beyond(self, stage: str, num: int) -> None:
        """Remove folders of units beyond the number that a stage has now."""
        for folder in (self.root / stage).glob("*"):
            if folder.name.isdecimal() and int(folder.name) >= num:
                shutil.rmtree(folder)


def _give_back() -> None:
    """Free what allocators keep of a unit's memory, behind its folder. It is twice what a process needs, and processes
    that wait, or that make small units after a large one, would hold it to the end of the build."""
    pa.default_memory_pool().release_unused()
    trim_malloc()


def fingerprint_of(value: object) -> str:
    """Fingerprint of a unit: hash of a JSON value."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def cannot_make(root: Path, error: OSError | MemoryError) -> TilewrightError:
    """The error of a data build that lacks something, or whose units' folder cannot be written."""
    if not isinstance(error, OSError):
        return machine_error(error, str(root))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = f", {format_bytes(shutil.disk_usage(root).free)} free" if full and root.exists() else ""
    if is_of_machine(error) and not full:
        return machine_error(error, error.filename or str(root))
    return DataError(
        "Data build cannot be written" if error.filename is None or full else "File of a data build cannot be used",
        where=str(root),
        got=f"{error.strerror or error}{free}" + (f": {error.filename}" if error.filename else ""),
        need="a folder that can be written, with room for about three times the text",
        try_="free some space and run the same command again: finished units stay" if full else "another --out",
    )


def _cannot_load(error: ImportError) -> HardwareError:
    return HardwareError(
        "Package that a data build needs cannot be loaded",
        got=str(error),
        need="the package, and open files and memory to load it with",
        try_='pip install "tilewright[data]", and the same command again: finished units stay',
        where=error.name or "",
    )


def link_or_copy(source: str, target: str) -> str:
    """Link or copy a unit's file: another name for it, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target
