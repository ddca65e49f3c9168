"""A data build as one HTML page: what came in and went out, by stage and domain, why, examples, and histograms.

Made of the same charts and style sheet as the report of a run; opens offline. Text of records is escaped.
"""

from pathlib import Path
from typing import Any

from tilewright.core.atomic_io import write_whole
from tilewright.core.units import format_bytes, format_count, format_seconds, format_share
from tilewright.data.dataset.build_account import (
    MODALITIES,
    NO_DOMAIN,
    BuildAccount,
    MeasureHistogram,
    StageCount,
)
from tilewright.report.figures.run_figures import Figure
from tilewright.report.summary import SummaryCard
from tilewright.report.svg.charts import Mark, Series, line_chart
from tilewright.report.template import fill

PAGE = "report.html"
_OUT = ("records", "rejects", "bytes")
_MOST_REASONS, _MOST_FIGURES = 60, 40
_ZERO = 0.5
"""Where a log axis has no things at all."""


def write_build_page(account: BuildAccount) -> Path:
    """Write the page of a data build, `report.html`, into its folder, whole or not at all; returns its path."""
    path = account.folder / PAGE
    write_whole(path, render_build(account))
    return path


def render_build(account: BuildAccount) -> str:
    """The page of a data build as HTML text."""
    shown = account.reasons[:_MOST_REASONS]
    return fill(
        "build.html",
        title=f"{format_count(account.summary['tokens'])} tokens from {account.summary['source']}",
        cards=_cards(account.summary),
        stages=[_stage_row(stage) for stage in account.stages],
        domains=[_domain_row(name, account.summary) for name in account.summary["records"]],
        reasons=shown,
        num_more=len(account.reasons) - len(shown),
        size=format_bytes,
        models=account.models,
        notes=account.summary["notes"],
        figures=[_figure(one) for one in account.histograms[:_MOST_FIGURES]],
        num_more_figures=max(0, len(account.histograms) - _MOST_FIGURES),
    )


def _cards(summary: dict[str, Any]) -> list[SummaryCard]:
    files, documents, text = (summary["read"][name] for name in ("files", "documents", "text_bytes"))
    refused = 1 - text["used"] / max(1, text["found"])
    return [
        SummaryCard("Files", f"{files['used']:,}", f"of {files['found']:,} found"),
        SummaryCard("Records", f"{documents['used']:,}", f"of {documents['found']:,} read"),
        SummaryCard("Text", format_bytes(text["used"]), f"{format_share(refused)} of what was read is dropped"),
        SummaryCard("Tokens", format_count(summary["tokens"]), f"{summary['bytes_per_token']} bytes each"),
        SummaryCard("Copies", f"{summary['duplicates']:,} + {summary['near_duplicates']:,}", "exact and near"),
    ]


def _stage_row(stage: StageCount) -> list[str]:
    counts = dict(stage.counts)
    row = [stage.says, f"{stage.units}", format_seconds(stage.seconds)]
    for name in _OUT:
        value = counts.pop(name, None)
        row.append("" if value is None else format_bytes(value) if name == "bytes" else f"{value:,}")
    return [*row, ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in counts.items())]


def _domain_row(name: str, summary: dict[str, Any]) -> list[str]:
    """Write a domain's row on the page of a build: records of each modality; text, tokens and held-out parts, if there
    are any; and the dropped records."""
    records, counts = summary["records"][name], summary["domains"].get(name)
    row = [name or NO_DOMAIN, *(f"{records.get(one, 0):,}" for one in MODALITIES)]
    if counts is None:
        row += ["", "", ""]
    else:
        held = f"{counts['holdout_docs']:,}, {format_count(counts['holdout_tokens'])} tokens"
        row += [format_bytes(counts["bytes"]), format_count(counts["tokens"]), held]
    return [*row, f"{records['dropped']:,}"]


def _figure(one: MeasureHistogram) -> Figure:
    """Draw a figure on the page of a build: a histogram as steps; counts of things have a log axis, since each of their
    bins is twice as wide as the one before."""
    doubles = one.starts[2] == 2 * one.starts[1] and one.starts[1] == 1
    last = max((i for i, count in enumerate(one.counts) if count), default=0) + 2
    xs = [max(start, _ZERO) if doubles else start for start in one.starts][:last]
    marks = [Mark(max(v, _ZERO) if doubles else v, name) for name, v in one.thresholds.items()]
    name = one.measure.replace("_", " ")
    series = Series("records", xs, [float(count) for count in one.counts[:last]], kind="step")
    axis = f"{name}, log scale" if doubles else name
    chart = line_chart(
        [series],
        label=f"{name} in {one.domain}",
        y_label="records",
        x_label=axis,
        log_x=doubles,
        zero=True,
        marks=marks,
    )
    limits = ", ".join(f"{rule} = {value:g}" for rule, value in one.thresholds.items())
    return Figure(f"{one.domain}: {name}", chart, f"{sum(one.counts):,} records; {limits}")
