"""Rows of docs/benchmarks.md on exports, pruning, compressions and searches. See `benchmarks.rows.claims`."""

from collections.abc import Iterator
from statistics import mean

from benchmarks.compress.export_default import wanted
from benchmarks.rows.claim_rows import Result, Row, not_run, of, read_all, row
from benchmarks.rows.verdict import seeds

UNITS = {"share": "{:.2f}", "seconds": "{:.0f} s", "percent": "{:+.2f} %", "over": "{:.2f}x", "bytes": "{:.3f}x"}
"""How a value is written, by the first of these words in what it is of; all others are divergences."""
METHODS = {
    "rtn": "rounded to nearest",
    "gptq": "GPTQ",
    "qat": "200 more steps in 4 bits, the run as the teacher",
    "control": "200 more steps without rounding, the run as the teacher (F16)",
}
"""How integers were found."""


def exports() -> Iterator[Row]:
    """What is wanted of exports, and the worst domain of 4 bits by each method."""
    yield from of("export_default_*", _wanted, _four_bits)


def _wanted(result: Result) -> Iterator[Row]:
    for each in wanted(result.results["artefacts"], result.results["baselines"]):
        what, value, text = each["what"], each["value"], _form(each["what"])
        side = next((side for side in ("at least", "at most") if side in each), None)
        target = "-" if side is None else f"{side} {text.format(each[side])}"
        key = "export_" + "".join(letter if letter.isalnum() else "_" for letter in what.lower())
        if value is None:
            yield not_run(key, f"export: {what}", target)
            continue
        bound = {} if side is None else {side.replace(" ", "_"): each[side]}
        said = f"{text.format(value)} ({each['of'].split()[-1]})"
        yield row(result, key, f"export: {what}", target, value, said=said, **bound)


def _form(what: str) -> str:
    words = what.replace(",", " ").split()
    kinds = ("bytes", "share", "seconds", "percent", "over")  # the first of these that is among the words
    return next((UNITS[kind] for kind in kinds if kind in words), "{:.1e}")


def _four_bits(result: Result) -> Iterator[Row]:
    for method, found in result.results["artefacts"].items():
        worst: dict[str, float] = {
            name: max(one["loss_change_percent"].values())
            for name, one in found.items()
            if "q4" in name or "4w" in name or method == "control"
        }
        said = ", ".join(f"{value:+.2f} % ({name})" for name, value in worst.items())
        metric = f"export{'' if method == 'control' else ' in 4 bits'}, {METHODS[method]}: worst domain's loss"
        yield row(result, f"export_4_bits_{method}", metric, "-", 0.0, said=said)


# ---- smaller models ----

WAYS_OF_IMAGES = {
    "fitted": "fitted, not trained",
    "recovered": "recovered",
    "from random weights": "the same shape from random weights, steps of the run and of recovery",
}


def smaller() -> Iterator[Row]:
    if not read_all("prune_importance"):
        yield not_run("prune_importance", "which importance is best after recovery", "-")
    yield from of("prune_importance", _importances)
    yield from of("prune_images", _images)
    yield from of("compress_minutes_*", _minutes)
    yield from of("token_speed_*", _tokens)
    yield from of("search_uniform", _searched)


def _importances(result: Result) -> Iterator[Row]:
    by_seed = list(result.results["seeds"].values())
    for method in (name for name in by_seed[0] if name != "teacher"):
        for key, how in (("cut", "before recovery, no fit"), ("recovered", "fitted and recovered")):
            rises = [100 * found[method][key]["equal_rise"] for found in by_seed]
            metric = f"loss of a small run with FFN -25 % by {method}, {how}, over as many more steps of the run"
            yield Row(f"prune_importance {method} {key}", metric, "-", seeds(rises, None), result)


def _images(result: Result) -> Iterator[Row]:
    cases, size = result.results["cases"], result.results["size"]
    for images in dict.fromkeys(name.partition(" ")[0] for name in cases):
        those = [found for name, found in cases.items() if name.startswith(images)]
        whole, cut = those[0]["parameters"]
        for way, how in WAYS_OF_IMAGES.items():
            points = [100 * found[way]["equal_rise"] for found in those]
            said = f"{mean(points):+.2f} points ({min(points):+.2f} to {max(points):+.2f}, n = {len(points)})"
            metric = f"ResNet on {images}, {size} pixels, with {whole / cut:.1f}x fewer parameters, {how}: images wrong"
            target = "at most 0.8 points" if way == "recovered" else "-"
            yield row(result, f"prune_images {images} {way}", metric, target, mean(points), said=said)


def _minutes(result: Result) -> Iterator[Row]:
    minutes, predicted = result.results["seconds"] / 60, result.results["predicted"]
    targets = ", ".join(one["target"] for one in result.results["artefacts"])
    metric = f"compress of the default run to {targets} within 1 %, with all controls: minutes"
    said = f"{minutes:.0f} min ({predicted['least'] / 60:.0f} to {predicted['most'] / 60:.0f} predicted)"
    yield row(result, f"{result.name}", metric, "at most 60 min", minutes, said=said)


def _tokens(result: Result) -> Iterator[Row]:
    for name, found in result.results["shapes"].items():
        for runtime, kept in found["runtimes"].items():
            fewer = f"FFN and heads -25 % ({found['weights_ratio']:.2f}x fewer weights)"
            metric = f"one cached token of the shape {name} with {fewer}, beside the whole one: {runtime}"
            yield row(result, f"{result.name} {name} {runtime}", metric, "at least 1.2x", kept["ratios"])


_SEARCHED = (
    "layers of their own shape, found by `search`, over the best of uniform decoders of as many FLOPs and tokens"
)


def _searched(result: Result) -> Iterator[Row]:
    by_seed = result.results["seeds"]
    # both of one seed: what seeds differ by is in neither
    rises = [100 * found["beside the best"]["loss"] for found in by_seed.values()]
    metric = f"{_SEARCHED}: held-out loss"
    yield Row("search_uniform loss", metric, "at most +0 %", seeds(rises, None, at_most=0.0), result)
    for what, how, target in (("token", "one cached token", "at most 0.88x"), ("prefill", "prefill of 512", "-")):
        ratios = [found["beside the best"][what]["median"] for found in by_seed.values()]
        yield row(result, f"search_uniform {what}", f"{_SEARCHED}: {how}", target, ratios)
    over = [found["search over training the run"] for found in by_seed.values()]
    metric = "processor time of a search of the layers of `cpu_10m`, over one training of it"
    yield row(result, "search_uniform search", metric, "at most 3x", over)
