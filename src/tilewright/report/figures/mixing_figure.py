"""The report's picture of moving weights: of each domain its weight over its perplexity, with moves and refusals.

Made from the events that `data.mixing` writes; None where nothing was mixed.
"""

from tilewright.core.units import format_share, perplexity
from tilewright.report.figures.run_figures import LARGEST_EXPONENT, Figure
from tilewright.report.run_data.clean_rows import number, number_tables
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.svg.charts import Mark, Series, line_chart

_COLOURS = {"mix": 4, "mix_refused": 7}
_SIZE = (1080, 250)


def mixing_figure(run: RunData) -> Figure | None:
    """Figure of moving mixture weights, above perplexity of the held-out batches that the policy was shown."""
    rows = [
        (step, number_tables(row.get("domains"))) for row in run.kinds("mix_eval") if (step := _step(row)) is not None
    ]
    # Domains keep their colour in both pictures; there are five.
    names = sorted({name for _, domains in rows for name in domains if "weight" in domains[name]})
    if not names:
        return None
    colours = {name: 1 + i % 5 for i, name in enumerate(names)}
    marks = [
        Mark(step, f"step {step:g}: {row['kind']}: {row.get('message', '')}", _COLOURS[row["kind"]])
        for row in run.kinds(*_COLOURS)
        if (step := _step(row)) is not None
    ]
    weights = [_series(name, rows, "weight", colours[name]) for name in names]
    losses = [_series(name, rows, "loss", colours[name]) for name in names]
    losses = [series for series in losses if series.xs]
    # exp of a loss that has diverged is no number to draw: then the losses themselves.
    drawable = max((loss for series in losses for loss in series.ys), default=0.0) <= LARGEST_EXPONENT
    svg = line_chart(
        weights, label="weight of each domain", y_label="share of the data", zero=True, marks=marks, size=_SIZE
    )
    if losses:
        drawn = [Series(s.name, s.xs, [perplexity(y) if drawable else y for y in s.ys], s.colour) for s in losses]
        y_label = "perplexity" if drawable else "nats per token"
        svg += line_chart(drawn, label="perplexity by domain", y_label=y_label, log_y=True, marks=marks, size=_SIZE)
    legend = [(colours[name], name, format_share(series.ys[-1])) for name, series in zip(names, weights, strict=True)]
    moves, refusals = (len(run.kinds(kind)) for kind in _COLOURS)
    legend += [(_COLOURS["mix"], "moves", f"{moves} x"), (_COLOURS["mix_refused"], "refusals", f"{refusals} x")]
    reading = (
        "Weights move where a line is drawn through both pictures; its text says why. Perplexity is of a few rotating "
        "held-out batches, so it is rougher than that of evaluations. A weight that goes up and its perplexity with it "
        "is fed in vain: the domain may be overfitted."
    )
    return Figure("Weights of domains over their perplexity", svg, reading, legend)


def _series(name: str, rows: list[tuple[float, dict[str, dict[str, float]]]], column: str, colour: int) -> Series:
    points = [(step, domains[name][column]) for step, domains in rows if column in domains.get(name, {})]
    return Series(name, [step for step, _ in points], [value for _, value in points], colour)


def _step(row: dict[str, object]) -> float | None:
    return number(row.get("step"))
