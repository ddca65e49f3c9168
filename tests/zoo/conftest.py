"""The fixture `case`, refusals, and the record of what came out.

With ZOO_RECORD=FILE the outcomes of the tests that ran are put into FILE; those of other tests stay. `make support`.
"""

import json
import os
from pathlib import Path

import pytest

from tests.zoo.cases import Case, assert_in_words
from tests.zoo.expected import refusal
from tests.zoo.families import FAMILIES
from tilewright.core.errors import TilewrightError

_STATES = {"passed": "works", "skipped": "defect", "failed": "failed"}


@pytest.fixture
def case(request, record_property) -> Case:
    """The check and the family of this test, kept for the record."""
    record_property("zoo", request.param)
    return request.param


@pytest.fixture
def remark(record_property):
    """Adds a remark on a check that works."""
    return lambda text: record_property("zoo_remark", text)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A check that is to be refused ends in an error in words, and in no other way."""
    case = pyfuncitem.funcargs.get("case")
    expected = refusal(case.check, case.family.name) if isinstance(case, Case) else None
    if expected is None:
        return (yield)
    with pytest.raises(TilewrightError) as error:
        yield
    assert_in_words(error.value, expected)
    return True


def pytest_configure(config):
    config.zoo = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    properties = dict(report.user_properties)
    case = properties.get("zoo")
    if isinstance(case, Case):
        report.user_properties = [(name, value) for name, value in report.user_properties if name != "zoo"]
    if isinstance(case, Case) and report.when == "call":
        item.config.zoo.setdefault(case.family.name, {})[case.check] = _outcome(case, report, properties)
    return report


def _outcome(case, report, properties):
    refused = refusal(case.check, case.family.name)
    if report.passed and refused is not None:
        return {"state": "refused", "why": refused.why}
    if report.skipped:
        return {"state": "defect", "why": report.wasxfail}
    remark = properties.get("zoo_remark")
    return {"state": _STATES[report.outcome]} | ({"why": remark} if remark and report.passed else {})


def pytest_sessionfinish(session):
    target = os.environ.get("ZOO_RECORD")
    if not target or not session.config.zoo:
        return
    import transformers

    path = Path(target)
    known = json.loads(path.read_text())["families"] if path.exists() else {}
    families = {}
    for family in FAMILIES:
        checks = known.get(family.name, {}).get("checks", {}) | session.config.zoo.get(family.name, {})
        families[family.name] = {"kind": family.kind, "checks": checks}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(family)}" for name, family in families.items())
    path.write_text(f'{{"transformers": "{transformers.__version__}", "families": {{\n{lines}\n}}}}\n')
