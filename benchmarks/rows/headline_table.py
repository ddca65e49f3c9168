"""The table of `benchmarks.runs.headlines` in Markdown, from its result file: for README.md, and beside the result."""

from typing import Any

from benchmarks.common import place

TEXTS = {
    "plain": "plain PyTorch loop, Hugging Face Llama, FP32 AdamW, no autocast",
    "autocast": "plain PyTorch loop, Hugging Face Llama, FP32 AdamW, BF16 autocast",
    "peer": "tuned loop: the same model in pure BF16, layers checkpointed, loss in chunks, torchao's 8-bit AdamW",
    "peer_in_backward": "tuned further: each parameter updated in the backward pass, no clipping, no accumulation",
    "standard": "**tilewright**, standard executor, FP32 weights and states",
    "recomputed": 'the same with `train.activation_checkpoint = "full"`',
    "layer_major": "**tilewright**, layer by layer in the same formats",
    "bits8": "**tilewright**, recipe `slice_cpu`: layer by layer, 8-bit moments, BF16 weights rounded stochastically",
    "bits8_disk": 'the same with `memory.offload_optimizer = "disk"`',
}
MODES = ("eager", "compiled")


def table(record: dict[str, Any], cap: dict[str, Any] | None) -> list[str]:
    """Peak memory, seconds and losses of all rows, eager and compiled, and who finishes under a hard limit.

    Args:
        record: the result file of `benchmarks.runs.headlines contest`.
        cap: that of `benchmarks.runs.headlines cap` on the same machine, if there is one.
    """
    results = record["results"]
    modes = [mode for mode in MODES if mode in results]
    first = next(row for row in results[modes[0]].values() if "step_s" in row)
    limit = f" under {cap['results']['limit_bytes'] / 2**30:g} GiB |" if cap else ""
    heads = [f"peak, {mode} | seconds | of the processor | loss of step {len(first['losses'])} |" for mode in modes]
    lines = [
        f"One decoder of 209M parameters, {results['tokens_per_step']:,} tokens per step in 4 micro-batches, "
        f"{place(record)}; medians of {len(first['step_s']['samples'])} runs in alternation (`{record['command']}`). "
        "The peak is that of the whole process, with its libraries (in brackets; transformers and torchao are large) "
        "and the compiler. Seconds per step are wall-clock seconds; processor seconds are the sum over all threads and "
        "leave out waiting for other programs. The losses show that all rows train the same model on the same tokens; "
        "they differ by clipping and by the rounding of weights, and four steps do not measure quality.",
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
    for mode in modes:
        lines += ["", *_ratios(results[mode], mode)]
    return lines


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
    """One row against another: memory with and without its libraries, and time turn by turn."""
    lines = [
        f"| {mode} | peak | without libraries | seconds, turn by turn | of the processor |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in (key for key in results if " against " in key and not key.startswith("standard")):
        found = results[name]
        one, other = (results[row]["peak_bytes"] - results[row]["base_bytes"] for row in name.split(" against "))
        times = [f"{found[key]['median']:.2f}x" for key in ("step_s_ratio", "processor_s_ratio")]
        memory = [f"{100 * change:+.0f} %" for change in (found["peak_change"], one / other - 1)]
        lines.append(f"| `{name}` | {' | '.join([*memory, *times])} |")
    return lines
