"""How fast the host and the disk are from here: measured once, cached per machine and disk, what a plan's tiers take.

The host link is measured on a GPU only: a CPU's host is its device. A disk is measured past the system's copies in
memory, as a tier that is larger than memory meets it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs
import torch

from tilewright.core.errors import TilewrightError
from tilewright.core.hardware import Machine
from tilewright.core.log import get_logger
from tilewright.core.units import format_bytes
from tilewright.memory.offload.bandwidth import measure_link
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.cost.rank_traffic import RankSpeed
from tilewright.planner.machine import rank_link

GUESSED_HOST, GUESSED_DISK = 25e9, 2e9
"""Bytes/s of a link and of a disk that were not measured."""
_FORMAT = 1
_HOST_SLICE, _DISK_SLICE = 256 * 2**20, 32 * 2**20
_log = get_logger(__name__)


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of the link to host or disk: bytes per second to the device (`read`) and from it (`write`)."""

    read: float
    write: float

    def __str__(self) -> str:
        return f"{format_bytes(self.read)}/s read, {format_bytes(self.write)}/s written"


S = TypeVar("S", LinkSpeed, RankSpeed)


def host_speed(
    machine: Machine,
    cache_dir: str | Path | None = None,
    *,
    refresh: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LinkSpeed | None:
    """Measured speed of the link between host and GPU; None on a CPU."""
    if machine.device == "cpu":
        return None
    key = _key("host", machine.device_name)

    def measured() -> LinkSpeed:
        if progress:
            progress(f"measuring the link to {machine.device_name} once")
        rates = measure_link("host", torch.device(machine.device), slice_bytes=_HOST_SLICE)
        return LinkSpeed(rates.read, rates.write)

    return _cached(key, cache_dir, refresh, measured, LinkSpeed)


def disk_speed(
    folder: str | Path,
    machine: Machine,
    cache_dir: str | Path | None = None,
    *,
    refresh: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LinkSpeed | None:
    """Measured speed of the link to the disk that a folder is on, or would be; None where nothing can be written there,
    which is reported.

    Args:
        folder: need not be there yet.
        machine: its device is the other end.
        cache_dir: folder of the cache; the user's cache folder by default.
        refresh: measure again.
        progress: called with a line of text before a measurement.
    """
    there = existing(folder)

    def measured() -> LinkSpeed:
        if progress:
            progress(f"measuring the disk of {there} once")
        rates = measure_link("disk", torch.device(machine.device), folder=there, slice_bytes=_DISK_SLICE)
        return LinkSpeed(rates.read, rates.write)

    try:
        return _cached(_key("disk", os.stat(there).st_dev, machine.device), cache_dir, refresh, measured, LinkSpeed)
    except (TilewrightError, OSError) as error:
        _log.warning("disk speed: %s cannot be measured (%s)", there, str(error).splitlines()[0])
        return None


def rank_speed(
    machine: Machine,
    ranks: int,
    cache_dir: str | Path | None = None,
    *,
    progress: Callable[[str], None] | None = None,
) -> RankSpeed | None:
    """Speed of the link between so many ranks on this machine; None of one, and of GPUs, which are not measured.

    Args:
        machine: a CPU.
        ranks: all of them on it.
        cache_dir: folder of the cache; the user's cache folder by default.
        progress: called with a line of text before a measurement.
    """
    if ranks == 1 or machine.device != "cpu":
        return None
    key = _key("ranks", *rank_link.NAMES, ranks, machine.device_name, torch.__version__)

    def measured() -> RankSpeed:
        return RankSpeed(**rank_link.measure(ranks, progress))

    return _cached(key, cache_dir, False, measured, RankSpeed)


def known(machine: Machine, folder: str | Path, cache_dir: str | Path | None = None) -> dict[str, LinkSpeed]:
    """Speeds of the links to storage from earlier measurements: "host" and "disk", as far as they are known. Measures
    nothing."""
    keys = {"host": _key("host", machine.device_name)} if machine.device != "cpu" else {}
    keys["disk"] = _key("disk", os.stat(existing(folder)).st_dev, machine.device)
    found = {name: _read(_path(key, cache_dir), LinkSpeed) for name, key in keys.items()}
    return {name: speed for name, speed in found.items() if speed is not None}


def as_links(host: LinkSpeed | None, disk: LinkSpeed | None, ranks: RankSpeed | None = None) -> Links:
    """The links of a plan: the slower direction of the host's link, both of the disk's, and the link between ranks."""
    return Links(
        host=None if host is None else min(host.read, host.write),
        disk=None if disk is None else disk.read,
        disk_write=None if disk is None else disk.write,
        ranks=ranks,
    )


def existing(folder: str | Path) -> Path:
    """The folder, or the nearest existing one above it, on whose disk the storage link is measured."""
    path = Path(folder).absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _key(*facts: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, os.uname().nodename, *map(str, facts)]).encode()).hexdigest()[:16]


def _path(key: str, cache_dir: str | Path | None) -> Path:
    folder = Path(cache_dir) if cache_dir else Path(platformdirs.user_cache_dir("tilewright"))
    return folder / "links" / f"{key}.json"


def _read(path: Path, kind: type[S]) -> S | None:
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        _log.warning("links: %s cannot be used (%s); measuring again", path, error)
        return None


def _cached(key: str, cache_dir: str | Path | None, refresh: bool, measured: Callable[[], S], kind: type[S]) -> S:
    path = _path(key, cache_dir)
    before = None if refresh else _read(path, kind)
    if before is not None:
        return before
    speed = measured()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(speed)), encoding="utf-8")
    except OSError as error:
        _log.warning("links: not cached, %s cannot be written (%s)", path, error.strerror)
    return speed


def unmeasured(machine: Machine) -> Links:
    """Guessed speeds of the links to storage, for a plan of what a recipe takes."""
    host = GUESSED_HOST if machine.device == "cuda" else None
    return Links(host, GUESSED_DISK, "guessed: 25 GB/s of the host's link, 2 GB/s of the disk")
