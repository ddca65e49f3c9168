"""energy.json of a run folder: what was counted, what was estimated, and why something is not known. Without torch.

A figure is `measured` (by counters, of the parts that are named), `estimated` (watts that the recipe gives, times
seconds) or `unavailable`, with the reasons.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from tilewright.core.units import format_joules

FILE = "energy.json"
MEASURED, ESTIMATED, UNAVAILABLE = "measured", "estimated", "unavailable"
J_PER_KWH = 3.6e6
OWN_SHARE = 0.9
"""Share of the machine's busy processor time that is the run's, below which its energy is said to be shared."""
_OPEN = ConfigDict(extra="allow")
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@with_config(_OPEN)
class RecordedPart(TypedDict):
    """A part of a machine with a counter."""

    name: str
    covers: str
    how: str
    joules: _Amount
    trouble: str


@with_config(_OPEN)
class RecordedEstimate(TypedDict):
    """Energy estimated from watts that the recipe gives."""

    watts: _Amount
    joules: _Amount


@with_config(_OPEN)
class RecordedIntensity(TypedDict):
    """Emissions of a kWh, and where the number is from."""

    g_per_kwh: _Amount
    source: str


@with_config(_OPEN)
class EnergyRecord(TypedDict):
    """The file."""

    state: Literal["measured", "estimated", "unavailable"]
    reasons: list[str]
    joules: dict[str, _Amount]
    seconds: dict[str, _Amount]
    parts: list[RecordedPart]
    total_j: _Amount | None
    machine_s: _Amount
    estimate: RecordedEstimate | None
    idle_watts: _Amount | None
    own_share: _Amount | None
    intensity: RecordedIntensity | None
    tokens: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=0)]


ENERGY = TypeAdapter(EnergyRecord)


def joules_of(record: EnergyRecord | dict[str, Any]) -> float | None:
    """Joules of a run: counted, else estimated, else None.

    Example:
        >>> joules_of({"state": "estimated", "total_j": 0.0, "estimate": {"watts": 65.0, "joules": 650.0}})
        650.0
    """
    if record["state"] == MEASURED:
        return record["total_j"]
    return record["estimate"]["joules"] if record["estimate"] else None


def grams_of(record: EnergyRecord | dict[str, Any]) -> float | None:
    """Grams of CO2 equivalent at the intensity that the recipe gives; None without one.

    Example:
        >>> record = {"state": "measured", "total_j": 3.6e6, "estimate": None}
        >>> grams_of(record | {"intensity": {"g_per_kwh": 380.0, "source": ""}})
        380.0
    """
    joules = joules_of(record)
    if joules is None or not record["intensity"]:
        return None
    return joules / J_PER_KWH * record["intensity"]["g_per_kwh"]


def in_words(record: EnergyRecord | dict[str, Any]) -> str:
    """The whole of a run in a sentence: joules and of a token, with what they are of."""
    joules = joules_of(record)
    if joules is None:
        return f"energy unavailable: {'; '.join(record['reasons'])}"
    text = f"{format_joules(joules)} {record['state']}"
    if record["tokens"]:
        text += f", {format_joules(joules / record['tokens'])} per token"
    if (grams := grams_of(record)) is not None and record["intensity"]:
        text += f", {grams:,.3g} g CO2e at {record['intensity']['g_per_kwh']:g} g/kWh ({record['intensity']['source']})"
    if record["own_share"] is not None and record["own_share"] < OWN_SHARE and record["state"] == MEASURED:
        text += f"; shared: {record['own_share']:.0%} of the machine's busy processor time was the run's"
    return text
