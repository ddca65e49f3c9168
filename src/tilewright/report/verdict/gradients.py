"""Rules on the gradient: is it clipped, skipped, growing, or out of line?"""

from itertools import dropwhile
from statistics import median

from tilewright.report.run_data.clean_rows import Row
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.run_data.run_numbers import quarters, settled_norms
from tilewright.report.svg.axes import format_number, format_percent
from tilewright.report.verdict.curve_levels import outliers
from tilewright.report.verdict.loss_rules import judge_outliers
from tilewright.report.verdict.rule import MIN_RECORDS, Verdict, VerdictRule

SPIKE, JUMP = 12.0, 4.0
"""Spreads and medians above recent norms that make a spike, as the precision controller has it: the tail is long."""

SKIPS = VerdictRule(
    name="skipped steps",
    chart="loss_scale",
    measures=(
        "share of the steps whose update was not applied; overflows before the first applied step, which look for the "
        "loss scale, do not count"
    ),
    unit="share",
    look=0.01,
    bad=0.1,
    why=(
        "A loss scale that doubles after 2000 clean steps skips one in 2000. From one in 100 the scale or the data is "
        "at fault; at one in ten a tenth of the time is lost."
    ),
)
CLIPPING = VerdictRule(
    name="clipping",
    chart="norm",
    measures="share of the steps after the warm-up whose gradient norm is above `optim.clip_norm`",
    unit="share",
    look=0.1,
    bad=0.5,
    why=(
        "Clipping is for rare large gradients. From one step in ten it shortens usual steps too; where it shortens "
        "most of them, the bound sets the size of the updates and the learning rate no longer does."
    ),
)
GROWTH = VerdictRule(
    name="gradient growth",
    chart="norm",
    measures="median gradient norm of the last quarter of the steps after the warm-up, over the lowest such before it",
    unit="times",
    look=3.0,
    bad=10.0,
    why=(
        "Norms often double while a learning rate decays. Growth by more foretells divergence, and "
        "tenfold norms mean that it has begun."
    ),
)
TAIL = VerdictRule(
    name="gradient spikes",
    chart="norm_distribution",
    measures=(
        f"share of the steps after the warm-up whose gradient norm is {SPIKE:g} spreads (1.4826 MAD) above the median "
        f"of the 64 before it, and {JUMP:g} times that median"
    ),
    unit="share",
    look=0.005,
    bad=0.05,
    why="As for loss spikes: one in 200 points to single bad batches, one in 20 to a run at the edge of stability.",
)


def skips(run: RunData) -> Verdict:
    """Judge skipped steps: how many changed nothing?"""
    recorded = [row for row in run.steps if "skipped" in row]
    counted = list(dropwhile(_seeks_scale, recorded)) or recorded
    if not counted:
        return SKIPS.not_measured("Skipped steps are not recorded.")
    count = sum(row["skipped"] is not None for row in counted)
    share = count / len(counted)
    if SKIPS.is_good(share) and len(counted) < MIN_RECORDS:
        return SKIPS.too_short(len(counted))
    if not count:
        return SKIPS.judge(0.0, f"None of {len(counted):,} steps was skipped.")
    text = f"{count:,} of {len(counted):,} steps ({format_percent(share)}) {'was' if count == 1 else 'were'} skipped."
    return SKIPS.judge(share, text)


def clipping(run: RunData) -> Verdict:
    """Judge clipping: how many gradients are shortened?"""
    norms, which = settled_norms(run)
    bound = run.number_setting("optim", "clip_norm")
    if bound is None:
        return CLIPPING.not_measured("The bound, optim.clip_norm, is not recorded.")
    if not bound:
        return CLIPPING.not_measured("Clipping is off.")
    if len(norms) < MIN_RECORDS:
        return CLIPPING.too_short(len(norms))
    count = sum(norm > bound for norm in norms)
    share = count / len(norms)
    counted = f"{count:,} of {len(norms):,} {which} ({format_percent(share)})"
    return CLIPPING.judge(share, f"{counted} were clipped to a norm of {format_number(bound)}.")


def growth(run: RunData) -> Verdict:
    """Judge the growth of gradients: do their norms grow?"""
    norms, _ = settled_norms(run)
    if len(norms) < MIN_RECORDS:
        return GROWTH.too_short(len(norms))
    *before, last = [median(part) for part in quarters(norms)]
    times = last / min(before)
    text = (
        f"The median gradient norm of the last quarter is {format_number(last)}, {format_number(times)} times that of "
        "the lowest quarter before."
    )
    return GROWTH.judge(times, text)


def tail(run: RunData) -> Verdict:
    """Judge the outliers of gradient norms: how many are far above those before?"""
    norms, _ = settled_norms(run)
    return judge_outliers(TAIL, norms, list(outliers(norms, SPIKE, JUMP)), "gradient norms")


def _seeks_scale(row: Row) -> bool:
    return row["skipped"] == "overflow"
