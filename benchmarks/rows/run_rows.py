"""Rows of docs/benchmarks.md on runs: the default job, generation, fuzzing, plans. See `benchmarks.rows.claims`."""

from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks.rows.claim_rows import Claim, Result, Row, bound_of, not_run, of, row
from benchmarks.rows.verdict import UNDECIDED, Verdict, errors, interval_of_mean, status_at_most


def default_job() -> Iterator[Row]:
    yield from of("first_run_*", _first_run)
    yield from of("default_job_[!s]*", _default_job)
    metric = "a step with Muon against one with AdamW, default model"
    yield from of("muon_step_*", Claim("{result}", metric, "at most 1.15x", "muon_over_adamw"))


def _first_run(result: Result) -> Iterator[Row]:
    found, avx2 = result.results, result.name.endswith("avx2")
    with_what = ", with AVX2's instructions alone" if avx2 else ""
    metric, target = "bits per byte of held-out text after `tilewright train` in an empty folder", ("1.9", "2.3")[avx2]
    yield row(result, f"{result.name}_bits", metric + with_what, f"at most {target}", found["bits_per_byte"], "{:.2f}")
    minutes, said = found["training_s"] / 60, f"{found['training_s'] // 60:.0f}m{found['training_s'] % 60:02.0f}s"
    said += f", {found['steps']:,} steps; the command took {found['whole_s'] / 60:.1f} minutes"
    yield row(
        result, f"{result.name}_minutes", f"minutes of that training{with_what}", "at most 5.5", minutes, said=said
    )


def _default_job(result: Result) -> Iterator[Row]:
    found = result.results
    metric = "bits per byte of held-out text after the default job, mean over runs of other seeds or texts"
    bits = found["default"]["samples"]
    yield from _of_seeds(result, f"{result.name}_bits", metric, "at most 2.0 (aim 1.85)", bits)
    metric = "bits per byte by which Muon is ahead of AdamW, tuned, at equal seconds"
    gaps = found.get("adamw", {}).get("above_default", [])
    yield from _of_seeds(result, f"{result.name}_muon", metric, "ahead", gaps, at_least=0.0)


def _of_seeds(
    result: Result, key: str, metric: str, target: str, samples: Sequence[float], **bound: float
) -> Iterator[Row]:
    """The mean over runs (a seed on a text each) against a bound; what scatters is the mean. One run says nothing."""
    if len(samples) < 2:
        return
    low, high = interval_of_mean(samples)
    said = f"{mean(samples):.3f} ({min(samples):.3f} to {max(samples):.3f}, {len(samples)} runs)"
    ((side, limit),) = (bound or bound_of(target)).items()
    status = status_at_most(low, high, limit) if side == "at_most" else status_at_most(-high, -low, -limit)
    why = f"95 % interval {low:.3f} to {high:.3f}" if status == UNDECIDED else ""
    yield Row(key, metric, target, Verdict(said, status, why), result)


def generation() -> Iterator[Row]:
    metric = "512 tokens with the key/value cache against without, default model"
    yield from of("generate_*", Claim("{result}", metric, "at least 10x", "speedup"))


def reliability() -> Iterator[Row]:
    for name, what in (("fuzz_data", "data files"), ("fuzz_config", "configurations")):
        yield from of(name, lambda result, name=name, what=what: _fuzzed(result, name, what))


def _fuzzed(result: Result, name: str, what: str) -> Iterator[Row]:
    failed, cases = result.results["failed"], result.results["cases"]
    metric, said = f"{what} with a traceback, a hang or an uncounted part", f"{failed} of {cases:,} generated {what}"
    yield row(result, name, metric, "none", failed, said=said, at_most=0)


def plans() -> Iterator[Row]:
    yield from of("plan_measured_*", _measured)
    metric = "seconds per step, planned against measured: FP8, FP32, low-bit moments, smaller micro-batches"
    yield not_run("plan 0", metric, "within 15 %")


def _measured(result: Result) -> Iterator[Row]:
    cases = result.results["cases"].values()
    rated = all("step_s_planned" in case for case in cases)
    rates = "machine rates of the same minutes" if rated else "machine rates from before the run"
    texts = {
        "error_before": ("peak memory, planned against measured, before the first step", 10),
        "error_after": ("peak memory, planned against measured, after the first step", 5),
        "step_error": (f"seconds per step, planned against measured, {rates}", 15),
    }
    for key, (text, most) in texts.items():
        found = [case[key] for case in cases if key in case]
        yield Row(f"{result.name}_{key}", text, f"within {most} %", errors(found, most), result)
