"""A compression as one HTML page: the verdict, what each stage made of the loss, controls, domains, a map of layers,
artefacts. Made from compress.json; opens offline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.compress.budget.budget_rise import NEAR, error_in_words, near_in_time, ruling
from tilewright.compress.budget.stage_seconds import PROOF_S
from tilewright.core.units import format_bytes, format_change, format_seconds
from tilewright.report.template import fill

_CONTROLS = {
    "teacher": "the run itself, as many more steps",
    "alone": "the same cut, recovered without the teacher",
    "scratch": "the small shape from random weights, steps of the run and of recovery",
}


@dataclass(frozen=True)
class CompressTable:
    """A table of a compression's page."""

    title: str
    lead: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def verdict_of(record: Mapping[str, Any]) -> str:
    """The verdict on the page of a compression in a sentence; of one that was stopped, that.

    Example:
        >>> verdict_of({"run": "base", "settings": {"budget": 0.01}})
        'base: stopped before a verdict'
    """
    run, budget = record["run"], record["settings"]["budget"]
    if "verdict" not in record:
        return f"{run}: stopped before a verdict"
    best = record["recovered"][record["chosen"]]
    inside = [row for row in record.get("artefacts", ()) if row["inside"]]
    share = f"{best['parameters'] / record['parameters']:.2f}x the parameters"
    small = f"{share} at {_both(best)}"
    if record["verdict"] != "inside budget":
        return f"{run}: the budget of {100 * budget:g} % was not reached; the best is {best['name']}, {small}"
    smallest = min(inside, key=lambda row: row["bytes"])
    ratio = record["fp32_bytes"]["whole"] / smallest["bytes"]
    artefact = f"{smallest['target']} {ratio:.1f}x smaller than FP32 at {_both(smallest)}"
    return f"{run}: {best['name']}, {small}; {artefact}"


def _both(row: Mapping[str, Any]) -> str:
    """Both rises on the page of a compression: over the run, and over the run with as many more steps if that control
    was run."""
    equal = row.get("equal_rise")
    more = "" if equal is None else f" ({format_change(equal)} over the run with as many more steps)"
    return format_change(row["rise"]) + more


def _equal(row: Mapping[str, Any]) -> str:
    equal = row.get("equal_rise")
    return "" if equal is None else format_change(equal)


def render_compression(record: Mapping[str, Any]) -> str:
    """The page of a compression as HTML text.

    Args:
        record: compress.json, with at least one cut that was recovered.
    """
    tables = [_stages(record), _domains(record), _sensitivity(record), _times(record), _layers(record)]
    if record.get("artefacts"):
        tables.insert(1, _artefacts(record))
    if "predicted" in record.get("time", ()):
        tables.append(_hours(record))
    settings = record["settings"]
    asked = f"{record['run']}, {record['checkpoint']}; budget {100 * settings['budget']:g} %, {settings['importance']}"
    return fill(
        "compress.html", setting=asked, verdict=verdict_of(record), tables=tables, cards=(), notes=_notes(record)
    )


def _stages(record: Mapping[str, Any]) -> CompressTable:
    rows = []
    for plan in record.get("plans", ()):
        predicted = f"{format_change(plan['rise_before'])}", error_in_words(plan["error"])
        if plan["name"] in record["recovered"]:
            rows.append((f"{plan['name']}, as it was predicted before recovery", *predicted, "", "", ""))
    for row in record["recovered"].values():
        rows.append(
            (f"{row['name']}, before recovery", format_change(row["rise_before"]), "", "", "", _size(row, record))
        )
        rows.append((f"{row['name']}, recovered", *_measured(row), _size(row, record)))
    for name, row in record.get("trained", {}).items():
        rows.append((f"{name}, recovered and trained for integers", *_measured(row), ""))
    for name, row in record.get("controls", {}).items():
        rows.append((f"control: {_CONTROLS[name.partition('-')[0]]}", *_measured(row), ""))
    rise = (
        "Percentage points of images that are wrong" if record.get("points") else "Relative rise of the held-out loss"
    )
    lead = (
        f"{rise}, in FP32, on the same rows, with its standard error: over the run, and "
        "over the run with as many more steps. The larger of both is compared with the budget."
    )
    columns = ("stage", "over the run", "error", "over the run with as many more steps", "error", "parameters")
    title = "What each stage made of the images" if record.get("points") else "What each stage made of the loss"
    return CompressTable(title, lead, columns, rows)


