"""The share of its matmuls' rate that a step reached on this machine, kept from `bench step` for `doctor`.

    keep(ceilings.key, "default in bf16_mixed", share)
    known(ceilings.key)

One file per key of `Ceilings`: another processor, version, kernel or number of threads starts without any.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from tilewright.core.log import get_logger
from tilewright.core.units import format_count

_log = get_logger(__name__)


@dataclass(frozen=True)
class StepShare:
    """A measurement of `bench step`.

    Args:
        reached: FLOP/s of the matmuls in the step.
        alone: FLOP/s of the same by themselves.
        others: share of the processors' time that other programs took meanwhile.
        date: of the measurement, as YYYY-MM-DD.
    """

    reached: float
    alone: float
    others: float
    date: str

    def __str__(self) -> str:
        """The share of its matmuls' rate that a step reached, in words.

        Example:
            >>> str(StepShare(175e9, 389e9, 0.02, "2026-11-27"))
            "0.45 of its matmuls' rate (175G of 389GFLOP/s, 2026-11-27)"
        """
        rates = f"{format_count(self.reached)} of {format_count(self.alone)}FLOP/s, {self.date}"
        busy = f"; others took {100 * self.others:.0f} % of the processors' time" if self.others > BUSY else ""
        return f"{self.reached / self.alone:.2f} of its matmuls' rate ({rates}{busy})"


BUSY = 0.1
"""Share of the processors' time that others take, from which on it is said."""


def known(key: str, cache_dir: str | Path | None = None) -> dict[str, StepShare]:
    """Shares that steps reached of the matmuls' rate by recipe and precision; none where none can be read, which is
    reported.

    Args:
        key: of the machine's `Ceilings`.
        cache_dir: folder of the cache; the user's cache folder by default.
    """
    path = _path(key, cache_dir)
    try:
        return {name: StepShare(**one) for name, one in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("shares of steps: %s cannot be used (%s); tilewright bench step writes it again", path, error)
        return {}


def keep(key: str, name: str, share: StepShare, cache_dir: str | Path | None = None) -> None:
    """Keep the share of the matmuls' rate that a step reached, in the place of an earlier one of this name.

    Args:
        key: of the machine's `Ceilings`.
        name: recipe and precision.
        share: of its last step.
        cache_dir: see `known`.
    """
    path = _path(key, cache_dir)
    shares = {**known(key, cache_dir), name: share}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".partial")
        part.write_text(json.dumps({one: asdict(found) for one, found in shares.items()}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        _log.warning("shares of steps: not kept, %s cannot be written (%s)", path, error.strerror)


def _path(key: str, cache_dir: str | Path | None) -> Path:
    return Path(cache_dir or platformdirs.user_cache_dir("tilewright")) / "steps" / f"{key}.json"
