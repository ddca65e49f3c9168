"""A fine-tune beside the model it began with: held-out loss by domain, of text that is not trained on too (what it
forgets), and the same prompts answered by both.

A run that starts from loaded weights evaluates them, and lets them write, before its first step: step 0.
"""

from dataclasses import dataclass

from tilewright.core.units import format_perplexity
from tilewright.report.run_data.collect import RunData
from tilewright.report.run_data.measured import domain_losses


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
        """Change of the loss over the loss before; below 0 where it fell."""
        return self.after / self.before - 1 if self.before else 0.0


@dataclass(frozen=True)
class ShownSample:
    """One prompt: what the model writes now, what it wrote before the first step, what stands in the data."""

    step: int
    domain: str
    prompt: str
    text: str
    before: str = ""
    reference: str = ""


def changes(run: RunData) -> list[DomainChange]:
    """By domain; empty for a run that did not begin with an evaluation, or has no later one."""
    return [
        DomainChange(domain, points[0][1], points[-1][1], table == "eval")
        for table in ("eval", "eval_other")
        for domain, points in domain_losses(run, table).items()
        if len(points) > 1 and points[0][0] == 0
    ]


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
