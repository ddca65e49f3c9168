"""A search over layers as one HTML page: the verdict, loss over latency, the chosen shape layer by layer, predicted
beside measured, each replacement alone. Made from search.json; opens offline."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewright.compress.budget.budget_rise import error_in_words
from tilewright.core.units import format_bytes, format_change, format_count, format_seconds
from tilewright.report.figures.run_figures import Figure
from tilewright.report.pages.simulate_page import PageTable
from tilewright.report.svg.charts import Series, line_chart
from tilewright.report.template import fill

_MEASURES = {
    "token": "cached token",
    "prefill": "prefill",
    "flops": "FLOPs per token",
    "parameters": "parameters",
    "cache": "cache",
}
_POINTS = (
    (0, "the run"),
    (1, "layers alike, predicted"),
    (2, "found, predicted"),
    (3, "found, trained and measured"),
    (4, "layers alike, trained and measured"),
)


def verdict_of(record: Mapping[str, Any]) -> str:
    """The verdict on the page of a search over layers, in a sentence; of one that was stopped or found nothing, that.

    Example:
        >>> verdict_of({"run": "base"})
        'base: stopped before a verdict'
        >>> shape = {"name": "shape-1", "costs": {"parameters": 80}, "rise": 0.01, "error": 0.001}
        >>> found = {"verdict": "within limits", "chosen": "shape-1", "candidates": {"shape-1": shape}}
        >>> asked = {"run": "base", "run_costs": {"parameters": 100}, "settings": {"limits": {"parameters": 0.9}}}
        >>> verdict_of(asked | found | {"best_uniform": "shape-1"})
        'base: shape-1, parameters 80.0 %, loss +1.00 % +- 0.10; its layers are alike'
    """
    run = record["run"]
    if "nearest" in record:
        return f"{run}: no shape is within the limits; the nearest is at {_costs(record['nearest'], record)}"
    if "verdict" not in record:
        return f"{run}: stopped before a verdict"
    best = record["candidates"][record["chosen"]]
    found = (
        f"{best['name']}, {_costs(best, record)}, loss {format_change(best['rise'])} +- {error_in_words(best['error'])}"
    )
    alike = _uniform(record)
    beside = ""
    if alike is best:
        beside = "; its layers are alike"
    elif alike is not None:
        beside = f"; layers alike: {_costs(alike, record)}, loss {format_change(alike['rise'])}"
    if record["verdict"] != "within limits":
        return f"{run}: no shape that was trained is within the limits as measured; the best is {found}"
    return f"{run}: {found}{beside}"


def _uniform(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    name = record.get("best_uniform")
    return record["candidates"][name] if name else None


def _costs(row: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The costs on the page of a search that have limits, as shares of the run's."""
    return ", ".join(f"{_MEASURES[name]} {_share(row, name, record)}" for name in record["settings"]["limits"])


def _share(row: Mapping[str, Any], name: str, record: Mapping[str, Any]) -> str:
    whole = record["run_costs"][name]
    return f"{100 * row['costs'][name] / whole:.1f} %" if whole else "0"


def render_search(record: Mapping[str, Any]) -> str:
    """The page of a search over layers as HTML text.

    Args:
        record: search.json, with its latency table.
    """
    settings = record["settings"]
    limits = ", ".join(f"{_MEASURES[name]} {100 * share:g} %" for name, share in settings["limits"].items())
    tables = [_losses(record), _costs_beside(record), _layers(record), _replacements(record), _latency(record)]
    return fill(
        "search.html",
        setting=f"{record['run']}, {record['checkpoint']}; at most {limits} of its own",
        verdict=verdict_of(record),
        figures=[_scatter(record, name) for name in ("token", "prefill")],
        tables=[table for table in tables if table.rows],
        cards=(),
        notes=list(_notes(record)),
    )


def _scatter(record: Mapping[str, Any], name: str) -> Figure:
    tried = [record["candidates"][one] for one in record.get("tried", ())]
    alike = _uniform(record)
    rows: Sequence[Sequence[Mapping[str, Any]]] = (
        [{"costs": record["run_costs"], "rise": 0.0}],
        record.get("uniform", ()),
        record.get("shapes", ()),
        tried,
        [] if alike is None else [alike],
    )
    series = [
        Series(label, [1e3 * row["costs"][name] for row in of], [100 * row["rise"] for row in of], colour, "dots")
        for (colour, label), of in zip(_POINTS, rows, strict=True)
        if of
    ]
    series.append(series.pop(0))  # the run is one of those alike: its point lies above theirs
    words = f"ms of a {_MEASURES[name]}"
    svg = line_chart(
        series,
        label=f"Rise of the held-out loss over {words}",
        y_label="loss over the run's, %",
        x_label=words,
        size=(1060, 300),
    )
    legend = tuple((colour, label, "") for (colour, label), of in zip(_POINTS, rows, strict=True) if of)
    reading = (
        "Down and left is better. Predicted: sums of what each replacement costs alone, before a shape is trained."
    )
    return Figure(f"Loss over the time of a {_MEASURES[name]}", svg, reading, legend)


