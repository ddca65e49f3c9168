"""What of the zoo does not work, and why: refusals in words, and known defects, which are strict expected failures.

A defect that is mended makes its test fail until its line here is removed. `check` is a glob on names of checks.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Expected:
    """`match`: words that the error of a refusal must have."""

    check: str
    families: tuple[str, ...]
    why: str
    match: str = ""

    def meets(self, check: str, family: str) -> bool:
        """Whether it is about this check of this family."""
        return family in self.families and fnmatchcase(check, self.check)


REFUSALS: tuple[Expected, ...] = ()
DEFECTS: tuple[Expected, ...] = ()


def refusal(check: str, family: str) -> Expected | None:
    """The refusal that is right."""
    return next((row for row in REFUSALS if row.meets(check, family)), None)


def defect(check: str, family: str) -> Expected | None:
    """The defect that is known."""
    return next((row for row in DEFECTS if row.meets(check, family)), None)
