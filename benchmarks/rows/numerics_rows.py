"""Rows of docs/benchmarks.md on losses and the precision controller. See `benchmarks.rows.claims`."""

from collections.abc import Iterator, Sequence
from statistics import mean, stdev

from benchmarks.rows.claim_rows import Result, Row, of, row
from benchmarks.rows.verdict import seeds

MODES = (
    ("fp32", "FP32 against BF16", 0.5),
    ("fp8_tile", "`fp8_tile` against BF16", 0.25),
    ("fp8_hybrid", "`fp8_hybrid` (gradients in E5M2) against BF16", None),
    ("fp8_tensorwise", "`fp8_tensorwise` (one scale per tensor) against BF16", None),
    ("8bit_split24", "8-bit moments and 24-bit weights against FP32 ones", 0.5),
    ("8bit_stochastic", "8-bit moments and BF16 weights against FP32 ones", 0.5),
)


def rows() -> Iterator[Row]:
    """All of them."""
    yield from of("quality", _quality)
    yield from of("dpaa", _controller)
    yield from of("search_predictions", _predictions)


def _noise(losses: Sequence[float]) -> float:
    """Standard deviation over seeds, in percent."""
    return 100 * stdev(losses) / mean(losses)


def _quality(result: Result) -> Iterator[Row]:
    noise = result.results["seed_noise_percent"]
    for mode, text, most in MODES:
        gaps = list(result.results[mode]["gap_percent"].values())
        target = f"at most +{most:g} %" if most else "-"
        metric = f"held-out loss after {result.results['steps']:,} steps: {text}"
        yield Row(f"quality_{mode}", metric, target, seeds(gaps, noise, at_most=most), result)


def _controller(result: Result) -> Iterator[Row]:
    stress, calm = result.results["stress"], result.results["calm"]
    noise = _noise([run["loss"] for run in stress["bf16_mixed"]["runs"].values()])
    outliers = "held-out loss against BF16 where outliers make static FP8 fail"
    gaps = {mode: list(stress[mode]["gap_percent"].values()) for mode in ("fp8_tile", "controller")}
    yield Row("dpaa_without", f"{outliers}: without the controller", "-", seeds(gaps["fp8_tile"], noise), result)
    verdict = seeds(gaps["controller"], noise, at_most=0.5)
    yield Row("dpaa", f"{outliers}: with the precision controller", "at most +0.5 %", verdict, result)
    shares = [100 * run["share_8bit"] for run in calm["controller"]["runs"].values()]
    said = f"{min(shares):.1f} % (lowest of {len(shares)} seeds)"
    metric = "share of GEMM work that the controller keeps in FP8 on a healthy run"
    yield row(result, "calm", metric, "at least 95 %", min(shares), said=said)


def _predictions(result: Result) -> Iterator[Row]:
    for seed, found in result.results["seeds"].items():
        for cost, text in (("token", "a cached token"), ("prefill", "a prefill")):
            error = 100 * found["table"]["largest error"][cost]
            metric = (
                f"latency of {text} by the table of `tilewright search`, largest error of 20 random shapes, seed {seed}"
            )
            yield row(result, f"search_table_{cost}_{seed}", metric, "at most 10 %", error, "{:.1f} %")
        ranks = found["ranks"]
        metric = f"rank correlation of 12 shapes' predicted with their trained loss, seed {seed}"
        chance = f"chance {ranks['random'][1]:.2f} at most in 95 %"
        said = f"{ranks['predicted']:.2f} (FLOPs alone {ranks['flops']:.2f}, {chance})"
        yield row(result, f"search_ranks_{seed}", metric, "at least 0.6", ranks["predicted"], said=said)