def _trained(record: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """Rows of the trained shapes on the page of a search, with name and role of each."""
    alike = record.get("best_uniform")
    names = [*record.get("tried", ()), *([alike] if alike else [])]
    for name in dict.fromkeys(names):
        marks = [word for word, so in (("chosen", name == record["chosen"]), ("layers alike", name == alike)) if so]
        yield (name, ", ".join(marks)), record["candidates"][name]


def _losses(record: Mapping[str, Any]) -> PageTable:
    rows = []
    for which, row in _trained(record):
        rises = (row["predicted"]["rise"], row["rise_before"], row["rise"])
        rows.append((*which, *map(format_change, rises), error_in_words(row["error"])))
    columns = ("shape", "which", "predicted", "as put together", "trained", "error")
    return PageTable("Losses, predicted beside trained", "Over the run's.", columns, rows, frozenset(("which",)))


def _costs_beside(record: Mapping[str, Any]) -> PageTable:
    rows = []
    for which, row in _trained(record):
        cells = (f"{_share(row['predicted'], one, record)} / {_share(row, one, record)}" for one in _MEASURES)
        rows.append((*which, *cells))
    lead = "Shares of the run's: predicted / measured."
    columns = ("shape", "which", *_MEASURES.values())
    return PageTable("Costs, predicted beside measured", lead, columns, rows, frozenset(("which",)))


def _layers(record: Mapping[str, Any]) -> PageTable:
    row = record["candidates"].get(record.get("chosen")) or record.get("nearest")
    if row is None:
        return PageTable("The chosen shape, layer by layer", "", (), ())
    by_layer: dict[str, dict[str, str]] = {}
    for place, name in row["choices"].items():
        layer, _, part = place.partition(".")
        by_layer.setdefault(layer, {})[part] = name
    rows = [
        (layer, *(_in_words(parts.get(part, "none")) for part in ("attention", "ffn")))
        for layer, parts in by_layer.items()
    ]
    lead = "own: as in the run. A layer with neither part is left out."
    return PageTable(
        "The chosen shape, layer by layer", lead, ("layer of the run", "attention", "FFN"), rows,
        frozenset(("attention", "FFN")),
    )  # fmt: skip


def _in_words(name: str) -> str:
    """A replacement's name in words on the page of a search.

    Example:
        >>> _in_words("heads-1"), _in_words("groups-1"), _in_words("groups-2"), _in_words("own")
        ('1 query head, with its keys and values', '1 key/value head', '2 key/value heads', 'own')
    """
    kind, _, number = name.partition("-")
    words = {"ffn": "{} wide", "heads": "{} query heads, with their keys and values", "groups": "{} key/value heads"}
    if number == "1":
        words |= {"heads": "{} query head, with its keys and values", "groups": "{} key/value head"}
    words |= {"window": "window of {}", "linear": "linear attention"}
    return words[kind].format(number) if kind in words else name


def _replacements(record: Mapping[str, Any]) -> PageTable:
    rows = []
    for key, row in record["scores"].items():
        place, _, name = key.rpartition(".")
        trained = record["library"].get(key)
        errors = ("",) * 3 if trained is None else (f"{trained[name]:.3f}" for name in ("begun", "fitted", "error"))
        layer, _, part = place.partition(".")
        is_finite = row["rise"] is not None
        loss = (format_change(row["rise"]), error_in_words(row["error"])) if is_finite else ("not finite", "")
        rows.append((f"layer {layer}, {part}", _in_words(name), *loss, *errors))
    lead = (
        "Held-out loss with this one in place and all else the run's. Missing: mean square of the difference to the "
        "run's part, as a share of what that part adds: at first, with the last layer fitted, and trained."
    )
    columns = ("part", "replacement", "loss", "error", "missing at first", "fitted", "trained")
    return PageTable("Each replacement alone", lead, columns, rows, frozenset(("replacement",)))


def _latency(record: Mapping[str, Any]) -> PageTable:
    found = record["latency"]
    rows = []
    for name, row in (("the run", found["run"]), *found["parts"].items()):
        cells = []
        for call in ("token", "prefill"):
            spread = f"{100 * row[call]['spread']:.0f} %" + ("" if row[call]["steady"] else ", unsteady")
            cells += [format_seconds(row[call]["least"]), spread]
        cache = row.get("cache")
        rows.append((name, *cells, "" if cache is None else format_bytes(cache)))
    lead = (
        f"By {found['clock']}. The run: least of the repeats, spread: how far their median is above it. All others: "
        "in turns with the run, by the median ratio; spread: its standard error."
    )
    columns = ("shape", "cached token", "spread", "prefill", "spread ", "cache")
    return PageTable("Latency table", lead, columns, rows)


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    settings, own = record["settings"], record["run_costs"]
    yield (
        f"The run: {format_count(own['parameters'])} parameters, held-out loss {record['loss']:.4f}. It was not "
        "trained further: what as many more steps would have brought it is not known."
    )
    yield (
        f"Latency: one row in tilewright's own runtime, in FP32; a cached token behind {settings['context']} others, "
        "and their prefill. Parts are timed in stacks of as many bytes as the run's layers."
    )
    yield (
        f"Replacements: {settings['block_steps']} steps each on {settings['rows']} rows of the run's training text, "
        f"against what the run's part gives; scored on up to {settings['score_rows']} held-out rows. Shapes: trained "
        "with the run as their teacher, and measured on all held-out rows."
    )
    for place, reason in record.get("kept_whole", {}).items():
        yield f"{place} kept its shape: {reason}."
