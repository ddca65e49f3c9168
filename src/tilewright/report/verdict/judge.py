"""All rules, what they say about a run, and the one sentence that comes of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tilewright.report.run_data.collect_run import RunData
from tilewright.report.verdict import divergence, gradients, loss_rules, resources
from tilewright.report.verdict.rule import NOTHING, Verdict, VerdictRule, VerdictState

RULES: Mapping[VerdictRule, Callable[[RunData], Verdict]] = {
    divergence.DIVERGENCE: divergence.divergence,
    loss_rules.PLATEAU: loss_rules.plateau,
    gradients.SKIPS: gradients.skips,
    loss_rules.MEMORISING: loss_rules.memorising,
    loss_rules.FORGETTING: loss_rules.forgetting,
    loss_rules.SPIKES: loss_rules.spikes,
    gradients.GROWTH: gradients.growth,
    gradients.TAIL: gradients.tail,
    gradients.CLIPPING: gradients.clipping,
    resources.OFF_PLAN: resources.off_plan,
    resources.OFF_PACE: resources.off_pace,
    resources.LEAK: resources.leak,
    resources.SLOWDOWN: resources.slowdown,
    resources.WAIT: resources.wait,
}
"""Rules and how each judges a run, the gravest first: of two in the same state, the one further up is the headline."""

MOOT = (loss_rules.PLATEAU, loss_rules.MEMORISING, loss_rules.FORGETTING)
"""Rules that say something only of a run that did not diverge: they compare losses with one another."""
_WORDS = {
    VerdictState.BAD: "bad",
    VerdictState.LOOK: "worth a look",
    VerdictState.GOOD: "good",
    VerdictState.NOT_MEASURED: "not measured",
}


@dataclass(frozen=True)
class Judgement:
    """The judgement of a run: verdicts of all rules, in the order of `RULES`."""

    verdicts: Sequence[Verdict]

    def of_chart(self, chart: str) -> "Judgement":
        """The judge's verdicts that belong to a chart."""
        return Judgement([one for one in self.verdicts if one.rule.chart == chart])

    def in_state(self, state: VerdictState) -> list[Verdict]:
        """The judge's verdicts in one state."""
        return [one for one in self.verdicts if one.state is state]

    @property
    def worst(self) -> Verdict | None:
        """The judge's gravest verdict that is bad or worth a look; None where there is none."""
        return next(iter(self.in_state(VerdictState.BAD) or self.in_state(VerdictState.LOOK)), None)

    @property
    def state(self) -> VerdictState:
        """The state of a judgement: that of the gravest verdict. It is good only if the first rule was measured, and no
        other is worse."""
        if self.worst is not None:
            return self.worst.state
        return self.verdicts[0].state if self.verdicts else VerdictState.NOT_MEASURED

    def headline(self, learned: str) -> str:
        """The judge's sentence at the head of the report.

        Args:
            learned: what the run learned, as sentences with numbers.
        """
        if self.worst is not None:
            return self.worst.sentence
        why = "" if self.state is VerdictState.GOOD else self.verdicts[0].text
        return f"{learned} {why}" if why and why != NOTHING else learned

    def tally(self) -> str:
        """Count the judgement's verdicts by state, in words."""
        counts = [(len(self.in_state(state)), words) for state, words in _WORDS.items()]
        return ", ".join(f"{count} {words}" for count, words in counts if count)

    def line(self, learned: str) -> str:
        """The judge's verdict in one line of plain text, for a terminal."""
        also = f" {text}" if (text := self.also()) else ""
        return f"verdict: {self.state.value}: {self.headline(learned)}{also} ({self.tally()})"

    def also(self) -> str:
        """The judge's further statements, bad or noteworthy, besides the headline, a run slower than planned first;
        empty: nothing is."""
        graver = (*self.in_state(VerdictState.BAD), *self.in_state(VerdictState.LOOK))
        others = [one for one in graver if one != self.worst]
        slow = [one.sentence for one in others if one.rule is resources.OFF_PACE]
        names = ", ".join(one.rule.name for one in others if one.rule is not resources.OFF_PACE)
        return " ".join([*slow, *([f"Also: {names}."] if names else [])])


def judge(run: RunData) -> Judgement:
    """Judge a run by all rules. Of a run that diverged nothing more is said about what it learned."""
    verdicts = [measure(run) for measure in RULES.values()]
    if verdicts[0].state is VerdictState.BAD:
        verdicts = [_moot(one) if one.rule in MOOT else one for one in verdicts]
    return Judgement(verdicts)


def _moot(verdict: Verdict) -> Verdict:
    return verdict.rule.not_measured("Not judged, as the run diverged.")
