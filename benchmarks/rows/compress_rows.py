"""Rows of docs/benchmarks.md on exports, pruning, distillation and whole compressions. See `benchmarks.rows.claims`."""

from collections.abc import Iterator, Mapping
from statistics import mean, median, stdev
from typing import Any

from benchmarks.compress.export_default import wanted
from benchmarks.rows.claim_rows import Result, Row, not_run, of, row
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


def smaller() -> Iterator[Row]:
    yield from of("prune_refit", _fits)
    importance = ("prune_importance", "which importance is best after recovery", "-")
    yield from of("prune_importance", _importances, absent=[importance])
    yield from of("prune_recovery", _recovered)
    yield from of("prune_recovery_*", lambda result: _recovered(result, "the default run", most=1.2))
    yield from of("kept_tokens", _kept)
    yield from of("kept_tokens_step", _kept_step)
    yield from of("prune_predicted", _predicted)
    yield from of("prune_images", _images)
    yield from of("compress_path_*", _paths)
    yield from of("compress_minutes_*", _minutes)
    times = "sets of cuts whose predicted time is within 15 % of the measured one"
    yield from of("plan_latency", _predicted_times, absent=[("plan_latency", times, "at least 20 of 20")])
    token = "one cached token of a model with FFN and heads -25 %, beside the whole one in the same runtime and format"
    yield from of("token_speed_*", _tokens, absent=[("token_speed", token, "at least 1.2x")])
    layers = ("search_uniform", f"{_SEARCHED}: one cached token", "at most 0.88x")
    yield from of("search_uniform", _searched, absent=[layers])


def _over_seeds(result: Result, *keys: str) -> list[float]:
    """A share of each seed, in percent."""
    values: list[Any] = list(result.results["seeds"].values())
    for key in keys:
        values = [value[key] for value in values]
    return [100 * value for value in values]


def _fits(result: Result) -> Iterator[Row]:
    for cut in ("ffn -25 %", "ffn -50 %", "heads -25 %", "heads -50 %"):
        for key, how in (("cut", "as it is cut"), ("fitted", "layers behind it fitted")):
            rises = _over_seeds(result, f"{cut}, activation", key)
            metric = f"loss of a small decoder with {cut}, {how}, before anything is trained"
            yield Row(f"prune_refit {cut}, activation {key}", metric, "-", seeds(rises, None), result)


def _importances(result: Result) -> Iterator[Row]:
    for method in (name for name in next(iter(result.results["seeds"].values())) if name != "teacher"):
        for key, how in (("cut", "before recovery, no fit"), ("recovered", "fitted and recovered")):
            rises = _over_seeds(result, method, key, "equal_rise")
            metric = f"loss of a small run with FFN -25 % by {method}, {how}, over as many more steps of the run"
            yield Row(f"prune_importance {method} {key}", metric, "-", seeds(rises, None), result)


def _recovered(result: Result, run: str = "a small run", most: float | None = None) -> Iterator[Row]:
    """`most`: percent for a quarter. A small run has no target: it has learned less than its half from random weights
    does, so a cut of it is cheap."""
    by_seed = result.results["seeds"]
    losses = [found["teacher"]["loss"] for found in by_seed.values()]
    noise = 100 * stdev(losses) / mean(losses) if len(losses) > 1 else None
    for cut in (name for name in next(iter(by_seed.values())) if name != "teacher"):
        for way, how in WAYS.items():
            if all(way in found.get(cut, ()) for found in by_seed.values()):
                bound = most if way == "with teacher" and "-25" in cut else None
                metric = f"loss of {run} with {cut}, {how}, over as many more steps of it"
                target, rises = "-", _over_seeds(result, cut, way, "equal_rise")
                if bound is not None:  # more steps may have made the run worse, and then they are an easy control
                    metric += ", or over it as it is: the larger"
                    target = f"at most {bound:g} %"
                    rises = [max(pair) for pair in zip(rises, _over_seeds(result, cut, way, "rise"), strict=True)]
                verdict = seeds(rises, noise, at_most=bound)
                yield Row(f"{result.name} {cut} {way}", metric, target, verdict, result)


def _kept(result: Result) -> Iterator[Row]:
    shares = _over_seeds(result, "gradients", "32", "bias of likeliest")
    metric = "gradient of logits from the teacher's 32 likeliest tokens: bias, over its length (drawn tokens: none)"
    yield Row("kept_tokens bias", metric, "-", seeds(shares, None), result)
    rises = _over_seeds(result, "recovered", "rise")
    metric = "loss of ffn and heads -50 % recovered from 32 drawn tokens of the teacher, over all its tokens"
    yield Row("kept_tokens live", metric, "at most 0.1 %", seeds(rises, None, at_most=0.1), result)


