"""Rows of docs/benchmarks.md on mixing of domains and on the stream: the loader's peer, reads from far away, kills, and
what moving weights are worth. See `benchmarks.rows.claims`."""

from collections.abc import Iterator

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Row, read
from benchmarks.rows.verdict import NO_TARGET, Verdict, once, seeds, turns


def rows() -> Iterator[Row]:
    """All of them that have a result."""
    for name, found in _ROWS:
        if (RESULTS / f"{name}.json").exists():
            yield from found()


def _loader() -> Iterator[Row]:
    result = read("loader_peer")
    for kind, text, least in (("packed", "packed rows", 3.0), ("blocks", "plain blocks of tokens", 1.0)):
        ours, peer = (result.results[kind][name]["processor_s"] for name in ("stream", "torchdata, 0 workers"))
        ratios = [other / mine for mine, other in zip(ours["samples"], peer["samples"], strict=True)]
        verdict = turns(ratios, lambda number: f"{number:.2f}x", at_least=least)
        metric = f"batches of {text} per processor second, against torchdata's StatefulDataLoader without workers"
        yield Row(f"loader_{kind}", metric, f"at least {least:g}x", verdict, result)


def _far() -> Iterator[Row]:
    result = read("far_reads")
    for kind in ("fixed weights", "moving weights"):
        found = result.results[kind]
        line = f"from 50 ms of latency and 20 MB/s, a cache of a tenth, {kind}"
        share = 100 * found["wait_share"]
        verdict = once(share, f"{share:.2f} %", at_most=1)
        yield Row(f"far_wait_{kind}", f"step time spent waiting {line}", "at most 1 %", verdict, result)
        ratio = found["fetched_to_data"]
        verdict = once(ratio, f"{ratio:.2f}x", at_most=1.1)
        yield Row(f"far_bytes_{kind}", f"bytes fetched per epoch {line}", "at most 1.1x the data", verdict, result)


def _kills() -> Iterator[Row]:
    result = read("mixing_kills")
    found = result.results
    same = min(found[name] for name in found if name.startswith("runs_with_equal_"))
    verdict = once(same, f"{same} of {found['runs']} runs, {found['kills']} kills", at_least=found["runs"])
    metric = "runs with moving weights, killed at random steps, that end with the bits, moves and losses of a whole one"
    yield Row("mixing_kills", metric, "each run", verdict, result)


def _helps() -> Iterator[Row]:
    result = read("data_helps")
    tokens = result.results["tokens_per_run"] / 1e6
    static = result.results["policies"]["static"]
    for policy, found in result.results["policies"].items():
        for measure, text in (("mean", "mean of the domains"), ("worst", "worst domain")):
            base, mine = (dict(zip(one["seeds"], one[measure], strict=True)) for one in (static, found))
            gaps = [100 * (loss - base[seed]) / base[seed] for seed, loss in mine.items() if seed in base]
            if found is not static and gaps:
                metric = f"held-out loss of `{policy}` against `static`, {text}, {tokens:.1f}M tokens per run"
                moved = any(found["moves"])  # else it is the run of fixed weights, equal to the bit
                none = Verdict(f"equal: no move in {len(gaps)} runs", NO_TARGET)
                verdict = seeds(gaps, None, at_most=0) if moved else none
                yield Row(f"helps_{policy}_{measure}", metric, "at most +0 %" if moved else "-", verdict, result)


_ROWS = (("loader_peer", _loader), ("far_reads", _far), ("mixing_kills", _kills), ("data_helps", _helps))
