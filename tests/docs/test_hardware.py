"""docs/reference/hardware.md says what the result files say: every machine that numbers come from, and no other."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "hardware.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


def row(text: str, begin: str) -> str:
    """The row of the table that begins so."""
    return next(line for line in text.splitlines() if line.startswith(f"| {begin}"))


def row_of(machine: dict) -> str:
    """The beginning of the row of a result's machine."""
    if machine.get("gpu"):
        return "NVIDIA GPU"
    features = machine["cpu_features"]
    units = "CPU with AMX" if "amx_bf16" in features else "CPU with AVX-512 and BF16" if features else "CPU without"
    return f"{units}"


def machines() -> list[dict]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.rglob("*.json"))]
    return [one["machine"] for one in found if isinstance(one, dict) and isinstance(one.get("machine"), dict)]


def problem(page: str, machine: dict) -> str | None:
    """What the page says wrong of a machine that a result comes from."""
    line = row(page, row_of(machine))
    if "numbers" not in line:
        return f"a result of {machine.get('gpu') or machine['device']}, and the page says: {line}"
    maker = machine["device"].replace("(R)", "").split(" Processor")[0]
    return None if maker in line else f"{maker} is not in: {line}"


def test_every_machine_of_a_number_is_there():
    assert machines()
    wrong = {problem(PAGE, machine) for machine in machines() if machine["device"] != "cpu"} - {None}
    assert not wrong


@pytest.mark.parametrize(
    "machine",
    [
        {"device": "AMD EPYC", "cpu_features": ["avx512_bf16"], "gpu": "NVIDIA H200"},
        {"device": "Some Other CPU", "cpu_features": []},
    ],
)
def test_a_number_from_another_machine_changes_the_page(machine):
    """The first result of a card makes "nothing" a lie."""
    assert problem(PAGE, machine) is not None


def test_readme_says_the_same_of_gpus():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    nothing = "nothing" in row(PAGE, "NVIDIA GPU")
    assert nothing == ("It has not been run on a GPU yet" in readme)
    assert nothing == bool(re.search(r"\| not run \|", PAGE))


def test_its_tests_are_there():
    paths = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert len(paths) >= 5
    assert not [path for path in paths if not (ROOT / path).exists()]
