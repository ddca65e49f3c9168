"""Rows of docs/benchmarks.md on the plans of several ranks. See `benchmarks.rows.claims`."""

from collections.abc import Iterator

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Row, read
from benchmarks.rows.verdict import NO_TARGET, Verdict, once

MIB = 2**20


def rows() -> Iterator[Row]:
    if (RESULTS / "rank_fill.json").exists():
        yield from _beside_the_shards()
    if not (RESULTS / "rank_memory.json").exists():
        return
    result = read("rank_memory")
    for world, cases in result.results["worlds"].items():
        worst = max(case["worst"] for case in cases.values())
        yield Row(
            f"rank_memory_{world}",
            f"parameters, gradients and optimizer states of each of {world} ranks against their plan, "
            f"worst of {len(cases)} cases",
            "within 5 %",
            once(worst, f"off by {100 * worst:.3f} % at most", at_most=0.05),
            result,
        )
        name, first = next(iter(cases.items()))  # the others' processes keep pages of those before
        peaks = [row["measured_peak"] / row["planned_peak"] - 1 for row in first["ranks"]]
        said = f"{100 * min(peaks):+.0f} % to {100 * max(peaks):+.0f} % (1 run)"
        metric = f"peak memory of each of {world} ranks against its plan, 10M model, {name}"
        yield Row(f"rank_peak_{world}", metric, "-", Verdict(said, NO_TARGET), result)


def _beside_the_shards() -> Iterator[Row]:
    result = read("rank_fill")
    whole = result.results["largest_parameter_bytes"] / MIB
    for world, measured in result.results["worlds"].items():
        most = measured["worst_beside_bytes"] / MIB
        metric = (
            f"memory of each of {world} ranks beside its shards as it draws or reads them, {whole:.0f} MiB embedding"
        )
        yield Row(f"rank_fill_{world}", metric, "< 16 MiB", once(most, f"{most:.1f} MiB at most", at_most=16), result)
