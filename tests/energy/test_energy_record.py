"""What energy.json says of a plan: like beside like, and the reason where nothing was measured."""

import pytest

from tilewright.energy.energy_record import ENERGY, planned_in_words
from tilewright.energy.meter import EnergyUse

PLANNED = {"joules": 10_000.0, "boards": True, "assumed": "1 x 700 W"}
PARTS = (
    {"name": "package-0", "covers": "a processor", "how": "RAPL", "joules": 900.0, "trouble": "", "board": False},
    {"name": "H200", "covers": "a board", "how": "NVML", "joules": 4_000.0, "trouble": "", "board": True},
)


def record(parts, **more):
    use = {"joules": {}, "seconds": {}, "parts": list(parts), "total_j": sum(part["joules"] for part in parts)}
    rest = {"machine_s": 1.0, "estimate": None, "idle_watts": None, "own_share": None, "intensity": None}
    return {"state": "measured", "reasons": ["no zone of RAPL"], "tokens": 1, "steps": 1} | use | rest | more


def test_boards_are_compared_with_boards():
    words = planned_in_words(record(PARTS, planned=PLANNED))
    assert words.startswith("Planned for its steps: at most 10 kJ (1 x 700 W)")
    assert "the boards took 4 kJ, 0.40 of that" in words


@pytest.mark.parametrize("parts", [PARTS[:1], ()])
def test_without_a_counter_of_a_board_there_is_no_number(parts):
    words = planned_in_words(record(parts, planned=PLANNED))
    assert words.endswith("Not measured: no zone of RAPL")
    assert "0.9 kJ" not in words


def test_records_of_before_are_read():
    old = [{key: part[key] for key in part if key != "board"} for part in PARTS]
    found = ENERGY.validate_python(record(old))
    assert planned_in_words(found) == ""
    assert EnergyUse.from_json(found).plus(EnergyUse.from_json(record(PARTS))).parts["H200"]["joules"] == 8_000.0
