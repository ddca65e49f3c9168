"""Rows of docs/benchmarks.md on data builds: the peer, memory, copies, kills, noise. See `benchmarks.rows.claims`."""

from collections.abc import Iterator

from benchmarks.common import RESULTS
from benchmarks.rows.claim_rows import Row, read, read_all
from benchmarks.rows.verdict import Verdict, once, turns

GIB = 2**30


def rows() -> Iterator[Row]:
    """All of them that have a result."""
    yield from _peer()
    for name, found in _ROWS:
        if (RESULTS / f"{name}.json").exists():
            yield from found()


def _peer() -> Iterator[Row]:
    parts = (
        ("tilewright", "datatrove", 1.2, "read, rules, near-copies, write"),
        ("tilewright, tokens", "datatrove, tokens", 1.0, "the same with tokens"),
    )
    for result in read_all("data_peer"):
        peer, size = f"datatrove {result.results['datatrove']}", result.results["input_bytes"] / 1e6
        for ours, theirs, least, what in parts:
            ratio, job = result.results["ratios"][f"{ours} over {theirs}"], result.results["jobs"][ours]
            for kind, said in (("wall", "speed"), ("processor", "speed by processor time")):
                verdict = turns(ratio[kind]["samples"], lambda number: f"{number:.2f}x", at_least=least)
                metric = f"{said} of a data build of {size:.0f} MB on two cores, {what}, against {peer}"
                yield Row(f"{result.name}_{ours}_{kind}", metric, f"at least {least:g}x", verdict, result)
            rate = job["mb_per_processor_s"]
            verdict = turns(rate["samples"], lambda number: f"{number:.2f} MB", at_least=1.0)
            metric = f"of it per processor second, {what}"
            yield Row(f"{result.name}_{ours}_rate", metric, "at least 1 MB", verdict, result)


def _memory() -> Iterator[Row]:
    result = read("data_memory")
    found = result.results["rows"]
    least, most = found[0], found[-1]
    sizes = f"{most['input_bytes'] / 1e9:.1f} GB of input against {least['input_bytes'] / 1e9:.1f} GB"
    growth = result.results["growth"]
    verdict = once(growth, f"{growth:.2f}x", at_most=1.2)
    yield Row(
        "data_memory_growth", f"peak memory of a data build, all processes, {sizes}", "at most 1.2x", verdict, result
    )
    peak = max(row["peak_bytes"] for row in found)
    verdict = once(peak, f"{peak / GIB:.2f} GiB", at_most=GIB)
    yield Row("data_memory_peak", "the same: greatest peak", "at most 1 GiB", verdict, result)
    rate = min(row["mb_per_processor_s"] for row in found)
    verdict = once(rate, f"{rate:.2f} MB", at_least=1.0)
    yield Row("data_memory_rate", "the same: input per processor second, all stages", "at least 1 MB", verdict, result)


def _copies() -> Iterator[Row]:
    result = read("data_copies")
    planted = result.results["planted"]
    share = f"{100 * result.results['changed_words']:.0f} %"
    for threshold in ("0.5", "0.8"):
        found = planted["thresholds"][threshold]
        what = f"of {planted['copies']:,} copies with {share} of the words changed, found at a threshold of {threshold}"
        text = f"{100 * found['found']:.1f} %"
        if threshold == "0.5":
            verdict = once(found["found"], text, at_least=0.98)
            yield Row("data_copies_found", what, "at least 98 %", verdict, result)
            verdict = once(found["lost"], f"{100 * found['lost']:.2f} %", at_most=0.005)
            metric = f"of {planted['documents']:,} distinct documents, lost at that threshold"
            yield Row("data_copies_lost", metric, "at most 0.5 %", verdict, result)
        else:
            yield Row("data_copies_default", f"{what}, the default", "-", Verdict(text, "-"), result)


def _kills() -> Iterator[Row]:
    result = read("data_kills")
    found = result.results
    text = f"{found['builds_with_equal_bytes']} of {found['builds']} builds, {found['kills']} kills"
    verdict = once(found["builds_with_equal_bytes"], text, at_least=found["builds"])
    metric = "data builds on 1, 2 and 4 processes and two ranks, killed at random moments, with equal bytes"
    yield Row("data_kills", metric, "all", verdict, result)
    again = found["units_written_again"]
    yield Row(
        "data_kills_again", "the same: finished units written again", "0", once(again, f"{again}", at_most=0), result
    )


def _noise() -> Iterator[Row]:
    result = read("data_noise_seeds")
    for name, found in result.results["noise"].items():
        what = f"by the noise filter of a data build, {name}, {result.results['seeds']} seeds"
        noise = sum(num for kind, num in found["records"].items() if kind not in ("clean", "scrambled"))
        verdict = turns(found["recall"]["samples"], lambda share: f"{100 * share:.1f} %", at_least=0.75)
        metric = f"of {noise} planted texts of noise, removed {what}"
        yield Row(f"data_noise_recall_{name}", metric, "at least 75 %", verdict, result)
        verdict = turns(found["lost"]["samples"], lambda share: f"{100 * share:.2f} %", at_most=0.01)
        metric = f"of {found['records']['clean']:,} other texts, lost {what}"
        yield Row(f"data_noise_lost_{name}", metric, "at most 1 %", verdict, result)


_ROWS = (
    ("data_memory", _memory),
    ("data_copies", _copies),
    ("data_kills", _kills),
    ("data_noise_seeds", _noise),
)


def copies_table() -> list[str]:
    """Copies in the default corpus, by domain."""
    if not (RESULTS / "data_copies.json").exists():
        return []
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
    for domain, row in found["installed"].items():
        count, size = row["all"]
        cells = []
        for kind in kinds:
            copies, num_bytes = row.get(kind, (0, 0))
            cells.append(f"{copies:,}, {100 * num_bytes / size:.1f} %")
        lines.append(f"| {domain} | {count:,} | {size / 1e6:.1f} | {' | '.join(cells)} |")
    lines += ["", "Copies with 5 % of the words changed, and distinct documents, by threshold:", ""]
    lines += ["| threshold | copies found | documents lost |", "|---:|---:|---:|"]
    for threshold, row in found["planted"]["thresholds"].items():
        lines.append(f"| {threshold} | {100 * row['found']:.1f} % | {100 * row['lost']:.2f} % |")
    return lines
