"""Counters as Linux shows them, in a folder: their files, and what time does to them."""

from dataclasses import dataclass, field
from pathlib import Path

RANGE_UJ = 262_143_328_850
"""Of a package, in microjoules: 2^32 steps of 61 uJ."""


@dataclass
class FakeRapl:
    """A tree of powercap zones under `root`."""

    root: Path
    uj: dict[str, int] = field(default_factory=dict)

    def zone(self, path: str, name: str, uj: int = 0, range_uj: int | None = RANGE_UJ) -> None:
        folder = self.root / "sys/class/powercap" / path
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        if range_uj is not None:
            (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.set(path, uj)

    def set(self, path: str, uj: int) -> None:
        self.uj[path] = uj
        (self.root / "sys/class/powercap" / path / "energy_uj").write_text(f"{uj}\n")

    def add(self, path: str, uj: int) -> None:
        self.set(path, (self.uj[path] + uj) % RANGE_UJ)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