def _kept_step(result: Result) -> Iterator[Row]:
    for key, how, target in (
        ("kept", "32 kept tokens of a teacher", "at most 1.15x"), ("live", "a live teacher of its size", "-"),
    ):  # fmt: skip
        ratios = result.results["ratios"][key]
        said = f"{median(ratios):.2f}x ({min(ratios):.2f}x to {max(ratios):.2f}x, n = {len(ratios)})"
        metric = (
            f"processor time of a forward and backward pass of the default run that learns from {how}, over a plain one"
        )
        yield row(result, f"kept_tokens_step {key}", metric, target, median(ratios), said=said)


def _predicted(result: Result) -> Iterator[Row]:
    for seed, found in result.results["seeds"].items():
        inside, plans = found["inside"], len(found["plans"])
        metric = f"sets of cuts whose loss before recovery was predicted within twice the stated error, seed {seed}"
        said = f"{inside} of {plans}"
        yield row(result, f"prune_predicted {seed}", metric, "at least 16 of 20", 20 * inside / plans, said=said)


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


def _paths(result: Result) -> Iterator[Row]:
    limits = {"onnx-int8": (4.5, 0.8), "gguf-q4_0": (8.0, 2.0)}
    for target, (least, most) in limits.items():
        found, uncut = result.results[target], result.results["uncut"][target]
        inside = [one for one in found["artefacts"] if one.get("inside")]
        best = max(inside, key=lambda one: one["smaller"], default=None)
        said = f"budget not reached: {found['missed']}" if best is None else _path(best, uncut["smaller"])
        metric = f"compress of the default run to {target} within {most:g} %: bytes, times smaller than FP32"
        smaller = 0.0 if best is None else best["smaller"]
        yield row(result, f"{result.name}_{target}", metric, f"at least {least:g}x", smaller, said=said)
        if best is not None and best.get("cached_token_s"):
            cut = ", ".join(f"{kind} {b} -> {a}" for kind, (b, a) in found["best"]["units"].items())
            metric = f"one cached token of that, beside the run itself in the same runtime and format ({cut})"
            faster = uncut["cached_token_s"] / best["cached_token_s"]
            yield row(result, f"{result.name}_{target} token", metric, "-", faster)


def _minutes(result: Result) -> Iterator[Row]:
    minutes, predicted = result.results["seconds"] / 60, result.results["predicted"]
    targets = ", ".join(one["target"] for one in result.results["artefacts"])
    metric = f"compress of the default run to {targets} within 1 %, with all controls: minutes"
    said = f"{minutes:.0f} min ({predicted['least'] / 60:.0f} to {predicted['most'] / 60:.0f} predicted)"
    yield row(result, f"{result.name}", metric, "at most 60 min", minutes, said=said)


def _predicted_times(result: Result) -> Iterator[Row]:
    for name, found in result.results["shapes"].items():
        inside, plans = found["inside"], len(found["plans"])
        metric = f"sets of cuts of the shape {name} whose predicted time is within 15 % of the measured one"
        said = f"{inside} of {plans}, at most {100 * found['worst']:.0f} % away"
        yield row(result, f"plan_latency {name}", metric, "at least 20 of 20", 20 * inside / plans, said=said)


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
    rises = _over_seeds(result, "beside the best", "loss")  # both of one seed: what seeds differ by is in neither
    metric = f"{_SEARCHED}: held-out loss"
    yield Row("search_uniform loss", metric, "at most +0 %", seeds(rises, None, at_most=0.0), result)
    for what, how, target in (("token", "one cached token", "at most 0.88x"), ("prefill", "prefill of 512", "-")):
        ratios = [found["beside the best"][what]["median"] for found in by_seed.values()]
        yield row(result, f"search_uniform {what}", f"{_SEARCHED}: {how}", target, ratios)
    over = [found["found"]["search_s"] / found["found"]["training_s"] for found in by_seed.values()]
    metric = "processor time of a search of the layers of `cpu_10m`, over one training of the shape that it found"
    yield row(result, "search_uniform search", metric, "at most 3x", over)


def _path(found: Mapping[str, Any], alone: float) -> str:
    rise = max(found["rise"], found["equal_rise"])
    return f"{found['smaller']:.1f}x at {100 * rise:+.2f} % ({alone:.1f}x without a cut)"
