"""A fine-tune beside the model it began with: held-out loss by domain, of text that is not trained on too (what it
forgets), tasks, and the same prompts answered by both.

A run that starts from loaded weights evaluates them, and lets them write, before its first step: step 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.core.units import format_perplexity
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.run_data.run_numbers import domain_losses
from tilewright.training.runlog.task_scores import BASE, RUN, TaskScore


@dataclass(frozen=True)
class DomainChange:
    """Held-out loss of one domain, before the first step and at the last evaluation, in nats per token."""

    domain: str
    before: float
    after: float
    trained: bool = True
    """False: of text that is not trained on (`data.eval_source`)."""

    @property
    def perplexities(self) -> tuple[str, str]:
        return format_perplexity(self.before), format_perplexity(self.after)

    @property
    def share(self) -> float:
        """Change of a domain's loss before and after, over that before; below 0 where it fell."""
        return self.after / self.before - 1 if self.before else 0.0


@dataclass(frozen=True)
class TaskChange:
    """The change of one metric of a task of lm-evaluation-harness between base model and run; None: not evaluated."""

    before: TaskScore | None
    after: TaskScore | None

    @property
    def either(self) -> TaskScore:
        found = self.after or self.before
        if found is None:
            raise AssertionError("neither model was evaluated")
        return found

    @property
    def metric(self) -> str:
        """Metric and filter of a task before and after, with an arrow to the better side."""
        row = self.either
        name = row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"
        return name + {True: " \u2191", False: " \u2193", None: ""}[row.higher_is_better]

    @staticmethod
    def shown(score: TaskScore | None) -> str:
        """Value and standard error of a task before or after."""
        if score is None or score.value is None:
            return "-"
        error = "" if score.stderr is None else f" \u00b1 {_digits(score.stderr)}"
        return _digits(score.value) + error

    @property
    def difference(self) -> str:
        """The difference of a task's score, run minus base, with the standard error of a difference of two independent
        samples; "" without both.

        Both models saw the same documents, so the true error is usually smaller.
        """
        if self.before is None or self.after is None or None in (self.before.value, self.after.value):
            return ""
        moved = (self.after.value or 0.0) - (self.before.value or 0.0)
        text = f"{'+' if moved > 0 else ''}{_digits(moved)}"
        if self.before.stderr is None or self.after.stderr is None:
            return text
        return f"{text} \u00b1 {_digits((self.before.stderr**2 + self.after.stderr**2) ** 0.5)}"


def _digits(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"


def task_changes(rows: Sequence[TaskScore]) -> list[TaskChange]:
    """The changes of tasks' metrics, in the order in which they were first evaluated."""
    found: dict[tuple[str, str, str], dict[str, TaskScore]] = {}
    for row in rows:
        found.setdefault((row.task, row.metric, row.filter), {})[row.role] = row
    return [TaskChange(both.get(BASE), both.get(RUN)) for both in found.values()]


@dataclass(frozen=True)
class ShownSample:
    """One prompt with the model's text now, its text before the first step, and the text in the data."""

    step: int
    domain: str
    prompt: str
    text: str
    before: str = ""
    reference: str = ""


def changes(run: RunData) -> list[DomainChange]:
    """Changes before and after of the held-out loss by domain; empty for a run that did not begin with an evaluation,
    or has no later one."""
    return [
        DomainChange(domain, points[0][1], points[-1][1], table == "eval")
        for table in ("eval", "eval_other")
        for domain, points in domain_losses(run, _same_text(run) if table == "eval" else table).items()
        if len(points) > 1 and points[0][0] == 0
    ]


def _same_text(run: RunData) -> str:
    """The name of the evaluation table in which the first and the last evaluation read the same rows."""
    ends = [sum(result["tokens"] for result in row["eval_all"].values()) for row in (*run.evals[:1], *run.evals[-1:])]
    return "eval_all" if len(set(ends)) == 1 else "eval"


def samples(run: RunData) -> list[ShownSample]:
    """The samples of the newest step that has any, in the order in which they were written."""
    if not run.samples:
        return []
    newest = run.samples[-1]["step"]
    first = {(row["domain"], row["prompt"]): row["text"] for row in run.samples if row["step"] == 0}
    return [
        ShownSample(
            newest,
            row["domain"],
            row["prompt"],
            row["text"],
            first.get((row["domain"], row["prompt"]), "") if newest else "",
            row["reference"],
        )
        for row in run.samples
        if row["step"] == newest
    ]
