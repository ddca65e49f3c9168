"""Rows of docs/benchmarks.md on data builds, and on mixing of domains and the stream. See `benchmarks.rows.claims`."""

from collections.abc import Iterator

from benchmarks.rows.claim_rows import GIB, Claim, Result, Row, of, read, row
from benchmarks.rows.verdict import NO_TARGET, Verdict, seeds


def builds() -> Iterator[Row]:
    yield from of("data_peer_*", _peer)
    yield from of("data_memory", _memory)
    yield from of("data_copies", _copies)
    yield from of("data_kills", _kills)
    yield from of("data_noise_seeds", _noise)


def _peer(result: Result) -> Iterator[Row]:
    parts = (
        ("tilewright", "datatrove", "at least 1.2x", "read, rules, near-copies, write"),
        ("tilewright, tokens", "datatrove, tokens", "at least 1x", "the same with tokens"),
    )
    peer, size = f"datatrove {result.results['datatrove']}", result.results["input_bytes"] / 1e6
    for ours, theirs, target, what in parts:
        ratio, job = result.results["ratios"][f"{ours} over {theirs}"], result.results["jobs"][ours]
        for kind, said in (("wall", "speed"), ("processor", "speed by processor time")):
            metric = f"{said} of a data build of {size:.0f} MB on two cores, {what}, against {peer}"
            yield row(result, f"{result.name}_{ours}_{kind}", metric, target, ratio[kind])
        metric, rate = f"of it per processor second, {what}", job["mb_per_processor_s"]
        yield row(result, f"{result.name}_{ours}_rate", metric, "at least 1 MB", rate, "{:.2f} MB")


def _memory(result: Result) -> Iterator[Row]:
    found, growth = result.results["rows"], result.results["growth"]
    sizes = [f"{one['input_bytes'] / 1e9:.1f} GB" for one in (found[-1], found[0])]
    metric = f"peak memory of a data build, all processes, {sizes[0]} of input against {sizes[1]}"
    yield row(result, "data_memory_growth", metric, "at most 1.2x", growth)
    peak = max(one["peak_bytes"] for one in found) / GIB
    yield row(result, "data_memory_peak", "the same: greatest peak", "at most 1 GiB", peak, "{:.2f} GiB")
    rate = min(one["mb_per_processor_s"] for one in found)
    metric = "the same: input per processor second, all stages"
    yield row(result, "data_memory_rate", metric, "at least 1 MB", rate, "{:.2f} MB")


def _copies(result: Result) -> Iterator[Row]:
    planted = result.results["planted"]
    found = {threshold: planted["thresholds"][threshold] for threshold in ("0.5", "0.8")}
    what = f"of {planted['copies']:,} copies with {100 * result.results['changed_words']:.0f} % of the words changed"
    metric, share = f"{what}, found at a threshold of 0.5", 100 * found["0.5"]["found"]
    yield row(result, "data_copies_found", metric, "at least 98 %", share, "{:.1f} %")
    metric, share = (
        f"of {planted['documents']:,} distinct documents, lost at that threshold",
        100 * found["0.5"]["lost"],
    )
    yield row(result, "data_copies_lost", metric, "at most 0.5 %", share, "{:.2f} %")
    metric, share = f"{what}, found at a threshold of 0.8, the default", 100 * found["0.8"]["found"]
    yield row(result, "data_copies_default", metric, "-", share, "{:.1f} %")


def _kills(result: Result) -> Iterator[Row]:
    found = result.results
    same, of_all = found["builds_with_equal_bytes"], found["builds"]
    metric = "data builds on 1, 2 and 4 processes and two ranks, killed at random moments, with equal bytes"
    said = f"{same} of {of_all} builds, {found['kills']} kills"
    yield row(result, "data_kills", metric, "all", same, said=said, at_least=of_all)
    again = found["units_written_again"]
    yield row(result, "data_kills_again", "the same: finished units written again", "0", again, "{}", at_most=0)


