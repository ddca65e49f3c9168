"""The report's section on energy: joules by what the run did, by part of the machine, and where each figure is from."""

from dataclasses import dataclass

from tilewright.core.units import format_joules, format_seconds, format_share
from tilewright.energy.energy_record import ESTIMATED, MEASURED, EnergyRecord, in_words, joules_of, planned_in_words
from tilewright.report.run_data.collect_run import RunData

PHASES = {
    "start": "Start: data, plan, model",
    "steps": "Training steps",
    "waiting": "Waiting for data",
    "evaluation": "Evaluation and samples",
    "checkpoints": "Checkpoints",
    "export": "Export",
}


@dataclass(frozen=True)
class EnergyView:
    """`words`: the whole run in a sentence. `phases`: cells of name, energy, share, time, mean power. `parts`: what is
    covered, how it is counted, energy, trouble. `notes`: what is not covered, and how sure it is."""

    words: str
    phases: list[tuple[str, ...]]
    parts: list[tuple[str, ...]]
    notes: list[str]


def energy_view(run: RunData) -> EnergyView | None:
    """The table of energy; None of a run that did not measure."""
    record = run.energy
    return None if record is None else EnergyView(in_words(record), _phases(record), _parts(record), _notes(record))


def energy_card(run: RunData) -> tuple[str, str]:
    """Make the card with a run's energy for the head of the page: value and detail."""
    record = run.energy
    if record is None:
        return "not recorded", ""
    joules = joules_of(record)
    if joules is None:
        return "unavailable", "no counter on this machine"
    per_token = f", {format_joules(joules / record['tokens'])} per token" if record["tokens"] else ""
    return format_joules(joules), f"{record['state']}{per_token}"


def _phases(record: EnergyRecord) -> list[tuple[str, ...]]:
    whole = sum(record["joules"].values())
    found = []
    for phase, joules in record["joules"].items():
        seconds = record["seconds"].get(phase, 0.0)
        power = f"{joules / seconds:,.0f} W" if seconds else ""
        share = format_share(joules / whole) if whole else ""
        found.append((PHASES.get(phase, phase), format_joules(joules), share, format_seconds(seconds), power))
    return found


def _parts(record: EnergyRecord) -> list[tuple[str, ...]]:
    return [(part["covers"], part["how"], format_joules(part["joules"]), part["trouble"]) for part in record["parts"]]


def _notes(record: EnergyRecord) -> list[str]:
    said = joules_of(record) is None  # the sentence above holds the reasons then
    notes = [] if said else [f"Not counted: {reason}." for reason in record["reasons"]]
    if record["state"] == MEASURED:
        notes.append(
            "Counted for these parts of the machine, whatever program used them. Seconds are those of each rank."
        )
        if record["own_share"] is not None:
            notes.append(f"{record['own_share']:.0%} of the machine's busy processor time was the run's.")
    if record["estimate"]:
        estimate = record["estimate"]
        beside = "" if record["state"] == ESTIMATED else ", beside what was counted"
        notes.append(
            f"Estimated{beside}: {format_joules(estimate['joules'])}, {estimate['watts']:g} W per machine "
            "(energy.assume_watts) times seconds."
        )
    if planned := planned_in_words(record):
        notes.append(f"{planned}.")
    if record["idle_watts"] is not None:
        notes.append(f"The idle machine took {record['idle_watts']:,.1f} W before the run.")
    return notes
