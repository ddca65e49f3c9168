"""The table of `benchmarks.headlines` in Markdown, made from its result file: for README.md, and beside the result."""

from typing import Any

from benchmarks.common import place

TEXTS = {
    "plain": "plain PyTorch loop, Hugging Face Llama, FP32 AdamW",
    "autocast": "the same under BF16 autocast",
    "peer": "tuned loop: the same model in pure BF16, layers checkpointed, loss in chunks, torchao's 8-bit AdamW",
    "peer_in_backward": "the same, each parameter updated in the backward pass: no clipping, no accumulation",
    "standard": "**tilewright**, standard executor, FP32 weights and states",
    "recomputed": '+ `train.activation_checkpoint = "full"`',
    "layer_major": '`memory.executor = "layer_major"` instead: same formats, one layer\'s gradients at a time',
    "bits8": "+ 8-bit moments, BF16 weights with stochastic rounding (recipe `slice_cpu`)",
    "bits8_disk": '+ `memory.states = "disk"`',
}
MODES = ("eager", "compiled")


def table(record: dict[str, Any], cap: dict[str, Any] | None) -> list[str]:
    """Peak memory, seconds and losses of all rows, eager and compiled, and who finishes under a hard limit.

    Args:
        record: the result file of `benchmarks.headlines contest`.
        cap: that of `benchmarks.headlines cap` on the same machine, if there is one.
    """
    results = record["results"]
    modes = [mode for mode in MODES if mode in results]
    first = next(row for row in results[modes[0]].values() if "step_s" in row)
    limit = f" under {cap['results']['limit_bytes'] / 2**30:g} GiB |" if cap else ""
    heads = [f"peak, {mode} | seconds | of the processor | loss of step {len(first['losses'])} |" for mode in modes]
    lines = [
        f"One decoder of 209M parameters, {results['tokens_per_step']:,} tokens a step in 4 micro-batches, "
        f"{place(record)}; medians of {len(first['step_s']['samples'])} turns in alternation (`{record['command']}`). "
        "Peak of the whole process: libraries (in brackets) and, where layers are compiled, the compiler are in it. "
        "Seconds a step by the clock, and of the processor over all threads, which do not count waiting for other "
        "programs. A lower loss of one row is not a better method: clipping and the rounding of weights differ.",
        "",
        f"| | {' '.join(heads)}{limit}",
        "|---" + "|---:" * (4 * len(modes)) + ("|---|" if cap else "|"),
    ]
    for key, text in TEXTS.items():
        rows = [results[mode].get(key) for mode in modes]
        if any(rows):
            cells = [text, *(cell for row in rows for cell in _cells(row))]
            if cap:
                tried = cap["results"].get(key)
                cells.append("" if tried is None else "trains" if tried["finished"] else "out of memory")
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_ratios(results[modes[-1]], modes[-1])]


def _cells(row: dict[str, Any] | None) -> list[str]:
    """A row's cells in one mode: empty where it does not take part, a reason where it could not."""
    if row is None:
        return [""] * 4
    if "not_measured" in row:
        return ["not measured", "", "", ""]
    peak, base = row["peak_bytes"] / 2**30, row["base_bytes"] / 2**30
    times = [f"{row[key]['median']:.1f}" for key in ("step_s", "processor_s")]
    return [f"{peak:.2f} GiB ({base:.2f})", *times, f"{row['losses'][-1]:.3f}"]


def _ratios(results: dict[str, Any], mode: str) -> list[str]:
    """One row against another: memory, and time turn by turn."""
    names = [key for key in results if " against " in key and not key.startswith("standard")]
    lines = [f"| {mode} | peak | seconds, turn by turn | of the processor |", "|---|---:|---:|---:|"]
    for name in names:
        found = results[name]
        times = [f"{found[key]['median']:.2f}x" for key in ("step_s_ratio", "processor_s_ratio")]
        lines.append(f"| `{name}` | {100 * found['peak_change']:+.0f} % | {' | '.join(times)} |")
    return lines
