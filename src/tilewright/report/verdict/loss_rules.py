"""Rules on the loss: does the run keep learning, and learn what is held out too?"""

from itertools import takewhile
from statistics import median

from tilewright.report.run_data.collect_run import RunData
from tilewright.report.run_data.run_numbers import domain_losses, held_out_losses, quarters
from tilewright.report.svg.axes import format_number as num
from tilewright.report.svg.axes import format_percent
from tilewright.report.verdict.curve_levels import Level, difference_error, level, noise, outliers
from tilewright.report.verdict.divergence import width
from tilewright.report.verdict.rule import MIN_RECORDS, Verdict, VerdictRule

FLAT = 0.005
"""Share of the loss that a quarter of the run must bring to count as progress. A pretraining run whose loss falls with
the power -0.05 of its steps brings 1.7 % from the third quarter to the last."""
FLAT_ERRORS = 2.0
"""Standard errors that the progress of a quarter must exceed too, so that noise does not count as progress."""
FEWEST_EVALS = 2
"""Evaluations below which nothing is known of how the held-out loss develops."""
FOLLOWS = 0.5
"""Share of a rise of one held-out loss that the loss it is compared with must rise by to have moved with it."""
SPIKE = 8.0
"""Spreads above the median of recent losses that make a spike, as the precision controller has it."""

PLATEAU = VerdictRule(
    name="plateau",
    chart="loss",
    measures=(
        "share of the run, counted in quarters from its end, over which the loss did not fall by more than "
        f"{format_percent(FLAT)} of itself: neither the held-out loss nor, beyond {FLAT_ERRORS:g} standard errors, the "
        "training loss"
    ),
    unit="share",
    look=0.5,
    bad=1.0,
    why=(
        "Half a run without progress could have been saved, or wants another learning rate. A loss that has not fallen "
        "in the whole run means that nothing was learned."
    ),
)
MEMORISING = VerdictRule(
    name="memorising",
    chart="loss",
    measures=(
        "nats by which the last held-out loss is above the lowest of the run, where the training loss since then did "
        "not rise by half as much"
    ),
    unit="nats",
    look=0.02,
    bad=0.2,
    why=(
        "Held-out batches are the same at each evaluation, so 0.02 nats (2 % of perplexity) are no noise. At 0.2 nats "
        "the model at the end is 22 % worse on new text than it was."
    ),
)
FORGETTING = VerdictRule(
    name="forgetting",
    chart="perplexity",
    measures=(
        "largest rise of a domain's held-out loss above its lowest, in nats, where the loss over all domains did not "
        "rise by half as much"
    ),
    unit="nats",
    look=0.05,
    bad=0.3,
    why="A domain has few held-out tokens: 0.05 nats (5 % of perplexity) are more than its noise, 0.3 nats are 35 %.",
)
SPIKES = VerdictRule(
    name="loss spikes",
    chart="loss",
    measures=f"share of the steps whose loss is {SPIKE:g} spreads (1.4826 MAD) above the median of the 64 before it",
    unit="share",
    look=0.005,
    bad=0.05,
    why=(
        "Normal noise has no such step in a million. One in 200 points to single bad batches; at one in 20 the "
        "learning rate is at the edge of stability."
    ),
)


