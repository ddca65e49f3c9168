"""Rows of docs/benchmarks.md on speed and memory. See `benchmarks.rows.claims`."""

from collections.abc import Iterator, Mapping

from benchmarks.rows.claim_rows import Claim, Result, Row, of, read_all, row

LOOPS = (
    ("fp32", "a plain PyTorch loop, Hugging Face Llama, FP32", "at least 3x"),
    ("autocast", "the same loop under BF16 autocast", "-"),
    ("trainer", "Hugging Face `Trainer`: bf16, torch_compile, fused AdamW", "at least 1.3x"),
    ("trainer_tuned", "that `Trainer` with tilewright's allocator and thread settings", "-"),
)
OPS = {
    "attention, forward and backward": "attention 8x8x512x64 bf16",
    "attention over packed documents, forward and backward": "attention 8x8x512x64 bf16, packed documents",
    "cross-entropy with its GEMMs, forward and backward": "loss 4096x512x16384 bf16",
}
CLASSES = {"avx2": ("AVX2, FP32 GEMMs", 0.75), "avx512": ("AVX-512 BF16", 0.65), "amx": ("AMX", 0.50)}
"""Of processors, by the ends of names of results; and the share of its matmuls' rate that a compiled step must have."""
SPEEDS = {
    "eager over compiled": (0.7, "our decoder of 47M parameters, eager against compiled"),
    "llama over ours, compiled": (0.85, "transformers' Llama of 47M parameters against our decoder, compiled"),
    "llama over ours, eager": (0.9, "the same, eager"),
}
"""The least of each ratio, and what it is of."""


def speed() -> Iterator[Row]:
    yield from of("throughput_*", *(
        Claim(f"{{result}}_{loop}", f"tokens/s of a 47M decoder in `bf16_mixed`, against {text}", target,
              f"tilewright over {loop}")
        for loop, text, target in LOOPS
    ))  # fmt: skip
    yield from of("step_share_*", _shares)
    yield from of("ops_*", *(
        Claim(f"{{result}}_{text}", f"speed of {text}, against torch's own", "at least 1x", f"{case}/speedup")
        for text, case in OPS.items()
    ))  # fmt: skip


def _shares(result: Result) -> Iterator[Row]:
    least = CLASSES[result.name.removeprefix("step_share_")][1]
    cases = {name: found for name, found in result.results.items() if isinstance(found, Mapping)}
    for name in (name for name in cases if name.endswith(" ours compiled")):
        size, share = name.split()[0], cases[name]["matmuls"]["share"]
        metric = f"share of its matmuls' rate that a compiled step reaches, decoder of {size.upper()} parameters"
        yield row(result, f"{result.name}_{size}", metric, f"at least {least}", share, "{:.2f}")
    for name, (target, text) in SPEEDS.items():
        yield row(result, f"{result.name}_{name}", f"tokens/s of {text}", f"at least {target}x", result.results[name])
    name, found = min(cases.items(), key=lambda case: case[1]["explained"])
    metric = f"share of a step whose owner is named, least of {len(cases)} cases ({name})"
    yield row(result, f"{result.name}_owners", metric, "at least 90 %", 100 * found["explained"], "{:.0f} %")


def share_table() -> list[str]:
    """The seconds of steps by class of processor, from the results of `benchmarks.runs.step_share`."""
    lines = [
        "| class | model and layers | tokens/s | matmuls reach | by themselves | share |",
        "|---|---|---:|---:|---:|---:|",
    ]
    found = {result.name.removeprefix("step_share_"): result for result in read_all("step_share_*")}
    for kind, (name, least) in CLASSES.items():
        if kind not in found:
            lines.append(f"| {name} | not run | | | | at least {least} wanted |")
            continue
        for case, one in found[kind].results.items():
            if isinstance(one, dict):
                rates = [f"{one['matmuls'][key] / 1e9:,.0f} GFLOP/s" for key in ("reached", "alone")]
                wanted = f" (at least {least} wanted)" if case.endswith("ours compiled") else ""
                cells = [f"{one['tokens_per_s']:,.0f}", *rates, f"{one['matmuls']['share']:.2f}{wanted}"]
                lines.append(f"| {name}, {found[kind].record['date']} | {case} | {' | '.join(cells)} |")
    return lines


def memory() -> Iterator[Row]:
    yield from of("headlines_*", _headlines)
    yield from of("tiers_cpu", *(
        Claim(f"hidden_{store}", f"wait for offload to {text} that prefetch hides", "-", f"{store}/hidden", "{:.0f} %",
              100)
        for store, text in (("host", "memory"), ("disk", "disk"))
    ))  # fmt: skip


def _headlines(result: Result) -> Iterator[Row]:
    pairs = (
        ("bits8_disk", "standard", "at most -70 %", "at most 1.5x",
         "8-bit moments on disk, layer by layer, against the standard executor"),
        ("bits8", "peer", "less", "-", "recipe `slice_cpu` against the tuned loop"),
        ("bits8", "peer_in_backward", "less", "-", "recipe `slice_cpu` against the loop tuned further"),
    )  # fmt: skip
    found = result.results["compiled"]
    for one, other, target, slower, text in pairs:
        key, pair, less = f"{one}_{other}", found[f"{one} against {other}"], {"at_most": 0} if target == "less" else {}
        first, second = (found[name]["peak_bytes"] - found[name]["base_bytes"] for name in (one, other))
        kinds = {"": pair["peak_change"], ", without the bytes of loaded libraries": first / second - 1}
        for kind, change in kinds.items():
            metric = f"peak memory, 209M parameters, {text}{kind}"
            yield row(result, f"{key}{kind}", metric, target, 100 * change, "{:+.0f} %", **less)
        metric = f"processor time, 209M parameters, {text}"
        yield row(result, f"{key} time", metric, slower, pair["processor_s_ratio"])