def _noise(result: Result) -> Iterator[Row]:
    for name, found in result.results["noise"].items():
        what = f"by the noise filter of a data build, {name}, {result.results['seeds']} seeds"
        noise = sum(num for kind, num in found["records"].items() if kind not in ("clean", "scrambled"))
        metric, shares = f"of {noise} planted texts of noise, removed {what}", found["recall"]["samples"]
        shares = [100 * share for share in shares]
        yield row(result, f"data_noise_recall_{name}", metric, "at least 75 %", shares, "{:.1f} %")
        metric, shares = f"of {found['records']['clean']:,} other texts, lost {what}", found["lost"]["samples"]
        shares = [100 * share for share in shares]
        yield row(result, f"data_noise_lost_{name}", metric, "at most 1 %", shares, "{:.2f} %")


def copies_table() -> list[str]:
    """Copies in the default corpus, by domain."""
    found = read("data_copies").results
    kinds = ("exact", "near at 0.8", "near at 0.5")
    lines = [
        "### Copies in the default corpus",
        "",
        "Of the records that are read; near-copies are counted after exact ones went.",
        "",
        "| domain | records | MB | " + " | ".join(f"{kind}: records, share of bytes" for kind in kinds) + " |",
        "|---" + "|---:" * (2 + len(kinds)) + "|",
    ]
    for domain, counted in found["installed"].items():
        count, size = counted["all"]
        pairs = [counted.get(kind, (0, 0)) for kind in kinds]
        cells = [f"{copies:,}, {100 * num_bytes / size:.1f} %" for copies, num_bytes in pairs]
        lines.append(f"| {domain} | {count:,} | {size / 1e6:.1f} | {' | '.join(cells)} |")
    lines += ["", "Copies with 5 % of the words changed, and distinct documents, by threshold:", ""]
    lines += ["| threshold | copies found | documents lost |", "|---:|---:|---:|"]
    for threshold, one in found["planted"]["thresholds"].items():
        lines.append(f"| {threshold} | {100 * one['found']:.1f} % | {100 * one['lost']:.2f} % |")
    return lines


# ---- mixing and the stream ----


def stream() -> Iterator[Row]:
    yield from of("loader_peer", _loader)
    line = "from 50 ms of latency and 20 MB/s, a cache of a tenth"
    yield from of("far_reads", *(
        claim
        for kind in ("fixed weights", "moving weights")
        for claim in (
            Claim(f"far_wait_{kind}", f"step time spent waiting {line}, {kind}", "at most 1 %", f"{kind}/wait_share",
                  "{:.2f} %", 100),
            Claim(f"far_bytes_{kind}", f"bytes fetched per epoch {line}, {kind}", "at most 1.1x the data",
                  f"{kind}/fetched_to_data"),
        )
    ))  # fmt: skip
    yield from of("mixing_kills", _mixing_kills)
    yield from of("data_helps", _helps)


def _loader(result: Result) -> Iterator[Row]:
    for kind, text, target in (
        ("packed", "packed rows", "at least 3x"), ("blocks", "plain blocks of tokens", "at least 1x"),
    ):  # fmt: skip
        ours, peer = (result.results[kind][name]["processor_s"] for name in ("stream", "torchdata, 0 workers"))
        ratios = [other / mine for mine, other in zip(ours["samples"], peer["samples"], strict=True)]
        metric = f"batches of {text} per processor second, against torchdata's StatefulDataLoader without workers"
        yield row(result, f"loader_{kind}", metric, target, ratios)


def _mixing_kills(result: Result) -> Iterator[Row]:
    found = result.results
    same = min(found[name] for name in found if name.startswith("runs_with_equal_"))
    said = f"{same} of {found['runs']} runs, {found['kills']} kills"
    metric = "runs with moving weights, killed at random steps, that end with the bits, moves and losses of a whole one"
    yield row(result, "mixing_kills", metric, "each run", same, said=said, at_least=found["runs"])


def _helps(result: Result) -> Iterator[Row]:
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