def plateau(run: RunData) -> Verdict:
    """Judge a plateau: for how long has the loss not fallen?"""
    steps, losses = run.column("loss")
    if len(losses) < MIN_RECORDS:
        return PLATEAU.too_short(len(losses))
    # 1. Quarters of the run: where the last one lies, and since when neither loss fell.
    sigma = noise(losses[len(losses) // 2 :])
    *before, last = [level(part, 0) for part in quarters(losses)]
    ends = [part[-1] for part in quarters(steps)]
    progress = [_progress(part, last, sigma) for part in before]
    fell = [_held_out_fall(run, end) for end in ends[:-1]]
    flat = sum(1 for _ in takewhile(lambda i: not (progress[i] or fell[i]), reversed(range(len(before)))))
    now = f"{num(last.value)} nats per token"
    # 2. Still falling: the training loss, or only the held-out one.
    if not flat and progress[-1]:
        gain = before[-1].value - last.value
        return PLATEAU.judge(
            0.0,
            f"The loss fell by {num(gain)} nats from the third quarter of the run to the last, whose median is {now}.",
        )
    if not flat:
        return PLATEAU.judge(
            0.0, f"The held-out loss fell by {num(fell[-1])} nats at the end; the training loss is {now}."
        )
    # 3. Flat. If it never was above its last level, nothing was learned.
    start = level(losses[:3], 0)
    if flat == len(before) and not _progress(start, last, sigma):
        text = f"The run learned nothing: the loss began at {num(start.value)} and is {now} in the last quarter."
        return PLATEAU.judge(1.0, text)
    share = min((flat + 1) / 4, 1 - 3 / len(losses))
    text = f"The loss did not fall in the last {format_percent(share)} of the run, where it was about {now}."
    return PLATEAU.judge(share, text)


def memorising(run: RunData) -> Verdict:
    """Judge memorising: does the held-out loss rise while the training loss falls?"""
    points, num_losses = held_out_losses(run), len(run.column("loss")[1])
    if len(points) < FEWEST_EVALS:
        return MEMORISING.not_measured(_few_evals(len(points)))
    if num_losses < MIN_RECORDS:
        return MEMORISING.too_short(num_losses)
    step, lowest = min(points, key=lambda point: point[1])
    last = points[-1][1]
    rise, trained = last - lowest, _training_change(run, step)
    if rise > 0 and trained >= FOLLOWS * rise:
        return MEMORISING.judge(0.0, "The held-out loss moves with the training loss.")
    if MEMORISING.is_good(rise):
        text = f"The held-out loss ends at {num(last)} nats per token; its lowest was {num(lowest)}."
        return MEMORISING.judge(rise, text)
    moved = f"fell by {num(-trained)}" if trained < 0 else "did not rise with it"
    text = (
        f"The run memorises its text: since step {step:,.0f} the held-out loss rose by {num(rise)} nats to "
        f"{num(last)}, and the training loss {moved}."
    )
    return MEMORISING.judge(rise, text)


def forgetting(run: RunData) -> Verdict:
    """Judge forgetting: does one domain become worse while the others do not?"""
    evaluated = domain_losses(run)
    domains = {name: points for name, points in evaluated.items() if len(points) >= FEWEST_EVALS}
    others = len(evaluated) - len(domains)
    beside = (
        f" {others} more {'has' if others == 1 else 'have'} fewer than {FEWEST_EVALS} evaluations." if others else ""
    )
    pooled = held_out_losses(run)
    if len(pooled) < FEWEST_EVALS or not domains:
        return FORGETTING.not_measured(_few_evals(len(pooled)))
    if len(run.steps) < MIN_RECORDS:
        return FORGETTING.too_short(len(run.steps))
    if len(domains) == 1:
        return FORGETTING.not_measured(f"Only one domain was evaluated more than once.{beside}")
    rises = {name: points[-1][1] - min(loss for _, loss in points) for name, points in domains.items()}
    worst = max(rises, key=lambda name: rises[name])
    rise, together = rises[worst], pooled[-1][1] - min(loss for _, loss in pooled)
    if rise > 0 and together >= FOLLOWS * rise:
        return FORGETTING.judge(0.0, f"The {len(domains)} domains move together.{beside}")
    if FORGETTING.is_good(rise):
        place = f"within {num(rise)} nats of" if rise else "at"
        text = f"Each of {len(domains)} domains ends {place} its lowest held-out loss.{beside}"
        return FORGETTING.judge(rise, text)
    text = f"The domain {worst} is being forgotten: its held-out loss rose by {num(rise)} nats.{beside}"
    return FORGETTING.judge(rise, text)


def spikes(run: RunData) -> Verdict:
    """Judge spikes of the loss: how many values are far above those before?"""
    _, losses = run.column("loss")
    return judge_outliers(SPIKES, losses, list(outliers(losses, SPIKE)), "losses")


def judge_outliers(rule: VerdictRule, values: list[float], found: list[bool], what: str) -> Verdict:
    """Judge a curve by its share of outliers, among the values that could be compared with earlier ones."""
    if len(found) < MIN_RECORDS:
        return rule.too_short(len(values), MIN_RECORDS + len(values) - len(found))
    count = sum(found)
    share = count / len(found)
    if not count:
        return rule.judge(0.0, f"None of {len(found):,} {what} jumps out of line.")
    text = (
        f"{count:,} of {len(found):,} {what} ({format_percent(share)}) {'is a spike' if count == 1 else 'are spikes'}."
    )
    return rule.judge(share, text)


def _progress(before: Level, after: Level, sigma: float) -> bool:
    """True if the loss fell from one level to the other by more than noise."""
    least = max(FLAT * abs(after.value), FLAT_ERRORS * difference_error(before, after, sigma))
    return before.value - after.value > least


def _held_out_fall(run: RunData, since: float) -> float:
    """Fall of the held-out loss, in learning, from the last evaluation up to that step to the last one; 0 if little."""
    points = held_out_losses(run)
    before = [loss for step, loss in points if step <= since]
    if not before:
        return 0.0
    last = points[-1][1]
    return before[-1] - last if before[-1] - last > FLAT * abs(last) else 0.0


def _training_change(run: RunData, step: float) -> float:
    """Change of the training loss, in learning, from around that step to the end."""
    steps, losses = run.column("loss")
    wide = width(losses)
    place = sum(one <= step for one in steps)
    first = min(max(0, place - wide // 2), max(0, len(losses) - wide))
    return median(losses[-wide:]) - median(losses[first : first + wide])


def _few_evals(count: int) -> str:
    if not count:
        return "No evaluation with a finite loss is recorded."
    return f"Too few to judge: one evaluation with a finite loss is recorded, {FEWEST_EVALS} are needed."
