"""The report's pictures of a precision controller: formats by layer and step, what the evidence was, every move.

Made from what `precision.controller.controller_log` reads of the run folder. Each function gives None where there was
no controller.
"""

import math
from collections.abc import Callable, Sequence

from tilewright.precision.controller.controller_log import History
from tilewright.precision.controller.groups import Move
from tilewright.precision.controller.layer_statistics import LayerStats
from tilewright.precision.policy.gemm_names import GEMM_NAMES
from tilewright.report.figures.run_figures import Figure
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.svg.axes import format_number, format_percent
from tilewright.report.svg.heatmap import Bar, heat_map

COLOURS = {"fp8_tile": 2, "bf16": 1, "fp32": 3}
"""Colours of formats: a calm one for the cheapest, warmer ones for wider formats."""
SHOWN = 200
"""Moves in the table; more are in precision.jsonl."""


def map_figure(run: RunData) -> Figure | None:
    """Draw the format that each matmul of each layer had at each sample."""
    history = run.history
    if history is None or not history.samples:
        return None
    steps = sorted({sample.step for sample in history.samples} | {move.step for move in history.moves})
    formats = history.formats(steps)
    rows = [
        (name, [[_format_bar(gemm, formats[step][layer, gemm]) for gemm in GEMM_NAMES] for step in steps])
        for layer, name in zip(history.layers, short_names(history.layers), strict=True)
    ]
    last = list(formats[steps[-1]].values())
    legend = [(COLOURS[name], name, f"{last.count(name)} of {len(last)} at the end") for name in COLOURS]
    note = f"{len(history.moves)} moves; {format_percent(history.samples[-1].above_8bit)} of the work above 8 bits."
    if history.refused:
        note += f" {len(history.refused)} moves were refused, because the compute budget did not allow them."
    reading = (
        "Usually most of it has the colour of fp8_tile, and the same few layers are wider from early on. A layer that "
        "goes back and forth needs a longer cool-down; one that is always wide deserves a rule."
    )
    svg = heat_map(rows, steps, label="formats of matmuls by layer and step")
    return Figure("Formats by layer: fprop, dgrad, wgrad from top to bottom", svg, reading, legend, note)


def underflow_figure(run: RunData) -> Figure | None:
    """Draw the underflow of input, weight and gradient at each sample."""

    def worst(layer: LayerStats) -> tuple[float, str] | None:
        found = [(part.underflow, name) for name, part in layer.tensors.items()]
        return max(found, key=lambda pair: _rank(pair[0])) if found else None

    def strength(share: float) -> float:
        return 1.0 if math.isnan(share) else min(1.0, max(0.0, 1 + math.log10(max(share, 1e-6)) / 5))

    reading = (
        "Pale strips have under 0.1 % of zeroed elements. A strip that darkens is a layer whose range outgrows tiles."
    )
    text = "Underflow: share of the elements that became zero, worst of input, weight and gradient"
    return _strips(run, text, reading, worst, strength, lambda share, name: f"{name} {format_percent(share)}")


def sqnr_figure(run: RunData) -> Figure | None:
    """Draw the signal to noise of the matmuls in FP8 at each sample."""

    def worst(layer: LayerStats) -> tuple[float, str] | None:
        found = [(part.sqnr_db, name.partition(".")[0]) for name, part in layer.matmuls.items() if "fp8" in name]
        return max(found, key=lambda pair: _rank(-pair[0])) if found else None

    def strength(sqnr: float) -> float:
        return 1.0 if math.isnan(sqnr) else min(1.0, max(0.0, (40 - sqnr) / 40))

    reading = "Usual layers have 25 to 35 dB. A dark strip is a layer whose GEMMs come out of FP8 as noise."
    text = "Signal to noise of the matmuls in FP8, worst of the three"
    return _strips(run, text, reading, worst, strength, lambda sqnr, name: f"{name} {format_number(sqnr)} dB")


def move_rows(run: RunData) -> list[tuple[str, ...]]:
    """Rows of the controller's moves under the precision figures: step, layer, matmul, from, to, evidence and its
    threshold."""
    history = run.history or History([], [], [], {})
    rows = [(move, "") for move in history.moves] + [(move, "refused") for move in history.refused]
    rows.sort(key=lambda pair: pair[0].step)
    return [_move_row(move, remark) for move, remark in rows[:SHOWN]]


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten layers' names in precision figures by the part that all of them begin with.

    Example:
        >>> short_names(["model.layers.0.up", "model.layers.10.up"])
        ['0.up', '10.up']
    """
    parts = [name.split(".")[:-1] for name in names]
    same = [set(level) for level in zip(*parts, strict=False)]
    start = next((i for i, level in enumerate(same) if len(level) > 1), 0 if len(names) < 2 else len(same))
    return [".".join(name.split(".")[start:]) for name in names]


def _strips(
    run: RunData,
    title: str,
    reading: str,
    worst: Callable[[LayerStats], tuple[float, str] | None],
    strength: Callable[[float], float],
    text: Callable[[float, str], str],
) -> Figure | None:
    """Draw the strips of a precision figure: one bar per layer and sample, as strong as its worst number is bad."""
    history = run.history
    if history is None or not history.samples:
        return None
    place = {layer: number for number, layer in enumerate(history.layers)}
    seen = dict.fromkeys(name for sample in history.samples for name in sample.evidence.layers)
    names = sorted(seen, key=lambda name: place.get(name, len(place)))  # samples are written from the last layer on
    rows, worst_of_all = [], None
    for layer, name in zip(names, short_names(names), strict=True):
        cells: list[list[Bar]] = []
        for sample in history.samples:
            evidence = sample.evidence.layers.get(layer)
            found = worst(evidence) if evidence is not None else None
            cells.append([Bar(5, strength(found[0]), text(*found))] if found else [])
            if found and (worst_of_all is None or strength(found[0]) > worst_of_all[0]):
                worst_of_all = (strength(found[0]), f"{layer} at step {sample.step}: {text(*found)}")
        rows.append((name, cells))
    steps = [sample.step for sample in history.samples]
    note = f"Worst: {worst_of_all[1]}." if worst_of_all else ""
    svg = heat_map(rows, steps, label=title)
    return Figure(title, svg, reading, [(5, "the darker, the worse", "")], note)


def _format_bar(gemm: str, name: str) -> Bar:
    return Bar(COLOURS.get(name, 7), 0.9, f"{gemm} {name}")


def _rank(value: float) -> float:
    """Rank a number in precision figures: higher is worse, and not a number is the worst."""
    return math.inf if math.isnan(value) else value


def _move_row(move: Move, remark: str) -> tuple[str, ...]:
    evidence = f"{move.evidence} {format_number(move.value)}, limit {format_number(move.threshold)}"
    return (str(move.step), move.layer, move.gemm, move.before, move.after, evidence, remark)