def _measured(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Both measured rises on the page of a compression, each with its error."""
    equal_error = "" if row.get("equal_rise") is None else error_in_words(row["equal_error"])
    return format_change(row["rise"]), error_in_words(row["error"]), _equal(row), equal_error


def _artefacts(record: Mapping[str, Any]) -> CompressTable:
    whole = record["fp32_bytes"]["whole"]
    rows = []
    for row in record["artefacts"]:
        size = row.get("bytes")
        rise = "" if row["rise"] is None else format_change(row["rise"])
        small = (format_bytes(size), f"{whole / size:.1f}x") if size else ("", "")
        verdict = "inside" if row["inside"] else row["reason"]
        name = f"{row['target']}, trained in {row['integers']}" if row.get("integers") else row["target"]
        rows.append((name, row["state"], rise, _equal(row), *small, _token(row), verdict))
    for row in record.get("baselines", ()):
        rows.append((f"{row['name']}, of the cut model", row.get("state", ""), "", "", "", "", _token(row), ""))
    columns = ("artefact", "state", "over the run", "over the run with as many more steps", "bytes")
    columns += ("smaller than the run in FP32", "an image" if record.get("points") else "cached token", "budget")
    return CompressTable(
        "Artefacts, each run in its runtime", "Rises: of recovery and rounding together.", columns, rows
    )


def _domains(record: Mapping[str, Any]) -> CompressTable:
    before, best = record["domains"], record["recovered"][_best(record)]
    kept = [("recovered", best), *((name, row) for name, row in record.get("controls", {}).items())]
    rise = (lambda after, loss: after - loss) if record.get("points") else (lambda after, loss: after / loss - 1)
    rows = [
        (domain, f"{loss:.4f}", *(format_change(rise(row["domains"][domain], loss)) for _, row in kept))
        for domain, loss in before.items()
    ]
    return CompressTable(
        "Share that is wrong" if record.get("points") else "Loss by domain",
        "",
        ("domain", "run", *(name for name, _ in kept)),
        rows,
    )


def _sensitivity(record: Mapping[str, Any]) -> CompressTable:
    rows = [
        (
            f"{row['kind']} -> {row['units']}",
            format_change(row["rise"]),
            error_in_words(row["error"]),
            f"{row['saved']:,}",
            f"{row['speed']:.2f}x",
        )
        for row in record["sensitivity"]
    ]
    what = "two images" if record.get("points") else "32 tokens"
    lead = f"Each kind of unit alone, before recovery. Time: a forward pass of {what} here, beside the whole model's."
    return CompressTable("What each cut costs", lead, ("cut", "loss", "error", "parameters less", "time"), rows)


def _times(record: Mapping[str, Any]) -> CompressTable:
    """Times on the page of a compression, of cuts that were made: the time that was predicted from each kind alone
    beside the measured one."""
    rows = []
    for row in record["recovered"].values():
        predicted, measured = row["predicted_speed"], row["speed"]
        verdict = "inside" if near_in_time(predicted, measured) else "outside"
        shares = f"{predicted:.2f}x", f"{measured:.2f}x", f"{100 * (predicted / measured - 1):+.0f} %"
        seconds = (f"{1000 * row['seconds'][name]:.2f} ms" for name in ("predicted", "measured"))
        rows.append((row["name"], *shares, verdict, *seconds))
    what = "two images" if record.get("points") else "32 tokens"
    lead = (
        f"A forward pass of {what} here, in FP32: predicted from what each kind saves alone, and measured in turn with "
        f"the whole model. Inside: at most {100 * NEAR:.0f} % away."
    )
    columns = ("cut", "predicted", "measured", "away", f"within {100 * NEAR:.0f} %", "predicted", "measured")
    return CompressTable("Time, predicted and measured", lead, columns, rows)


def _hours(record: Mapping[str, Any]) -> CompressTable:
    """Hours on the page of a compression, of stages that ran: predicted and measured seconds."""
    times = record["time"]
    predicted, measured = times["predicted"]["stages"], times.get("measured", {})
    rows = [
        (name, format_seconds(predicted[name]) if name in predicted else "", format_seconds(seconds))
        for name, seconds in measured.items()
    ]
    of_both = [name for name in measured if name in predicted]
    before, after = (format_seconds(sum(those[name] for name in of_both)) for those in (predicted, measured))
    rows.append(("all that were predicted", before, after))
    lead = (
        f"Predicted before anything is trained, from {format_seconds(times['step']['seconds'])} a step "
        f"({times['step']['how']}), the time of a cut's forward pass, and {PROOF_S:g} s an artefact. Stages that were "
        "stopped and continued count all their time."
    )
    return CompressTable("Time of the stages", lead, ("stage", "predicted", "measured"), rows)


def _layers(record: Mapping[str, Any]) -> CompressTable:
    best = record["recovered"][_best(record)]
    rows = []
    for kind, places in best["kept"].items():
        before, after = best["units"][kind]
        for place, units in places.items():
            rows.append((kind, place.strip("[]") or "model", f"{after} of {before}", _runs(units)))
    lead = "Units that stay, by their numbers in the run."
    return CompressTable("Map of layers", lead, ("kind", "layer", "stay", "which"), rows)


def _best(record: Mapping[str, Any]) -> str:
    return record.get("chosen") or min(record["recovered"].values(), key=ruling)["name"]


def _runs(units: Sequence[int]) -> str:
    """Shorten lists of numbers on the page of a compression to ranges.

    Example:
        >>> _runs([0, 1, 2, 5, 7, 8])
        '0-2, 5, 7-8'
    """
    found: list[list[int]] = []
    for unit in units:
        if found and unit == found[-1][1] + 1:
            found[-1][1] = unit
        else:
            found.append([unit, unit])
    texts = [f"{first}-{last}" if last > first else f"{first}" for first, last in found]
    return ", ".join(texts[:12]) + (f" and {len(texts) - 12} more" if len(texts) > 12 else "")


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    settings, points = record["settings"], record.get("points")
    teacher = "there is no teacher of images" if points else "the run is the teacher"
    yield f"Recovery and controls: {settings['steps']} steps each, on the run's own data; {teacher}."
    if points:
        yield "Images that are wrong: of the run's held-out ones, in FP32; artefacts answer for them in their runtimes."
    else:
        yield "Loss: of the run's held-out rows, in FP32; artefacts answer for a sample of them in their runtimes."
    for name, reason in record.get("left_out", {}).items():
        yield f"Left out: {name}, whose numbers are not finite: {reason}."
    if settings["controls"] == "none":
        yield "The run was not trained further: it is not known what as many more steps would have brought it."
    elif settings["controls"] == "equal":
        alone = "" if points else "recovery without the teacher, and "
        yield f"Not run: {alone}the small shape from random weights."


def _size(row: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return f"{row['parameters']:,} ({row['parameters'] / record['parameters']:.2f}x)"


def _token(row: Mapping[str, Any]) -> str:
    seconds = row.get("cached_token_s") or (row.get("image_s") or {}).get("1")
    return f"{1000 * seconds:.2f} ms" if isinstance(seconds, (int, float)) else ""
