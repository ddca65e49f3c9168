"""The chart of held-out bits per byte, with the lines that general compressors draw on the same text."""

from tilewright.core.units import format_bits
from tilewright.report.figures.run_figures import Figure, domain_colours
from tilewright.report.run_data.collect import RunData
from tilewright.report.run_data.measured import compressor_lines, domain_bits, held_out_bits, part_note
from tilewright.report.svg.charts import Series, line_chart

_RULES = {"gzip": 6, "xz": 7}
"""Colours of the compressors' lines, which no domain has."""


def bits_figure(run: RunData) -> Figure | None:
    """Held-out bits per byte, of all text and by domain; None where targets are not text."""
    points = held_out_bits(run)
    if not points:
        return None
    domains = domain_bits(run)
    by_name = {"all": points} | (domains if len(domains) > 1 else {})
    colours = {"all": 0} | domain_colours(run)
    series = [
        Series(name, [step for step, _ in found], [bits for _, bits in found], colours[name])
        for name, found in by_name.items()
    ]
    ended = {"all": held_out_bits(run, "eval_all")} | domain_bits(run, "eval_all")
    legend = [(colours[name], name, format_bits((ended.get(name) or found)[-1][1])) for name, found in by_name.items()]
    steps = [step for step, _ in points]
    for name, bits in compressor_lines(run).items():
        series.append(Series(f"{name} -9", [steps[0], steps[-1]], [bits, bits], _RULES[name], "rule"))
        legend.append((_RULES[name], f"{name} -9", format_bits(bits)))
    svg = line_chart(series, label="held-out bits per byte", y_label="bits per byte")
    reading = (
        "The size of the held-out text if the model compressed it: independent of the tokenizer, so comparable between "
        "runs. Below the lines of gzip and xz a model has learned more than repetition."
    )
    return Figure("Held-out bits per byte", svg, reading, legend, part_note(run))
