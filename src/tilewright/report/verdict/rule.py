"""Rules, and their statements on a run: a number beside two thresholds, and one of four states."""

from dataclasses import dataclass
from enum import Enum

from tilewright.report.svg.axes import format_number, format_percent

MIN_RECORDS = 20
"""Recorded steps below which nothing is called good: a quarter of them, which most rules compare, is then 5 steps, the
fewest whose median stands against two outliers."""
NOTHING = "Nothing is recorded."


class VerdictState(Enum):
    """States of a rule. There is no state that a run has by default: without a measurement it is `NOT_MEASURED`."""

    GOOD = "good"
    LOOK = "look at it"
    BAD = "bad"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class VerdictRule:
    """One number that is measured on every run, and from where on it is worth a look, or bad.

    Args:
        name: what is judged, a noun.
        chart: the figure of the report that shows it.
        measures: what the number is, in words.
        unit: "nats" (a difference of losses per token), "share" or "times".
        look: least number that is worth a look.
        bad: least number that is bad.
        why: where the thresholds come from.
        too: what is bad whatever the number; empty where nothing is.
    """

    name: str
    chart: str
    measures: str
    unit: str
    look: float
    bad: float
    why: str
    besides: str = ""

    def state(self, value: float) -> VerdictState:
        """The state of a rule's verdict on a run with this number."""
        return VerdictState.BAD if value >= self.bad else VerdictState.LOOK if value >= self.look else VerdictState.GOOD

    def is_good(self, value: float) -> bool:
        """True where by the rule the number is good: below both thresholds."""
        return self.state(value) is VerdictState.GOOD

    def judge(self, value: float, text: str, *, harmless: bool = False) -> "Verdict":
        """The rule's verdict on a number.

        Args:
            value: the number.
            text: a sentence that holds it.
            harmless: whether the number is on the side on which nothing is lost, as a run that is faster than its plan:
                it is worth a look at most.
        """
        state = self.state(value)
        return Verdict(self, VerdictState.LOOK if harmless and state is VerdictState.BAD else state, text, value)

    def certain(self, text: str) -> "Verdict":
        """Make a verdict that is bad whatever the number, for a fact that `besides` names."""
        return Verdict(self, VerdictState.BAD, text, None)

    def not_measured(self, why: str) -> "Verdict":
        """The verdict of a rule without a measurement, with the reason."""
        return Verdict(self, VerdictState.NOT_MEASURED, why, None)

    def too_short(self, count: int, least: int = MIN_RECORDS) -> "Verdict":
        """No verdict of a rule, too short: `count` values are recorded where `least` are needed."""
        if not count:
            return self.not_measured(NOTHING)
        recorded = "1 value is recorded" if count == 1 else f"{count} values are recorded"
        return self.not_measured(f"Too few to judge: {recorded}, {least} are needed.")

    def amount(self, value: float) -> str:
        """A number of this rule in its unit, as text.

        Example:
            >>> [VerdictRule("r", "", "", unit, 0.1, 0.5, "").amount(0.25) for unit in ("nats", "share", "times")]
            ['0.25 nats', '25 %', '0.25 times']
        """
        return format_percent(value) if self.unit == "share" else f"{format_number(value)} {self.unit}"


@dataclass(frozen=True)
class Verdict:
    """The verdict of a rule on a run: a state, a sentence with the number, and the number (None where there is
    none)."""

    rule: VerdictRule
    state: VerdictState
    text: str
    value: float | None

    @property
    def limit(self) -> str:
        """The threshold that a verdict's number has reached, in words; empty if it has reached none."""
        if self.value is None or self.state is VerdictState.GOOD:
            return ""
        if self.state is VerdictState.BAD:
            return f"bad from {self.rule.amount(self.rule.bad)}"
        return f"worth a look from {self.rule.amount(self.rule.look)}"

    @property
    def number(self) -> str:
        """The number of a rule's verdict as text; empty where there is none."""
        return "" if self.value is None else self.rule.amount(self.value)

    @property
    def sentence(self) -> str:
        """A verdict's sentence with the threshold that was reached."""
        return f"{self.text.rstrip('.')} ({self.limit})." if self.limit else self.text
