"""Rows of docs/benchmarks.md on a user's first hour: the default job, Muon, kills, `watch`. See `claims`."""

from collections.abc import Iterator, Sequence
from statistics import mean

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Row, read, read_all
from benchmarks.rows.verdict import UNDECIDED, Verdict, interval_of_mean, once, status_at_most, turns


def _bits(number: float) -> str:
    return f"{number:.3f}"


def default_job() -> Iterator[Row]:
    for result in (found for found in read_all("default_job") if not found.name.startswith("default_job_steps")):
        found = result.results
        ours = found["default"]
        if len(ours["samples"]) > 1:
            yield Row(
                f"{result.name}_bits",
                "bits per byte of held-out text after the default job, mean over runs of other seeds or texts",
                "at most 2.0 (aim 1.85)",
                _of_seeds(ours["samples"], at_most=2.0),
                result,
            )
        gaps = found.get("adamw", {}).get("above_default", [])
        if len(gaps) > 1:
            yield Row(
                f"{result.name}_muon",
                "bits per byte by which Muon is ahead of AdamW, tuned, at equal seconds",
                "ahead",
                _of_seeds(gaps, at_least=0.0),
                result,
            )
    for result in (found for found in read_all("default_peer") if not found.name.startswith("default_peer_steps")):
        gaps = result.results["ahead"]["samples"]
        if len(gaps) > 1:
            yield Row(
                result.name,
                "bits per byte by which the default job is ahead of Hugging Face `Trainer` with its "
                "AdamW tuned, at equal seconds",
                "at least 0.15",
                _of_seeds(gaps, at_least=0.15),
                result,
            )


def _of_seeds(samples: Sequence[float], *, at_most: float | None = None, at_least: float | None = None) -> Verdict:
    """The mean over runs (a seed on a text each) against a bound; what scatters is the mean."""
    low, high = interval_of_mean(samples)
    said = f"{_bits(mean(samples))} ({_bits(min(samples))} to {_bits(max(samples))}, {len(samples)} runs)"
    status = (
        status_at_most(low, high, at_most) if at_most is not None else status_at_most(-high, -low, -(at_least or 0.0))
    )
    return Verdict(said, status, f"95 % interval {_bits(low)} to {_bits(high)}" if status == UNDECIDED else "")


def muon() -> Iterator[Row]:
    for result in read_all("muon_step"):
        verdict = turns(result.results["muon_over_adamw"]["samples"], lambda number: f"{number:.2f}x", at_most=1.15)
        yield Row(
            result.name, "a step with Muon against one with AdamW, default model", "at most 1.15x", verdict, result
        )


def kills() -> Iterator[Row]:
    if not (RESULTS / "kills.json").exists():
        return
    result = read("kills")
    found = result.results
    text = f"{found['runs_with_equal_bits']} of {found['runs']} runs, {found['kills']} kills"
    verdict = once(found["runs_with_equal_bits"], text, at_least=found["runs"])
    yield Row(
        "kills", "runs killed at random moments whose bits are those of an undisturbed one", "all", verdict, result
    )
    most = found["interval_s"] + max(found["write_s"]["samples"]) + found["slowest_step_s"]
    verdict = once(found["lost_most_s"], f"{found['lost_most_s']:.2f} s at most", at_most=most)
    yield Row(
        "kills_lost",
        "work lost per kill, with a checkpoint each half second",
        f"at most {most:.2f} s: the interval, a write and a step",
        verdict,
        result,
    )


def watch() -> Iterator[Row]:
    if not (RESULTS / "watch.json").exists():
        return
    result = read("watch")
    found = result.results
    view = turns(found["first_view_s"]["samples"], lambda number: f"{number:.2f} s", at_most=1.0)
    yield Row("watch_view", "`watch` of 4 runs of 10,000 steps: first view", "at most 1 s", view, result)
    if "browser_first_view_s" in found:
        view = turns(found["browser_first_view_s"]["samples"], lambda number: f"{number:.2f} s", at_most=1.0)
        yield Row(
            "watch_browser", "the same, until a headless browser has drawn the curves", "at most 1 s", view, result
        )
    size = max(found["resident_bytes"]["median"], found["resident_bytes_after"])
    yield Row(
        "watch_memory",
        "the same: resident memory",
        "at most 100 MB",
        once(size, f"{size / 1e6:.0f} MB", at_most=1e8),
        result,
    )
    idle = found["idle_percent_with_a_page"]
    yield Row(
        "watch_idle",
        "the same: share of a core while nothing happens, with a page open",
        "at most 1 %",
        once(idle, f"{idle:.2f} %", at_most=1.0),
        result,
    )
