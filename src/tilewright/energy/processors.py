"""Counters of processors and their memory: RAPL through powercap, through perf, and sockets through hwmon.

Linux documents the files: Documentation/power/powercap/powercap.rst, Documentation/hwmon/sysfs-interface.rst, and the
`power` event source of perf. Energy of a package includes its cores and its graphics; memory (`dram`) is apart; `psys`
is the whole board with all of these, so it is left out of a sum.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilewright.energy.counter import Counter, MeteredPart

_MICRO = 1e-6
_PERF_SYSCALL = {"x86_64": 298, "aarch64": 241}
_PERF_ATTR_BYTES = 128
OpenEvent = Callable[[int, int, int], int]
"""Type and number of an event, and a processor: a file that gives eight bytes, the count."""


@dataclass(frozen=True)
class FoundCounters:
    """Counters that can be read, and why others cannot."""

    counters: tuple[Counter, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass
class FileCounter:
    """A file with microjoules in decimal digits."""

    part: MeteredPart
    path: Path
    wraps_at: float | None = None

    def read(self, now: float) -> float:
        """Read a processor's counter from a file: see `Counter.read`."""
        text = self.path.read_text(encoding="ascii", errors="replace")
        try:
            return int(text) * _MICRO
        except ValueError as error:
            raise OSError(f"{self.path} holds no number") from error


@dataclass
class PerfCounter:
    """A file of perf; the kernel counts in 64 bits, over wraps of the hardware."""

    part: MeteredPart
    file: int
    joules_per_count: float
    wraps_at: float | None = field(default=None, init=False)

    def read(self, now: float) -> float:
        """Read a processor's counter of perf: see `Counter.read`."""
        held = os.read(self.file, 8)
        if len(held) != 8:
            raise OSError("perf gives no count")
        return struct.unpack("=Q", held)[0] * self.joules_per_count


def processor_counters(root: Path = Path("/"), open_event: OpenEvent | None = None) -> FoundCounters:
    """The processors' counters of this machine, from the first of powercap, perf and hwmon that can be read.

    Args:
        root: where `sys` is.
        open_event: opens an event of perf; None: the kernel's system call.
    """
    reasons: list[str] = []
    for found in (_powercap(root), _perf(root, open_event or perf_event), _hwmon(root)):
        if found.counters:
            return FoundCounters(found.counters, (*reasons, *found.reasons))
        reasons += found.reasons
    return FoundCounters(reasons=tuple(reasons))


def _powercap(root: Path) -> FoundCounters:
    folder = root / "sys/class/powercap"
    zones: dict[str, Path] = {}
    for path in sorted(folder.glob("*:*")) if folder.is_dir() else ():
        name = _text(path / "name")
        kind = name.partition("-")[0]
        if kind not in ("package", "dram"):
            continue
        owner = name if kind == "package" else f"memory of {_text(path.parent / path.name.rpartition(':')[0] / 'name')}"
        # A package is there once more under intel-rapl-mmio.
        zones.setdefault(owner, path)
    if not zones:
        return FoundCounters(reasons=("no zone of RAPL under /sys/class/powercap",))
    found, reasons = [], []
    for owner, path in zones.items():
        try:
            range_uj = int(_text(path / "max_energy_range_uj") or 0)
        except ValueError:
            range_uj = 0
        part = MeteredPart(owner, _covers(owner), "RAPL through powercap")
        counter = FileCounter(part, path / "energy_uj", range_uj * _MICRO or None)
        if reason := _unreadable(counter):
            reasons.append(reason)
        else:
            found.append(counter)
    return FoundCounters(tuple(found), _once(reasons))


def _perf(root: Path, open_event: OpenEvent) -> FoundCounters:
    folder = root / "sys/bus/event_source/devices/power"
    if not folder.is_dir():
        return FoundCounters(reasons=("no energy event of perf",))
    found, reasons = [], []
    for name, kind in (("energy-pkg", "package"), ("energy-ram", "memory of package")):
        path = folder / "events" / name
        if not path.exists():
            continue
        try:
            number = int(_text(path).partition("event=")[2].partition(",")[0], 0)
            scale, event_type = float(_text(folder / "events" / f"{name}.scale")), int(_text(folder / "type"))
            cpus = _cpus(_text(folder / "cpumask"))
        except ValueError:
            reasons.append(f"perf describes {name} in a way that is not known")
            continue
        for place, cpu in enumerate(cpus):
            try:
                file = open_event(event_type, number, cpu)
            except OSError as error:
                reasons.append(f"perf's {name} cannot be opened: {error.strerror or error} (perf_event_paranoid)")
                continue
            owner = f"{kind}-{place}"
            found.append(PerfCounter(MeteredPart(owner, _covers(owner), "RAPL through perf"), file, scale))
    return FoundCounters(tuple(found), _once(reasons, "" if found else "no energy event of perf"))


def _hwmon(root: Path) -> FoundCounters:
    """Processors' sockets by hwmon, of AMD's driver; other drivers do not say what they measure."""
    found, reasons = [], []
    for label in sorted((root / "sys/class/hwmon").glob("hwmon*/energy*_label")):
        text = _text(label)
        if not text.startswith("Esocket"):
            continue
        part = MeteredPart(f"package-{text[7:]}", _covers(f"package-{text[7:]}"), "amd_energy through hwmon")
        counter = FileCounter(part, label.with_name(label.name.replace("_label", "_input")))
        if reason := _unreadable(counter):
            reasons.append(reason)
        else:
            found.append(counter)
    return FoundCounters(tuple(found), _once(reasons, "" if found else "no socket's energy in hwmon"))


def perf_event(event_type: int, number: int, cpu: int) -> int:
    """Open an event of perf on one processor, for all processes.

    Raises:
        OSError: the kernel refuses it.
    """
    call = _PERF_SYSCALL.get(platform.machine())
    if call is None:
        raise OSError(f"perf's system call is not known on {platform.machine()}")
    attributes = struct.pack("=IIQ", event_type, _PERF_ATTR_BYTES, number).ljust(_PERF_ATTR_BYTES, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.syscall(call, ctypes.c_char_p(attributes), -1, cpu, -1, 0)
    if file < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return file


def _covers(owner: str) -> str:
    return owner if owner.startswith("memory") else f"{owner}: a processor with its caches, without the board's memory"


def _unreadable(counter: FileCounter) -> str:
    """Why a processor's counter cannot be read; empty where it can."""
    try:
        counter.read(0.0)
    except PermissionError:
        return f"only root may read {counter.path} (sudo chmod a+r, or perf's CAP_PERFMON)"
    except OSError as error:
        return f"{counter.path} cannot be read: {error.strerror or error}"
    return ""


def _once(reasons: Sequence[str], otherwise: str = "") -> tuple[str, ...]:
    """Each reason once why processors are not counted; where there is none, the other one."""
    return tuple(dict.fromkeys(reasons)) or ((otherwise,) if otherwise else ())


def _text(path: Path) -> str:
    """Text of a small file of a processor's counters; empty where there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _cpus(mask: str) -> list[int]:
    """Processors (CPUs) of a mask, one per package.

    Example:
        >>> _cpus("0,32-33")
        [0, 32, 33]
    """
    return list(_ranges(mask))


def _ranges(mask: str) -> Iterator[int]:
    for piece in filter(None, mask.split(",")):
        first, _, last = piece.partition("-")
        yield from range(int(first), int(last or first) + 1)
