"""Rows of docs/benchmarks.md on pruning, distillation and whole compressions. See `benchmarks.rows.claims`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Result, Row, read, read_all
from benchmarks.rows.verdict import NOT_RUN, Verdict, once, seeds

Seeds = Mapping[str, Mapping[str, Any]]
WAYS = {
    "before": "before anything is trained",
    "with teacher": "recovered with the run as its teacher",
    "without teacher": "recovered without it",
    "with whole distributions": "recovered with its whole distributions",
    "with hidden values": "recovered with these and hidden values of its layers",
    "from random weights": "the same shape from random weights, steps of the run and of recovery",
}


WAYS_OF_IMAGES = {
    "fitted": "fitted, not trained",
    "recovered": "recovered",
    "from random weights": "the same shape from random weights, steps of the run and of recovery",
}


def rows() -> Iterator[Row]:
    """All of them; those that were not run say so."""
    yield from _of("prune_refit", "a fit of the layers behind a cut against none", "-", _fits)
    yield from _of("prune_importance", "which importance is best after recovery", "-", _importances)
    yield from _of("prune_recovery", "FFN channels and heads after recovery, a small run", "-", _recovered)
    of_default = read_all("prune_recovery")
    for result in of_default:
        yield from _recovered(result, "the default run", most=1.2)
    if not of_default:
        yield _not_run(
            "prune_recovery_run", "FFN channels and heads -25 % of the default run recovered", "at most 1.2 %"
        )
    yield from _of("kept_tokens", "a teacher's drawn tokens beside whole distributions", "at most 0.1 %", _kept)
    yield from _of("kept_tokens_step", "a step from kept tokens beside a plain one", "at most 1.15x", _kept_step)
    yield from _of("prune_predicted", "predicted loss of sets of cuts", "at least 16 of 20", _predicted)
    yield from _of("prune_images", "ResNets with a quarter of their parameters", "at most 0.8 points", _images)
    paths = read_all("compress_path")
    for result in paths:
        yield from _paths(result)
    if not paths:
        yield _not_run("compress_path", "compress of a run to INT8 and to four bits", "4.5 and 8 times smaller")


def _of(name: str, metric: str, target: str, found: Callable[[Result], Iterator[Row]]) -> Iterator[Row]:
    if (RESULTS / f"{name}.json").is_file():
        yield from found(read(name))
    else:
        yield _not_run(name, metric, target)


def _not_run(name: str, metric: str, target: str) -> Row:
    return Row(name, metric, target, Verdict("-", NOT_RUN), None, "CPU")


def _percent(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def _fits(result: Result) -> Iterator[Row]:
    by_seed: Seeds = result.results["seeds"]
    for cut in ("ffn -25 %, activation", "ffn -50 %, activation", "heads -25 %, activation", "heads -50 %, activation"):
        for key, how in (("cut", "as it is cut"), ("fitted", "layers behind it fitted")):
            rises = _percent([found[cut][key] for found in by_seed.values()])
            metric = f"loss of a small decoder with {cut.partition(',')[0]}, {how}, before anything is trained"
            yield Row(f"prune_refit {cut} {key}", metric, "-", seeds(rises, None), result)


def _importances(result: Result) -> Iterator[Row]:
    by_seed: Seeds = result.results["seeds"]
    for method in (name for name in next(iter(by_seed.values())) if name != "teacher"):
        for key, how in (("cut", "before recovery, no fit"), ("recovered", "fitted and recovered")):
            rises = _percent([found[method][key]["equal_rise"] for found in by_seed.values()])
            metric = f"loss of a small run with FFN -25 % by {method}, {how}, over as many more steps of the run"
            yield Row(f"prune_importance {method} {key}", metric, "-", seeds(rises, None), result)


def _recovered(result: Result, run: str = "a small run", most: float | None = None) -> Iterator[Row]:
    """`most`: percent for a quarter. A small run has no target: it has learned less than its half from random weights
    does, so a cut of it is cheap."""
    by_seed: Seeds = result.results["seeds"]
    losses = [found["teacher"]["loss"] for found in by_seed.values()]
    noise = 100 * stdev(losses) / mean(losses) if len(losses) > 1 else None
    for cut in (name for name in next(iter(by_seed.values())) if name != "teacher"):
        for way, how in WAYS.items():
            if not all(way in found.get(cut, ()) for found in by_seed.values()):
                continue
            bound = most if way == "with teacher" and "-25" in cut else None
            rises = _percent([found[cut][way]["equal_rise"] for found in by_seed.values()])
            metric = f"loss of {run} with {cut}, {how}, over as many more steps of it"
            target = "-" if bound is None else f"at most {bound:g} %"
            yield Row(f"{result.name} {cut} {way}", metric, target, seeds(rises, noise, at_most=bound), result)


def _kept(result: Result) -> Iterator[Row]:
    by_seed: Seeds = result.results["seeds"]
    shares = _percent([found["gradients"]["32"]["bias of likeliest"] for found in by_seed.values()])
    metric = "gradient of logits from the teacher's 32 likeliest tokens: bias, over its length (drawn tokens: none)"
    yield Row("kept_tokens bias", metric, "-", seeds(shares, None), result)
    rises = _percent([found["recovered"]["rise"] for found in by_seed.values()])
    metric = "loss of ffn and heads -50 % recovered from 32 drawn tokens of the teacher, over all its tokens"
    yield Row("kept_tokens live", metric, "at most 0.1 %", seeds(rises, None, at_most=0.1), result)


def _kept_step(result: Result) -> Iterator[Row]:
    ratios = result.results["ratios"]
    for key, how, most in (("kept", "32 kept tokens of a teacher", 1.15), ("live", "a live teacher of its size", None)):
        middle = median(ratios[key])
        text = f"{middle:.2f}x ({min(ratios[key]):.2f}x to {max(ratios[key]):.2f}x, n = {len(ratios[key])})"
        target = "-" if most is None else f"at most {most:g}x"
        metric = (
            f"processor time of a forward and backward pass of the default run that learns from {how}, over a plain one"
        )
        yield Row(f"kept_tokens_step {key}", metric, target, once(middle, text, at_most=most), result)


def _predicted(result: Result) -> Iterator[Row]:
    for seed, found in result.results["seeds"].items():
        inside, plans = found["inside"], len(found["plans"])
        metric = f"sets of cuts whose loss before recovery was predicted within twice the stated error, seed {seed}"
        verdict = once(inside / plans, f"{inside} of {plans}", at_least=16 / 20)
        yield Row(f"prune_predicted {seed}", metric, "at least 16 of 20", verdict, result)


def _images(result: Result) -> Iterator[Row]:
    cases, size = result.results["cases"], result.results["size"]
    for images in dict.fromkeys(name.partition(" ")[0] for name in cases):
        of = [found for name, found in cases.items() if name.startswith(images)]
        whole, cut = of[0]["parameters"]
        for way, how in WAYS_OF_IMAGES.items():
            points = _percent([found[way]["equal_rise"] for found in of])
            text = f"{mean(points):+.2f} points ({min(points):+.2f} to {max(points):+.2f}, n = {len(points)})"
            most = 0.8 if way == "recovered" else None
            metric = f"ResNet on {images}, {size} pixels, with {whole / cut:.1f}x fewer parameters, {how}: images wrong"
            target = "-" if most is None else "at most 0.8 points"
            yield Row(f"prune_images {images} {way}", metric, target, once(mean(points), text, at_most=most), result)


def _paths(result: Result) -> Iterator[Row]:
    limits = {"onnx-int8": (4.5, 0.8), "gguf-q4_0": (8.0, 2.0)}
    for target, (least, most) in limits.items():
        found = result.results[target]
        inside = [row for row in found["artefacts"] if row.get("inside")]
        alone = result.results["uncut"][target]["smaller"]
        best = max(inside, key=lambda row: row["smaller"], default=None)
        metric = f"compress of the default run to {target} within {most:g} %: bytes, times smaller than FP32"
        text = f"budget not reached: {found['missed']}" if best is None else _path(best, alone)
        verdict = once(0.0 if best is None else best["smaller"], text, at_least=least)
        yield Row(f"{result.name}_{target}", metric, f"at least {least:g}x", verdict, result)
        if best is not None and best.get("cached_token_s"):
            faster = result.results["uncut"][target]["cached_token_s"] / best["cached_token_s"]
            cut = ", ".join(f"{kind} {b} -> {a}" for kind, (b, a) in found["best"]["units"].items())
            metric = f"one cached token of that, beside the run itself in the same runtime and format ({cut})"
            yield Row(f"{result.name}_{target} token", metric, "-", once(faster, f"{faster:.2f}x"), result)


def _path(row: Mapping[str, Any], alone: float) -> str:
    rise = max(row["rise"], row["equal_rise"])
    return f"{row['smaller']:.1f}x at {100 * rise:+.2f} % ({alone:.1f}x without a cut)"
