"""The table in the docs is the record, and the record is what the tests expect: all of them, each in its state."""

import json

import pytest

from tests.docs.test_reference import tool
from tests.zoo import test_convert, test_layer_major, test_packing, test_plan, test_run
from tests.zoo.cases import Case
from tests.zoo.expected import DEFECTS, REFUSALS, defect, refusal
from tests.zoo.families import FAMILIES

MODULES = (test_convert, test_layer_major, test_packing, test_plan, test_run)
writer = tool("write_support")


def all_cases():
    """The parameters of every test of the zoo."""
    for module in MODULES:
        for test in vars(module).values():
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == "parametrize" and mark.args[0] == "case":
                    yield from (parameter.values[0] for parameter in mark.args[1])


def expected(case: Case) -> tuple[str, str | None]:
    """State and reason; of what works there may be any remark."""
    known, refused = defect(case.check, case.family.name), refusal(case.check, case.family.name)
    if known is not None:
        return "defect", known.why
    return ("works", None) if refused is None else ("refused", refused.why)


CASES = list(all_cases())
RECORD = json.loads(writer.RECORD.read_text())


def test_the_page_is_the_record():
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(RECORD), "run tools/write_support.py"


def test_the_record_has_every_case_in_its_state():
    found = {
        (name, check): (outcome["state"], outcome.get("why") if outcome["state"] != "works" else None)
        for name, family in RECORD["families"].items()
        for check, outcome in family["checks"].items()
    }
    assert found == {(case.family.name, case.check): expected(case) for case in CASES}, "run `make support`"


@pytest.mark.parametrize("row", [*DEFECTS, *REFUSALS], ids=lambda row: row.why[:40])
def test_every_expectation_is_about_a_case(row):
    known = {case.family.name for case in CASES if row.meets(case.check, case.family.name)}
    assert known == set(row.families)


def test_the_zoo_is_large():
    assert len(FAMILIES) >= 60
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_check_has_a_column():
    assert {case.check.partition("/")[0] for case in CASES} == set(writer.CHECKS)
