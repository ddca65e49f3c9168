"""Measured speeds of exchanges between ranks, as a file that plans read. No torch.

    found = MeasuredLinks.read("links.json")  # of `tilewright bench comm --out links.json`
    found.fit("all_gather").bytes_per_s, found.fit("all_reduce", "fp8").latency_s

The file has the points that were measured: an operation, a wire format, bytes of the whole tensor, bytes that one rank
sends to others, and seconds. A rate is of bytes that one rank sends, so exchanges of several operations compare. What a
rate and a latency are is worked out from the points, whoever reads them: nothing else in the file is believed.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from tilewright.core.errors import ConfigError

LinkOperation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"]
_STRICT = ConfigDict(extra="ignore", strict=True)
_Bytes = Annotated[int, Field(gt=0)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=_STRICT)
class LinkPoint:
    """One measured exchange between ranks.

    `tensor_bytes`: of the whole tensor, as its values are in memory. `sent_bytes`: that one rank sends to others, in
    the format of the wire. `seconds`: until the last rank has its result; the median of several.
    """

    operation: LinkOperation
    format: Literal["fp32", "bf16", "fp8"]
    tensor_bytes: _Bytes
    sent_bytes: _Bytes
    seconds: _Positive


@dataclass(frozen=True, config=_STRICT)
class LinkFit:
    """Seconds of an exchange are `latency_s` plus the bytes that one rank sends over `bytes_per_s`."""

    bytes_per_s: _Positive
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def seconds(self, sent_bytes: float) -> float:
        """Seconds of one exchange between ranks by the measured fit.

        Example:
            >>> LinkFit(1e9, 1e-3).seconds(10**9)
            1.001
        """
        return self.latency_s + sent_bytes / self.bytes_per_s


@dataclass(frozen=True, config=_STRICT)
class MeasuredLinks:
    """Measured exchanges between so many ranks on so many machines."""

    ranks: Annotated[int, Field(ge=2)]
    nodes: Annotated[int, Field(ge=1)]
    backend: str
    """Of torch's: `gloo` or `nccl`."""
    device: str
    points: Annotated[tuple[LinkPoint, ...], Field(min_length=1)]

    def fit(self, operation: LinkOperation, wire: str = "fp32") -> LinkFit | None:
        """Measured rate and latency of an exchange in a wire format; None where it was not measured."""
        found = [one for one in self.points if (one.operation, one.format) == (operation, wire)]
        return fitted([(one.sent_bytes, one.seconds) for one in found]) if found else None

    def fits(self) -> dict[tuple[LinkOperation, str], LinkFit]:
        """All fitted exchanges between ranks, by operation and format, from measurements."""
        found: dict[tuple[LinkOperation, str], LinkFit] = {}
        for one in self.points:
            fit = self.fit(one.operation, one.format)
            assert fit is not None, "this point is one of it"
            found[one.operation, one.format] = fit
        return found

    def to_json(self) -> dict[str, object]:
        """The content of a file of measured links. `links` is for readers; it is worked out again from `points`."""
        links = {f"{operation}.{wire}": asdict(fit) for (operation, wire), fit in self.fits().items()}
        return {"tilewright_links": 1, **asdict(self), "links": links}

    @staticmethod
    def read(path: str | Path) -> "MeasuredLinks":
        """Read a file of measured links that `tilewright bench comm --out` has written.

        Raises:
            ConfigError: there is none, or it is something else.
        """
        try:
            text = Path(path).read_bytes()
            told = json.loads(text)
            if not isinstance(told, dict) or told.get("tilewright_links") != 1:
                raise ValueError("no file of links in this format")
            return TypeAdapter(MeasuredLinks).validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise _unreadable(path, f"{place}: {first['msg']}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None


def fitted(points: Sequence[tuple[float, float]]) -> LinkFit:
    """Fit rate and latency of a link to measured exchanges, by the square of relative errors.

    Args:
        points: bytes that a rank sends, and seconds; one at least.

    Example:
        >>> fit = fitted([(1e6, 2e-3), (1e7, 1.1e-2)])
        >>> round(fit.bytes_per_s / 1e9, 6), round(fit.latency_s, 9)
        (1.0, 0.001)
    """
    # seconds = latency + slope * bytes, each row divided by its seconds
    sums = [0.0] * 5
    for size, seconds in points:
        one, rate = 1 / seconds, size / seconds
        for place, more in enumerate((one * one, one * rate, rate * rate, one, rate)):
            sums[place] += more
    ones, mixed, rates, of_one, of_rate = sums
    determinant = ones * rates - mixed * mixed
    latency = slope = 0.0
    if determinant > 1e-12 * ones * rates:  # sizes differ
        latency = (of_one * rates - of_rate * mixed) / determinant
        slope = (of_rate * ones - of_one * mixed) / determinant
    if latency < 0 or slope <= 0:  # all of it is the rate
        latency, slope = 0.0, of_rate / rates
    return LinkFit(1 / slope, latency)


def _unreadable(path: str | Path, got: str) -> ConfigError:
    return ConfigError(
        f"{path} has no measured links",
        got=got,
        need="what `tilewright bench comm --out` writes",
        try_=f"tilewright bench comm --out {path}",
    )
