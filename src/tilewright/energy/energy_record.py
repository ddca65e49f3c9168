"""energy.json of a run folder: what was counted, what was estimated, and why something is not known. Without torch.

A figure is `measured` (by counters, of the parts that are named), `estimated` (watts that the recipe gives, times
seconds) or `unavailable`, with the reasons.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from tilewright.core.units import J_PER_KWH, format_joules

FILE = "energy.json"
MEASURED, ESTIMATED, UNAVAILABLE = "measured", "estimated", "unavailable"
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
    board: NotRequired[bool]


@with_config(_OPEN)
class RecordedEstimate(TypedDict):
    """Energy estimated from watts that the recipe gives."""

    watts: _Amount
    joules: _Amount


@with_config(_OPEN)
class RecordedPlanned(TypedDict):
    """Energy as planned before the run, of all its steps: watts of each GPU's board, or of each machine."""

    joules: _Amount
    boards: bool
    assumed: str


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
    flops: NotRequired[_Amount | None]
    planned: NotRequired[RecordedPlanned | None]


ENERGY = TypeAdapter(EnergyRecord)


def joules_of(record: EnergyRecord | dict[str, Any]) -> float | None:
    """The joules of a run by its energy record: counted, else estimated, else None.

    Example:
        >>> joules_of({"state": "estimated", "total_j": 0.0, "estimate": {"watts": 65.0, "joules": 650.0}})
        650.0
    """
    if record["state"] == MEASURED:
        return record["total_j"]
    return record["estimate"]["joules"] if record["estimate"] else None


def grams_of(record: EnergyRecord | dict[str, Any]) -> float | None:
    """Grams of CO2 equivalent in the energy record, at the intensity that the recipe gives; None without one.

    Example:
        >>> record = {"state": "measured", "total_j": 3.6e6, "estimate": None}
        >>> grams_of(record | {"intensity": {"g_per_kwh": 380.0, "source": ""}})
        380.0
    """
    joules = joules_of(record)
    if joules is None or not record["intensity"]:
        return None
    return joules / J_PER_KWH * record["intensity"]["g_per_kwh"]


def planned_in_words(record: EnergyRecord | dict[str, Any]) -> str:
    """The planned energy beside the recorded energy that the run took; empty where none was planned.

    Example:
        >>> planned = {"joules": 5000.0, "boards": False, "assumed": "1 x 65 W per machine, for all of 1m17s"}
        >>> record = {"state": "measured", "total_j": 4000.0, "estimate": None, "parts": [], "planned": planned}
        >>> planned_in_words(record)
        'Planned for its steps: 5 kJ (1 x 65 W per machine, for all of 1m17s). All of the run took 4 kJ, 0.80 of that'
    """
    planned = record.get("planned")
    if not planned:
        return ""
    boards, most = planned["boards"], "at most " if planned["boards"] else ""
    text = f"Planned for its steps: {most}{format_joules(planned['joules'])} ({planned['assumed']})"
    parts = [part["joules"] for part in record["parts"] if part.get("board")]
    took = (sum(parts) if parts else None) if boards else joules_of(record)
    if took is None:
        return f"{text}. Not measured: {'; '.join(record['reasons']) or 'no counter of a GPU'}"
    whose = "In all of the run the boards took" if boards else "All of the run took"
    share = f", {took / planned['joules']:.2f} of that" if planned["joules"] else ""
    return f"{text}. {whose} {format_joules(took)}{share}"


def in_words(record: EnergyRecord | dict[str, Any]) -> str:
    """Describe a run's energy record in a sentence: joules in total, per token and per FLOP, and the devices that they
    are of."""
    joules = joules_of(record)
    if joules is None:
        return f"energy unavailable: {'; '.join(record['reasons'])}"
    text = f"{format_joules(joules)} {record['state']}"
    if record["tokens"]:
        text += f", {format_joules(joules / record['tokens'])} per token"
    if flops := record.get("flops"):
        text += f", {format_joules(joules / flops)} per FLOP of its matmuls"
    if (grams := grams_of(record)) is not None and record["intensity"]:
        text += f", {grams:,.3g} g CO2e at {record['intensity']['g_per_kwh']:g} g/kWh ({record['intensity']['source']})"
    if record["own_share"] is not None and record["own_share"] < OWN_SHARE and record["state"] == MEASURED:
        text += f"; shared: {record['own_share']:.0%} of the machine's busy processor time was the run's"
    return text
