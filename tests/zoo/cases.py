"""One check of one family as a parameter of a test, with its marks; what must be true of a refusal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from tests.zoo.expected import Expected, defect
from tests.zoo.families import FAMILIES, Family
from tilewright.core.errors import TilewrightError


@dataclass(frozen=True)
class Case:
    """`check` is what is tested, with its variant behind a slash where it has several: numbers/fp8_tile."""

    check: str
    family: Family

    @property
    def variant(self) -> str:
        """The part behind the slash: a precision mode."""
        return self.check.partition("/")[2]


def cases(
    check: str, variants: Sequence[str] = (), families: Iterable[Family] = FAMILIES, sample: Sequence[str] = ()
) -> list:
    """Parameters for a check: all but the families of `sample` are slow, known defects are strict expected failures.
    Of several variants each of these families has two in turn, so that each variant has families of several kinds."""
    names = [f"{check}/{variant}" for variant in variants] or [check]
    quick = {(family, names[(turn + more) % len(names)]) for turn, family in enumerate(sample) for more in (0, 1)}
    return [_parameter(Case(name, family), (family.name, name) in quick) for family in families for name in names]


def _parameter(case: Case, quick: bool) -> object:
    marks = [] if quick else [pytest.mark.slow]
    known = defect(case.check, case.family.name)
    if known is not None:
        marks.append(pytest.mark.xfail(reason=known.why, strict=True))
    return pytest.param(case, marks=marks, id=f"{case.family.name}-{case.check}")


def assert_in_words(error: TilewrightError, expected: Expected) -> None:
    """A refusal has four parts, and is about what it should be about."""
    for problem in error.problems:
        parts = {"what": problem.what, "got": problem.got, "need": problem.need, "try": problem.try_}
        assert all(parts.values()), f"a part is missing: {parts}"
    assert expected.match in str(error)
